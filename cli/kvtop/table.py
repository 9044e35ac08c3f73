"""The table of instances: the columns that fit on the screen, and a line per instance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from kvelastic.cli.kvtop.bars import amounts, instance_bar, sparkline, tier_bar, uses_of
from kvelastic.cli.kvtop.keys import value_text
from kvelastic.cli.kvtop.scene import Instance
from kvelastic.cli.kvtop.text import (
    Glyphs,
    Line,
    Span,
    Style,
    cells,
    cut,
    fit,
    short_count,
    short_rate,
    short_size,
    short_total,
)
from kvelastic.units import format_size

if TYPE_CHECKING:
    from kvelastic.shared.tier_status import TierStatus

_LEAST_NAME_CELLS: Final = 8
_USUAL_NAME_CELLS: Final = 20
"""Enough for `kvelastic_vLLM_12345`. Longer names get the remaining cells."""
_GAP: Final = " "

_STATE_STYLES: Final[dict[str, Style]] = {
    "applied": "good",
    "shrinking": "warn",
    "pending": "warn",
    "asleep": "parked",
    "refused": "bad",
    "failed": "bad",
    "unreadable": "bad",
    "dead": "bad",
}


_TIERS: Final = "TIERS"
"""Title of the column that is shown only if an instance has tiers."""


class _Column(NamedTuple):
    title: str
    order: str
    """The sort order of the column; empty: not sortable."""
    width: int
    most: int
    """Maximum width if there is room."""
    rank: int
    """Priority on a narrow screen, lowest first."""
    draw: Callable[[Instance, int, Glyphs], Line]
    is_left: bool = False


def _number(text: Callable[[Instance], str]) -> Callable[[Instance, int, Glyphs], Line]:
    return lambda one, width, _: [Span(text(one).rjust(width))]


def _limit(one: Instance) -> str:
    return short_size(one.limit_bytes) if one.is_limited else "none"


def _state(one: Instance, width: int, _: Glyphs) -> Line:
    return [Span(fit(one.state, width), _STATE_STYLES.get(one.state, "plain"))]


def _trend(one: Instance, width: int, glyphs: Glyphs) -> Line:
    return [Span(sparkline(one.history_bytes, width, glyphs), "trend")]


def _tiers(one: Instance, width: int, _: Glyphs) -> Line:
    is_well = all(tier.state == "ok" for tier in one.tiers)
    return [Span(short_size(one.tiers_bytes).rjust(width), "plain" if is_well else "bad")]


def _model(one: Instance, width: int, glyphs: Glyphs) -> Line:
    return [Span(fit(one.model or "-", width, glyphs.mark))]


# In display order.
_COLUMNS: Final = (
    _Column("STATE", "state", 9, 9, 3, _state, True),
    _Column("PRIO", "prio", 5, 5, 12, _number(lambda one: short_count(one.priority))),
    _Column("MIN", "min", 5, 5, 5, _number(lambda one: short_size(one.min_bytes))),
    _Column("LIMIT", "limit", 6, 6, 2, _number(_limit)),
    _Column("MAPPED", "mapped", 7, 7, 1, _number(lambda one: short_size(one.mapped_bytes))),
    _Column("IN USE", "in use", 7, 7, 10, _number(lambda one: short_size(one.in_use_bytes))),
    _Column("OF LIMIT", "", 8, 32, 4, instance_bar, True),
    _Column(_TIERS, "tiers", 6, 6, 6, _tiers),
    _Column("IN/S", "in/s", 5, 5, 7, _number(lambda one: short_rate(one.pages_in_per_s))),
    _Column("OUT/S", "out/s", 6, 6, 8, _number(lambda one: short_rate(one.pages_out_per_s))),
    _Column("EVICT/S", "evict/s", 8, 8, 11, _number(lambda one: short_rate(one.evicted_per_s))),
    _Column("TREND", "", 6, 60, 9, _trend, True),
    _Column("MODEL", "", 16, 40, 13, _model, True),
)


class Table:
    """The columns for a screen of `width` cells, laid out for the given instances.

    Long names are truncated to make room for columns, unless `whole_names`.
    """

    def __init__(
        self,
        instances: Sequence[Instance],
        width: int,
        glyphs: Glyphs,
        *,
        whole_names: bool = False,
    ) -> None:
        longest = max((cells(one.label) for one in instances), default=0)
        longest = max(longest, len("NAME") + 1)
        self._width = width
        self._glyphs = glyphs
        usual = max(_LEAST_NAME_CELLS, min(_USUAL_NAME_CELLS, width // 4))
        usual = longest if whole_names else usual
        self._name = min(longest, usual, width)
        has_tiers = any(one.tiers for one in instances)
        self._columns = self._that_fit([c for c in _COLUMNS if has_tiers or c.title != _TIERS])
        self._widths = [column.width for column in self._columns]
        self._grow(longest)

    def heading(self, order: str | None, *, is_reversed: bool) -> Line:
        """Return the heading. The column of the sort order has an arrow, unless `order` is None."""
        line = [self._title("NAME", "name", self._name, True, order, is_reversed)]
        for column, width in zip(self._columns, self._widths, strict=True):
            line.append(Span(_GAP, "heading"))
            line.append(
                self._title(column.title, column.order, width, column.is_left, order, is_reversed)
            )
        return cut(line, self._width)

    def row(self, one: Instance, *, is_selected: bool) -> Line:
        """Return the line of one instance."""
        line = [Span(fit(one.label, self._name, self._glyphs.mark), "strong")]
        for column, width in zip(self._columns, self._widths, strict=True):
            line.append(Span(_GAP))
            line += column.draw(one, width, self._glyphs)
        line = cut(line, self._width)
        if not is_selected:
            return line
        used = sum(cells(span.text) for span in line)
        line.append(Span(" " * (self._width - used)))
        return [span._replace(is_selected=True) for span in line if span.text]

    def _that_fit(self, columns: Sequence[_Column]) -> list[_Column]:
        left = self._width - self._name
        chosen: list[_Column] = []
        for column in sorted(columns, key=lambda each: each.rank):
            need = column.width + len(_GAP)
            if need > left:
                break
            left -= need
            chosen.append(column)
        return [column for column in columns if column in chosen]

    def _grow(self, longest_name: int) -> None:
        """Give the remaining cells to the name, then to the bar, the trend and the model."""
        left = self._width - self._name - sum(width + len(_GAP) for width in self._widths)
        more = max(0, min(left, longest_name - self._name))
        self._name += more
        left -= more
        growing = [at for at, column in enumerate(self._columns) if column.most > column.width]
        while left > 0 and growing:
            for at in growing:
                if left > 0:
                    self._widths[at] += 1
                    left -= 1
            growing = [at for at in growing if self._widths[at] < self._columns[at].most]

    def _title(
        self, title: str, of: str, width: int, is_left: bool, order: str | None, is_reversed: bool
    ) -> Span:
        if order is None or of != order:
            return Span(title.ljust(width) if is_left else title.rjust(width), "heading")
        # Names and states sort ascending by default, numbers descending.
        is_rising = (order in {"name", "state"}) != is_reversed
        arrow = self._glyphs.up if is_rising else self._glyphs.down
        # Outside of the title, which does not move. Every column has room for the arrow.
        if is_left:
            return Span(fit(title + arrow, width), "title")
        return Span((arrow + title).rjust(width), "title")


# ------------------------------------------- the selected instance: details not in the table

DETAIL_LINES: Final = 4
_TIER_BAR_CELLS: Final = 10


def detail_lines(one: Instance, width: int, glyphs: Glyphs) -> list[Line]:
    """Return `DETAIL_LINES` lines about an instance, and one per tier."""
    who: Line = [Span(one.label, "strong"), Span(f"  {one.state}")]
    if one.over_bytes:
        over = "to go until it sleeps" if one.asleep else "over its limit"
        who.append(Span(f"  {short_size(one.over_bytes)} {over}", "warn"))
    if one.reason:
        who.append(Span(f"  {one.reason}", "bad"))
    where = _facts(
        ("engine", one.engine),
        ("pid", "" if one.pid is None else str(one.pid)),
        ("device", one.device),
    )
    what = _facts(
        ("limit", value_text("limit", one.limit_bytes) if one.is_limited else "none"),
        ("min", value_text("min", one.min_bytes)),
        ("priority", value_text("priority", one.priority)),
        ("reserved when awake" if one.asleep else "reserved", _reserved(one)),
        ("model", one.model),
    )
    memory: Line = []
    for amount in amounts(uses_of(one), glyphs):
        memory += [*amount, Span("  ")]
    tiers = [_tier(tier, glyphs) for tier in one.tiers]
    return [cut(line, width) for line in (who, where, what, memory, *tiers)]


def _tier(tier: TierStatus, glyphs: Glyphs) -> Line:
    """Return a tier's contents and performance, the most important first for a narrow screen."""
    line: Line = [Span("tier ", "dim"), Span(f"{tier.tier}  ", "strong")]
    if tier.state != "ok":
        line.append(Span(f"{tier.state}  ", "bad"))
    if tier.limit_bytes is None:
        line.append(Span(f"{short_size(tier.used_bytes)}  "))
    else:
        of = f" {short_size(tier.used_bytes)} of {short_size(tier.limit_bytes)}  "
        line += [*tier_bar(tier, _TIER_BAR_CELLS, glyphs), Span(of)]
    load = "" if tier.load_us is None else f"{tier.load_us / 1000:.3g} ms"
    totals = _facts(("hits", short_total(tier.hits)), ("misses", short_total(tier.misses)))
    errors = Span(f"errors {short_total(tier.errors)}  ", "warn" if tier.errors else "dim")
    return [*line, *totals, errors, *_facts(("blocks", short_total(tier.records)), ("load", load))]


def _reserved(one: Instance) -> str:
    return format_size(one.reserved_bytes) if one.reserved_bytes else ""


def _facts(*facts: tuple[str, str]) -> Line:
    line: Line = []
    for title, value in facts:
        if value:
            line += [Span(f"{title} ", "dim"), Span(f"{value}  ")]
    return line
