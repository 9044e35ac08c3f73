"""The screen as lines of styled text. Pure; supports every size down to one cell.

lines = screen(scene, ui, width=80, height=24, glyphs=UNICODE, clock="12:30:01")
len(lines) == 24; every line is at most 80 cells wide
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvelastic.cli.kvtop.bars import amounts, device_bar, uses_of
from kvelastic.cli.kvtop.help_page import help_lines
from kvelastic.cli.kvtop.keys import Ui, request_text, selected_at, shown, value_of, value_text
from kvelastic.cli.kvtop.scene import Device, Instance, Scene
from kvelastic.cli.kvtop.table import DETAIL_LINES, Table, detail_lines
from kvelastic.cli.kvtop.text import (
    ASCII,
    Glyphs,
    Line,
    Span,
    Style,
    cells,
    cut,
    fit,
    line_cells,
    short_size,
    spread,
    to_ascii,
    wrap,
)

NOTHING: Final = "No instances of kvelastic run here."
_MOST_FOOTER_LINES: Final = 3
_HINTS: Final = "j/k select  l limit  m min  p prio  z sleep  s sort  / filter  ? help  q quit"
_HINTS_SHORT: Final = "? help  q quit"


def screen(
    scene: Scene, ui: Ui, *, width: int, height: int, glyphs: Glyphs, clock: str
) -> list[Line]:
    """Return exactly `height` lines of at most `width` cells each."""
    if width <= 0 or height <= 0:
        return []
    if ui.mode == "help":
        lines = _help(ui, width, height, glyphs)
    else:
        footer = _footer(ui, width, min(_MOST_FOOTER_LINES, height), glyphs)
        if height <= len(footer) and ui.mode == "list" and not ui.message:
            footer = []  # with one line, show an instance instead of the hints
        body = _body(scene, ui, width, height - len(footer), glyphs, clock)
        lines = [*body, *footer]
    return [to_ascii(line) for line in lines] if glyphs is ASCII else lines


def plain_screen(scene: Scene, width: int, glyphs: Glyphs) -> str:
    """Return devices and all instances as text for a pipe: `width` cells wide, of any length."""
    lines = device_lines(scene.devices, width, 2 * len(scene.devices), glyphs, detailed=True)
    rows = shown(Ui(), scene.instances)
    if lines:
        lines.append([])
    if rows:
        table = Table(rows, width, glyphs, whole_names=True)
        lines.append(table.heading(None, is_reversed=False))
        lines += [table.row(one, is_selected=False) for one in rows]
    else:
        lines.append(cut([Span(NOTHING)], width))
    if glyphs is ASCII:
        lines = [to_ascii(line) for line in lines]
    return "\n".join("".join(span.text for span in line).rstrip() for line in lines)


# ---------------------------------------------------------------------------- layout


@dataclass
class _Plan:
    """The number of lines of each part above the footer."""

    rows: int = 1
    heading: int = 0
    title: int = 0
    devices: int = 0
    detail: int = 0
    is_detailed: bool = False
    gaps: int = 0


def _plan(height: int, devices: int, amounts: int, rows: int, tiers: int) -> _Plan:
    """Distribute the lines: first a few for each part by importance, then the rest.

    `tiers` is the largest number of tiers of an instance, so that selection does not move parts.
    """
    plan = _Plan()
    left = height - plan.rows
    if left > 0:
        plan.heading, left = 1, left - 1
    if left > 0:
        plan.title, left = 1, left - 1
    if left > 0 and devices:
        plan.devices = min(devices, max(1, height // 3))
        left -= plan.devices
    more = min(left, max(0, rows - plan.rows))
    plan.rows += more
    left -= more
    if rows and left > DETAIL_LINES:
        plan.detail, left = DETAIL_LINES, left - DETAIL_LINES - 1
        more = min(left, tiers)
        plan.detail, left = plan.detail + more, left - more
    if amounts and plan.devices == devices and left >= amounts:
        plan.is_detailed, left = True, left - amounts
        plan.devices += amounts
    plan.gaps = min(2, left)
    plan.rows += left - plan.gaps
    return plan


def _body(scene: Scene, ui: Ui, width: int, height: int, glyphs: Glyphs, clock: str) -> list[Line]:
    if height <= 0:
        return []
    rows = shown(ui, scene.instances)
    amounts = sum(not device.problem for device in scene.devices)
    tiers = max((len(one.tiers) for one in rows), default=0)
    plan = _plan(height, len(scene.devices), amounts, len(rows), tiers)
    lines: list[Line] = []
    if plan.title:
        lines.append(_title(ui, len(rows), len(scene.instances), width, clock))
    if plan.gaps > 1:
        lines.append([])
    if plan.devices:
        lines += device_lines(scene.devices, width, plan.devices, glyphs, detailed=plan.is_detailed)
    if plan.gaps > 0:
        lines.append([])
    lines += _table(rows, ui, width, plan, glyphs, len(scene.instances))
    end = height - (plan.detail + 1 if plan.detail else 0)
    lines += [[] for _ in range(end - len(lines))]
    if plan.detail:
        lines.append([])
        lines += detail_lines(rows[selected_at(ui, rows)], width, glyphs)
        lines += [[] for _ in range(height - len(lines))]
    return lines[:height]


def _title(ui: Ui, count: int, of: int, width: int, clock: str) -> Line:
    instances = "1 instance" if of == 1 else f"{of} instances"
    left = f" kvtop  {count} of {instances}" if ui.filter_text else f" kvtop  {instances}"
    direction = ", reversed" if ui.is_reversed else ""
    left += f"  by {ui.order}{direction}"
    if ui.filter_text:
        left += f"  /{ui.filter_text}"
    line = spread([Span(left, "title")], [Span(f"{clock} ", "title")], width)
    line.append(Span(" " * (width - line_cells(line)), "title"))
    return [span._replace(style="title") for span in line if span.text]


def _table(
    rows: Sequence[Instance], ui: Ui, width: int, plan: _Plan, glyphs: Glyphs, of: int
) -> list[Line]:
    if not rows:
        text = f"None of {of} has /{ui.filter_text}; Esc shows all." if of else NOTHING
        return [cut([Span(text, "dim")], width)]
    table = Table(rows, width, glyphs)
    lines = [table.heading(ui.order, is_reversed=ui.is_reversed)] if plan.heading else []
    at = selected_at(ui, rows)
    first = max(0, min(at - plan.rows // 2, len(rows) - plan.rows))
    for place, one in enumerate(rows[first : first + plan.rows], first):
        lines.append(table.row(one, is_selected=place == at))
    return lines


# --------------------------------------------------------------------------- the last lines, help


def _footer(ui: Ui, width: int, most_lines: int, glyphs: Glyphs) -> list[Line]:
    if ui.mode == "filter":
        return [_prompt("Show only: ", ui.filter_text, width)]
    if ui.mode == "entry" and ui.target is not None:
        now = value_text(ui.setting, value_of(ui.setting, ui.target))
        prompt = _prompt(f"New {ui.setting} of {ui.target.label} ({now}): ", ui.typed, width)
        if most_lines < 2:
            return [prompt]
        forms = "a whole number" if ui.setting == "priority" else "512M, 1.5GiB, 80%"
        hint = ui.problem or f"{forms}; Enter goes on, Esc leaves"
        style: Style = "bad" if ui.problem else "dim"
        room = most_lines - 1
        return [*_wrapped(hint, style, width, room, glyphs), prompt]
    if ui.mode == "confirm" and ui.target is not None:
        return _question(ui, ui.target, width, most_lines, glyphs)
    if ui.message:
        return _wrapped(ui.message, ui.mood, width, most_lines, glyphs)
    hints = _HINTS if len(_HINTS) <= width else _HINTS_SHORT
    return [cut([Span(hints, "dim")], width)]


def _question(ui: Ui, target: Instance, width: int, most: int, glyphs: Glyphs) -> list[Line]:
    if ui.setting == "sleep":
        asks = f"Put {target.label} to sleep, which drops all that it has cached"
        asks = asks if ui.value else f"Wake {target.label}"
    else:
        before = value_text(ui.setting, value_of(ui.setting, target))
        after = value_text(ui.setting, ui.value)
        asks = f"Set {ui.setting} of {target.label} from {before} to {after}"
    text = f"{asks}? y = yes, n = no"
    if len(wrap(text, width, most + 1)) > most:
        text = f"{request_text(ui.setting, ui.value)}? y/n"
    return _wrapped(text, "strong", width, most, glyphs)


def _wrapped(text: str, style: Style, width: int, most: int, glyphs: Glyphs) -> list[Line]:
    return [[Span(line, style)] for line in wrap(text, width, most, glyphs.mark)]


def _prompt(question: str, typed: str, width: int) -> Line:
    """Return an input line. A narrow screen shows its end, where the user types."""
    answer = f"{typed}_"
    while cells(answer) > width:
        answer = answer[1:]
    room = width - cells(answer)
    return [*cut([Span(question, "strong")], room), Span(answer)]


def _help(ui: Ui, width: int, height: int, glyphs: Glyphs) -> list[Line]:
    text = help_lines(glyphs)
    room = max(1, height - 1)
    first = min(ui.help_from, len(text) - 1) if len(text) > room else 0
    lines = [cut(line, width) for line in text[first : first + room]]
    lines += [[] for _ in range(room - len(lines))]
    if height > 1:
        more = "j/k: more  " if len(text) > room else ""
        lines.append(cut([Span(f"{more}q: back", "dim")], width))
    return lines


_MOST_NAME_CELLS: Final = 24
_LEAST_BAR_CELLS: Final = 8


def device_lines(
    devices: Sequence[Device], width: int, most_lines: int, glyphs: Glyphs, *, detailed: bool
) -> list[Line]:
    """Return one line per device, or two with the amounts (`detailed`); at most `most_lines`."""
    names = max((cells(device.name) for device in devices), default=0)
    names = min(names, _MOST_NAME_CELLS, max(4, width // 4))
    lines: list[Line] = []
    for device in devices:
        lines.append(_device_line(device, names, width, glyphs))
        if detailed and not device.problem:
            lines.append(_amounts(device, width, glyphs))
    if len(lines) <= most_lines or most_lines < 2:
        return lines[: max(0, most_lines)]
    unseen = len(lines) - most_lines + 1
    return [*lines[: most_lines - 1], cut([Span(f"and {unseen} more", "dim")], width)]


def _device_line(device: Device, names: int, width: int, glyphs: Glyphs) -> Line:
    name = Span(fit(device.name, names, glyphs.mark), "strong")
    if device.problem:
        return cut([name, Span(" "), Span(device.problem, "warn")], width)
    held = [Span(f" {short_size(device.held_bytes):>5} of {short_size(device.capacity_bytes):<5}")]
    free = [Span(f"  {short_size(device.free_bytes):>5} free")]
    asked: Line = []
    if device.asked_bytes:
        asked = [Span(f"  {short_size(device.asked_bytes)} asked", "bad")]
    # Text takes cells from the bar. Try the complete texts first, then fewer.
    for texts in ([*held, *free, *asked], [*held, *asked], held):
        room = width - names - 1 - line_cells(texts)
        if room >= _LEAST_BAR_CELLS:
            return [name, Span(" "), *device_bar(device, room, glyphs), *texts]
    return cut([name, *held], width)


def _amounts(device: Device, width: int, glyphs: Glyphs) -> Line:
    uses = uses_of(device)
    if device.reserved_bytes:
        uses["reserved"] = device.reserved_bytes
    if device.has_ledger:
        uses["others"] = device.others_bytes
    parts = amounts(uses, glyphs)
    if device.guaranteed_bytes:
        parts.append([Span(f"min {short_size(device.guaranteed_bytes)}")])
    line: Line = []
    for amount in parts:
        if line_cells([*line, Span("  "), *amount]) > width:  # only complete amounts
            break
        line += [Span("  "), *amount]
    return line
