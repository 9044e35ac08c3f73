"""The figures of a comparison: stock, kvelastic, their ratio, and how sure that ratio is.

The two take turns, so turn 3 of one belongs to turn 3 of the other. The range beside a ratio is a
bootstrap over such pairs: of the ratios that other draws of the same turns give, the middle 95%.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.harness import bootstrap_range, percentile
from benchmarks.vllm.servers import ELASTIC, ROLES, STOCK
from benchmarks.vllm.turns import Turn

_Turns = Sequence[Turn]


@dataclass(frozen=True)
class Row:
    """One figure of a load."""

    title: str
    unit: str
    stock: float
    elastic: float
    ratio: float
    least: float
    most: float
    """The range of the ratio."""
    bar: str = ""
    verdict: str = ""
    """`met`, `MISSED`, or `open` where the range has the bar inside it."""


@dataclass(frozen=True)
class _Figure:
    title: str
    unit: str
    of: Callable[[_Turns], float]
    """Of all turns together, or of one."""
    by_turn: bool = False
    """Whether the ratio is the median of the turns' own, not that of all turns together."""
    bar: str = ""
    is_met: Callable[[float], bool] | None = None


def _gaps_ms(percent: float) -> Callable[[_Turns], float]:
    return lambda turns: 1e3 * percentile([gap for t in turns for gap in t.gaps_s], percent)


def _first_ms(percent: float) -> Callable[[_Turns], float]:
    return lambda turns: 1e3 * percentile([s for t in turns for s in t.first_token_s], percent)


def _cpu_ms(roles: Sequence[str]) -> Callable[[_Turns], float]:
    """Milliseconds of CPU time for a thousand tokens."""
    return lambda turns: (
        1e6 * sum(t.cpu_s[role] for t in turns for role in roles) / sum(t.tokens for t in turns)
    )


def _tokens_per_s(turns: _Turns) -> float:
    return sum(t.tokens for t in turns) / sum(t.total_s for t in turns)


def _tokens_a_step(turns: _Turns) -> float:
    return sum(t.tokens for t in turns) / max(1, sum(t.steps for t in turns))


_FIGURES = (
    _Figure("output tokens a second, median of turns", "", _tokens_per_s, True, ">= 0.99",
            lambda ratio: ratio >= 0.99),
    _Figure("output tokens a second, all turns", "", _tokens_per_s),
    _Figure("between tokens, p50", "ms", _gaps_ms(50)),
    _Figure("between tokens, p99", "ms", _gaps_ms(99), False, "<= 1.03",
            lambda ratio: ratio <= 1.03),
    _Figure("between tokens, p99, median of turns", "ms", _gaps_ms(99), True),
    _Figure("to the first token, p50", "ms", _first_ms(50)),
    _Figure("to the first token, p99", "ms", _first_ms(99)),
    _Figure("CPU time of 1000 tokens", "ms", _cpu_ms(ROLES)),
    *(_Figure(f"- {role} process", "ms", _cpu_ms([role])) for role in ROLES),
    _Figure("tokens a step", "", _tokens_a_step),
)  # fmt: skip


def rows(turns: dict[str, list[Turn]]) -> list[Row]:
    """All of them; `turns` has the same turns of both, in one order."""
    pairs = list(zip(turns[STOCK], turns[ELASTIC], strict=True))
    return [_row(figure, pairs) for figure in _FIGURES]


def _row(figure: _Figure, pairs: Sequence[tuple[Turn, Turn]]) -> Row:
    if figure.by_turn:
        singles = [(figure.of([stock]), figure.of([elastic])) for stock, elastic in pairs]
        ratios = [elastic / stock for stock, elastic in singles]
        middle = median(ratios)
        least, most = bootstrap_range(lambda draw: median(ratios[i] for i in draw), len(pairs))
        both = median(stock for stock, _ in singles), median(elastic for _, elastic in singles)
    else:

        def ratio(draw: Sequence[int]) -> float:
            stock = figure.of([pairs[i][0] for i in draw])
            return figure.of([pairs[i][1] for i in draw]) / stock if stock else 1.0

        everything = range(len(pairs))
        middle = ratio(everything)
        least, most = bootstrap_range(ratio, len(pairs))
        both = figure.of([pair[0] for pair in pairs]), figure.of([pair[1] for pair in pairs])
    verdict = _verdict(figure, least, most)
    return Row(figure.title, figure.unit, *both, middle, least, most, figure.bar, verdict)


def _verdict(figure: _Figure, least: float, most: float) -> str:
    if figure.is_met is None:
        return ""
    at_ends = {figure.is_met(least), figure.is_met(most)}
    return "open" if len(at_ends) > 1 else "met" if at_ends == {True} else "MISSED"
