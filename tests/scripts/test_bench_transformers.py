"""scripts/bench transformers: what it calls met is no worse than stock beside itself."""

from __future__ import annotations

import pytest

from benchmarks.transformers.comparison import Ratio, row, verdict
from benchmarks.transformers.engines import NotElasticError, check_is_elastic

CONTROL = Ratio(0.99, 0.95, 1.02)
"""Reaches 1 / 0.95 = 1.053 to either side."""


@pytest.mark.parametrize(
    ("cost", "expected"),
    [
        (Ratio(0.90, 0.85, 0.95), "met"),
        (Ratio(1.05, 1.00, 1.20), "met"),
        (Ratio(1.06, 1.04, 1.08), "open"),
        (Ratio(1.10, 1.06, 1.20), "MISSED"),
    ],
)
def test_verdict_is_relative_to_the_control(cost: Ratio, expected: str) -> None:
    assert verdict(CONTROL, cost) == expected


@pytest.mark.parametrize("more_is_better", [True, False])
def test_verdict_depends_on_the_better_direction(more_is_better: bool) -> None:
    stock, again = [100.0, 102.0, 98.0, 100.0], [101.0, 100.0, 99.0, 100.0]
    twice = [2 * sample for sample in stock]
    cells = row("figure", stock, again, twice, more_is_better=more_is_better)
    assert cells[0] == "figure"
    assert cells[3] == "200 (196 .. 204)"
    assert cells[-2] == "2.000 (2.000 .. 2.000)"
    assert cells[-1] == ("met" if more_is_better else "MISSED")
    assert row("same", stock, again, again, more_is_better=more_is_better)[-1] == "met"


def test_engine_without_kvelastic_gives_no_results() -> None:
    with pytest.raises(NotElasticError, match="kvctl doctor"):
        check_is_elastic()
