"""What a key does: the state of the screen before and after it, and what is to be done outside.

    ui, effects = press(ui, "j", scene.instances)
    for effect in effects: ...             # Quit, Look or Ask; nothing is done in here

A key is one character, or the name of one that has none: up, down, page_up, page_down, home, end,
enter, escape, backspace.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from kvelastic.cli.kvtop.help_page import help_lines
from kvelastic.cli.kvtop.scene import ORDERS, Instance, ordered
from kvelastic.cli.kvtop.text import ASCII
from kvelastic.errors import InvalidArgumentError
from kvelastic.sizes import MAX_PRIORITY, format_size, parse_percent, parse_size

Mode = Literal["list", "filter", "entry", "confirm", "help"]
Setting = Literal["limit", "min", "priority", "sleep"]
Mood = Literal["plain", "good", "warn", "bad"]

PAGE_ROWS: Final = 10
_MOST_TYPED: Final = 64
_SETTINGS: Final[dict[str, Setting]] = {"l": "limit", "m": "min", "p": "priority"}
_SLEEPS: Final = {"z": True, "w": False}


@dataclass(frozen=True)
class Quit:
    """End the program."""


@dataclass(frozen=True)
class Look:
    """Look now, before the interval is over."""


@dataclass(frozen=True)
class Ask:
    """Request one thing of an instance: `value` is bytes, a priority, 1 to sleep or 0 to wake."""

    name: str
    label: str
    setting: Setting
    value: int


Effect = Quit | Look | Ask


@dataclass(frozen=True)
class Ui:
    """What the screen is like, apart from what was found."""

    mode: Mode = "list"
    order: str = ORDERS[0]
    is_reversed: bool = False
    filter_text: str = ""
    selected: str = ""
    """The instance's key."""
    selected_at: int = 0
    """Its place in the list: who ends leaves the selection to the next one there."""
    typed: str = ""
    setting: Setting = "limit"
    target: Instance | None = None
    """Whose setting is being changed, as it was when that began."""
    value: int = 0
    problem: str = ""
    """What is wrong with what was typed."""
    message: str = ""
    mood: Mood = "plain"
    help_from: int = 0
    """The first line of the help page that is shown."""


def shown(ui: Ui, instances: Sequence[Instance]) -> list[Instance]:
    """The instances as the list has them: filtered and sorted."""
    return ordered(instances, ui.order, is_reversed=ui.is_reversed, wanted=ui.filter_text)


def selected_at(ui: Ui, rows: Sequence[Instance]) -> int:
    """The place of the selected instance among `rows`; where it has ended, of the one there now."""
    for at, one in enumerate(rows):
        if one.key == ui.selected:
            return at
    return max(0, min(ui.selected_at, len(rows) - 1))


def told(ui: Ui, message: str, mood: Mood = "plain") -> Ui:
    """Show a message until the next key that does something else."""
    return replace(ui, message=message, mood=mood)


def found(ui: Ui, instances: Sequence[Instance]) -> Ui:
    """Keep the selection on an instance that is there."""
    rows = shown(ui, instances)
    return _select(ui, rows, selected_at(ui, rows)) if rows else ui


def press(ui: Ui, key: str, instances: Sequence[Instance]) -> tuple[Ui, list[Effect]]:
    """Take one key. Any key takes away a message; one that means nothing here does nothing else."""
    if ui.mode == "help":
        return _press_help(ui, key), []
    if ui.mode == "filter":
        return _press_filter(ui, key, instances), []
    if ui.mode == "entry":
        return _press_entry(ui, key), []
    if ui.mode == "confirm":
        return _press_confirm(ui, key)
    return _press_list(replace(ui, message=""), key, instances)


def _press_list(ui: Ui, key: str, instances: Sequence[Instance]) -> tuple[Ui, list[Effect]]:
    if key in {"q", "Q"}:
        return ui, [Quit()]
    if key == " ":
        return ui, [Look()]
    changed = _arranged(ui, key)
    if changed is not None:
        return found(changed, instances), []
    rows = shown(ui, instances)
    return (_press_row(ui, key, rows) if rows else ui), []


def _press_row(ui: Ui, key: str, rows: Sequence[Instance]) -> Ui:
    """What a key does with the selected instance."""
    at = selected_at(ui, rows)
    if key in _SETTINGS:
        return _begin_entry(ui, rows[at], _SETTINGS[key])
    if key in _SLEEPS:
        return _begin_sleep(ui, rows[at], asleep=_SLEEPS[key])
    if key in _STEPS:
        return _select(ui, rows, max(0, min(at + _STEPS[key], len(rows) - 1)))
    return ui


def _arranged(ui: Ui, key: str) -> Ui | None:
    """What a key makes of what is shown and how; None if it is about something else."""
    changes: dict[str, Callable[[], Ui]] = {
        "?": lambda: replace(ui, mode="help", help_from=0),
        "/": lambda: replace(ui, mode="filter", typed=ui.filter_text),
        "escape": lambda: replace(ui, filter_text=""),
        "s": lambda: _sorted_by(ui, 1),
        "S": lambda: _sorted_by(ui, -1),
        "r": lambda: replace(ui, is_reversed=not ui.is_reversed),
    }
    change = changes.get(_SAME_AS.get(key, key))
    return None if change is None else change()


_SAME_AS: Final = {"h": "?", ">": "s", "<": "S"}
_ENDED: Final = frozenset({"dead", "closing", "unreadable"})
_FAR: Final = 1 << 30
_STEPS: Final = {
    "up": -1, "k": -1, "down": 1, "j": 1, "page_up": -PAGE_ROWS, "page_down": PAGE_ROWS,
    "home": -_FAR, "g": -_FAR, "end": _FAR, "G": _FAR,
}  # fmt: skip


def _select(ui: Ui, rows: Sequence[Instance], at: int) -> Ui:
    return replace(ui, selected=rows[at].key, selected_at=at)


def _sorted_by(ui: Ui, step: int) -> Ui:
    at = (ORDERS.index(ui.order) + step) % len(ORDERS)
    return replace(ui, order=ORDERS[at], is_reversed=False)


def _press_help(ui: Ui, key: str) -> Ui:
    if key in {"q", "Q", "?", "h", "escape", "enter", " "}:
        return replace(ui, mode="list")
    step = _STEPS.get(key)
    last = len(help_lines(ASCII)) - 1
    return ui if step is None else replace(ui, help_from=max(0, min(ui.help_from + step, last)))


def _press_filter(ui: Ui, key: str, instances: Sequence[Instance]) -> Ui:
    """The list follows while one types; Esc brings back what was there before."""
    if key == "enter":
        return replace(ui, mode="list", typed="")
    if key == "escape":
        return found(replace(ui, mode="list", filter_text=ui.typed, typed=""), instances)
    return found(replace(ui, filter_text=_type(ui.filter_text, key)), instances)


def _begin_entry(ui: Ui, target: Instance, setting: Setting) -> Ui:
    if target.state in _ENDED:
        return told(ui, f"{target.label} is {target.state}: nothing can be set", "warn")
    return replace(ui, mode="entry", setting=setting, target=target, typed="", problem="")


def _begin_sleep(ui: Ui, target: Instance, *, asleep: bool) -> Ui:
    """There is nothing to type: the question comes at once."""
    if target.state in _ENDED:
        return told(ui, f"{target.label} is {target.state}: nothing can be set", "warn")
    if target.asleep == asleep:
        return told(ui, f"{target.label} is {'asleep' if asleep else 'awake'} already")
    return replace(ui, mode="confirm", setting="sleep", target=target, value=int(asleep))


def _press_entry(ui: Ui, key: str) -> Ui:
    if key == "escape" or ui.target is None:
        return replace(ui, mode="list", target=None, message="nothing was changed", mood="plain")
    if key != "enter":
        return replace(ui, typed=_type(ui.typed, key), problem="")
    try:
        value = read_value(ui.setting, ui.typed, ui.target)
    except InvalidArgumentError as error:
        return replace(ui, problem=str(error))
    return replace(ui, mode="confirm", value=value, problem="")


def _press_confirm(ui: Ui, key: str) -> tuple[Ui, list[Effect]]:
    target = ui.target
    if key in {"y", "Y"} and target is not None:
        asked = replace(ui, mode="list", target=None, typed="")
        message = f"asking {target.label} for {request_text(ui.setting, ui.value)}"
        ask = Ask(target.name, target.label, ui.setting, ui.value)
        return told(asked, message), [ask]
    if key in {"n", "N", "q", "escape"}:
        return told(replace(ui, mode="list", target=None, typed=""), "nothing was changed"), []
    return ui, []


def _type(text: str, key: str) -> str:
    if key == "backspace":
        return text[:-1]
    if key == "\x15":  # Ctrl-U, which empties a line in a shell
        return ""
    return text + key if len(key) == 1 and key.isprintable() and len(text) < _MOST_TYPED else text


def read_value(setting: Setting, text: str, target: Instance) -> int:
    """Read what was typed: a priority, or a size, or a percentage of the target's device.

    Raises `InvalidArgumentError`, which says what to write.
    """
    if setting == "priority":
        try:
            value = int(text)
        except ValueError:
            raise InvalidArgumentError(
                "write a whole number (higher keeps memory longer)"
            ) from None
        if not -MAX_PRIORITY <= value <= MAX_PRIORITY:
            raise InvalidArgumentError(f"write {-MAX_PRIORITY} to {MAX_PRIORITY}")
        return value
    if not text.strip().endswith("%"):
        try:
            return parse_size(text)
        except InvalidArgumentError:
            raise InvalidArgumentError(
                "write a size (512M, 1.5GiB) or a percentage (80%)"
            ) from None
    if not target.capacity_bytes:
        raise InvalidArgumentError("its device's size is not known: write a size (512M, 1.5GiB)")
    try:
        return int(target.capacity_bytes * parse_percent(text) / 100)
    except InvalidArgumentError:
        raise InvalidArgumentError("write a percentage from 0% to 100%") from None


def value_text(setting: Setting, value: int | None) -> str:
    """A setting's value for people."""
    if value is None:
        return "unknown"
    return str(value) if setting == "priority" else format_size(value)


def request_text(setting: Setting, value: int) -> str:
    """What is requested, for people: `limit 1.00 GiB`, `sleep`."""
    if setting == "sleep":
        return "sleep" if value else "wake"
    return f"{setting} {value_text(setting, value)}"


def value_of(setting: Setting, instance: Instance) -> int | None:
    """What an instance has for a setting now."""
    if setting == "sleep":
        return int(instance.asleep)
    if setting == "limit":
        return instance.limit_bytes
    return instance.min_bytes if setting == "min" else instance.priority
