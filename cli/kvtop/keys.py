"""The effects of keys: the new state of the screen, and the actions for the caller.

    ui, effects = press(ui, "j", scene.instances)
    for effect in effects: ...             # "quit", "look" or Ask; the caller performs them

A key is one character, or a name: up, down, page_up, page_down, home, end, enter, escape,
backspace.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from kvelastic.cli.kvtop.help_page import help_lines
from kvelastic.cli.kvtop.scene import ORDERS, Instance, ordered
from kvelastic.cli.kvtop.text import ASCII
from kvelastic.errors import InvalidArgumentError
from kvelastic.units import MAX_PRIORITY, format_size, parse_percent, parse_size

Mode = Literal["list", "filter", "entry", "confirm", "help"]
Setting = Literal["limit", "min", "priority", "sleep"]
Mood = Literal["plain", "good", "warn", "bad"]

PAGE_ROWS: Final = 10
_MOST_TYPED: Final = 64
_SETTINGS: Final[dict[str, Setting]] = {"l": "limit", "m": "min", "p": "priority"}
_SLEEPS: Final = {"z": True, "w": False}


@dataclass(frozen=True)
class Ask:
    """Request one setting of an instance. `value` is bytes, a priority, 1 (sleep) or 0 (wake)."""

    name: str
    label: str
    setting: Setting
    value: int


Effect = Ask | Literal["quit", "look"]
"""A request, the end of the program, or a look at the instances before the interval ends."""


@dataclass(frozen=True)
class Ui:
    """The state of the screen, except for the values read."""

    mode: Mode = "list"
    order: str = ORDERS[0]
    is_reversed: bool = False
    filter_text: str = ""
    selected: str = ""
    """Key of the selected instance."""
    selected_at: int = 0
    """Its position in the list. If it ends, the next instance at this position is selected."""
    typed: str = ""
    setting: Setting = "limit"
    target: Instance | None = None
    """The instance whose setting is being changed, as it was at the start of the change."""
    value: int = 0
    problem: str = ""
    """The error in the typed text."""
    message: str = ""
    mood: Mood = "plain"
    help_from: int = 0
    """The first visible line of the help page."""


def shown(ui: Ui, instances: Sequence[Instance]) -> list[Instance]:
    """Return the instances of the list, filtered and sorted."""
    return ordered(instances, ui.order, is_reversed=ui.is_reversed, wanted=ui.filter_text)


def selected_at(ui: Ui, rows: Sequence[Instance]) -> int:
    """Return the position of the selected instance in `rows`, or its old one if it has ended."""
    for at, one in enumerate(rows):
        if one.key == ui.selected:
            return at
    return max(0, min(ui.selected_at, len(rows) - 1))


def with_message(ui: Ui, message: str, mood: Mood = "plain") -> Ui:
    """Return the state with a message, which the next key in the list removes."""
    return replace(ui, message=message, mood=mood)


def found(ui: Ui, instances: Sequence[Instance]) -> Ui:
    """Return the state with an existing instance selected."""
    rows = shown(ui, instances)
    return _select(ui, rows, selected_at(ui, rows)) if rows else ui


def press(ui: Ui, key: str, instances: Sequence[Instance]) -> tuple[Ui, list[Effect]]:
    """Return the state and the effects after a key. In the list, any key removes a message."""
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
        return ui, ["quit"]
    if key == " ":
        return ui, ["look"]
    changed = _arranged(ui, key)
    if changed is not None:
        return found(changed, instances), []
    rows = shown(ui, instances)
    return (_press_row(ui, key, rows) if rows else ui), []


def _press_row(ui: Ui, key: str, rows: Sequence[Instance]) -> Ui:
    """Return the state after a key that acts on the selected instance."""
    at = selected_at(ui, rows)
    if key in _SETTINGS:
        return _begin_entry(ui, rows[at], _SETTINGS[key])
    if key in _SLEEPS:
        return _begin_sleep(ui, rows[at], asleep=_SLEEPS[key])
    if key in _STEPS:
        return _select(ui, rows, max(0, min(at + _STEPS[key], len(rows) - 1)))
    return ui


def _arranged(ui: Ui, key: str) -> Ui | None:
    """Return the state after a key that changes the view; None for other keys."""
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
    """Update the list with each typed key. Esc restores the previous filter."""
    if key == "enter":
        return replace(ui, mode="list", typed="")
    if key == "escape":
        return found(replace(ui, mode="list", filter_text=ui.typed, typed=""), instances)
    return found(replace(ui, filter_text=_type(ui.filter_text, key)), instances)


def _begin_entry(ui: Ui, target: Instance, setting: Setting) -> Ui:
    if target.state in _ENDED:
        return with_message(ui, f"{target.label} is {target.state}: nothing can be set", "warn")
    return replace(ui, mode="entry", setting=setting, target=target, typed="", problem="")


def _begin_sleep(ui: Ui, target: Instance, *, asleep: bool) -> Ui:
    """Ask for confirmation immediately: sleep and wake need no value."""
    if target.state in _ENDED:
        return with_message(ui, f"{target.label} is {target.state}: nothing can be set", "warn")
    if target.asleep == asleep:
        return with_message(ui, f"{target.label} is {'asleep' if asleep else 'awake'} already")
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
        return with_message(asked, message), [ask]
    if key in {"n", "N", "q", "escape"}:
        return with_message(
            replace(ui, mode="list", target=None, typed=""), "nothing was changed"
        ), []
    return ui, []


def _type(text: str, key: str) -> str:
    if key == "backspace":
        return text[:-1]
    if key == "\x15":  # Ctrl-U, which clears the line in a shell
        return ""
    return text + key if len(key) == 1 and key.isprintable() and len(text) < _MOST_TYPED else text


def read_value(setting: Setting, text: str, target: Instance) -> int:
    """Return the typed value: a priority, a size, or a percentage of the target's device.

    Raises `InvalidArgumentError` with the accepted format.
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
    """Return a setting's value as text."""
    if value is None:
        return "unknown"
    return str(value) if setting == "priority" else format_size(value)


def request_text(setting: Setting, value: int) -> str:
    """Return a request as text: `limit 1.00 GiB`, `sleep`."""
    if setting == "sleep":
        return "sleep" if value else "wake"
    return f"{setting} {value_text(setting, value)}"


def value_of(setting: Setting, instance: Instance) -> int | None:
    """Return an instance's current value of a setting."""
    if setting == "sleep":
        return int(instance.asleep)
    if setting == "limit":
        return instance.limit_bytes
    return instance.min_bytes if setting == "min" else instance.priority
