"""Three columns and two ratios: stock, the same again as a control, and kvelastic.

They take turns, so the samples of one round belong together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.harness import bootstrap_range, number

STOCK, AGAIN, ELASTIC = NAMES = ("stock", "stock again", "kvelastic")


@dataclass(frozen=True)
class Ratio:
    """The median of the rounds' own quotients, and a range: 95 % of other draws of the rounds."""

    middle: float
    least: float
    most: float

    def __str__(self) -> str:
        return f"{self.middle:.3f} ({self.least:.3f} .. {self.most:.3f})"

    def inverted(self) -> Ratio:
        return Ratio(1 / self.middle, 1 / self.most, 1 / self.least)


def headings(stock: str, again: str, elastic: str) -> tuple[str, ...]:
    """Of the table whose rows `row` makes."""
    control = f"control: {again} / {stock}"
    return ("figure", stock, again, elastic, control, f"{elastic} / {stock}", "verdict")


def row(
    title: str,
    stock: Sequence[float],
    again: Sequence[float],
    elastic: Sequence[float],
    *,
    more_is_better: bool,
) -> tuple[str, ...]:
    """Medians with the least and the most, both ratios, and the verdict."""
    control, own = _ratio(again, stock), _ratio(elastic, stock)
    return (
        title,
        *(
            f"{number(median(each))} ({number(min(each))} .. {number(max(each))})"
            for each in (stock, again, elastic)
        ),
        str(control),
        str(own),
        verdict(control, own.inverted() if more_is_better else own),
    )


def _ratio(samples: Sequence[float], stock: Sequence[float]) -> Ratio:
    quotients = [mine / other for mine, other in zip(samples, stock, strict=True)]
    drawn = bootstrap_range(lambda draw: median(quotients[i] for i in draw), len(quotients))
    return Ratio(median(quotients), *drawn)


def verdict(control: Ratio, cost: Ratio) -> str:
    """Whether what kvelastic costs (above 1: more than stock) lies within the control's range.

    Which of two stock engines is called the first is chance, so the range reaches as far to one
    side of 1 as to the other::

        1/reach ...... 1 ...... reach
                         |cost|            met
                            |---cost---|   met or open: by where its median is
                                  |cost|   MISSED
    """
    reach = max(control.most, 1 / control.least)
    if cost.middle <= reach:
        return "met"
    return "MISSED" if cost.least > reach else "open"
