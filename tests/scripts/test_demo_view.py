"""What the demo prints: few lines, a legend, and the lines with which a user goes on."""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

MIB = 1 << 20
FULL = 768 * MIB


ROOT = Path(__file__).parents[2]


@pytest.fixture
def view(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "_demo"))
    import view

    yield view
    del sys.modules["view"]


def test_view_has_at_most_ten_lines(view: Any) -> None:
    dice = random.Random(7)
    sieve = view.Sieve()
    shown = []
    for look in range(500):
        in_use = dice.randrange(FULL // 2)
        memory = view.Memory(in_use, dice.randrange(FULL // 3), 0, FULL, FULL)
        is_wanted = look in {250, 499}
        if sieve.is_worth_a_line(view.bar(memory, FULL, 40), is_wanted=is_wanted):
            shown.append(look)
    assert len(shown) == view.MOST_LINES
    assert (shown[0], shown[-2:]) == (0, [250, 499])


def test_unchanged_view_prints_no_line(view: Any) -> None:
    sieve = view.Sieve()
    cells = view.bar(view.Memory(FULL // 2, 0, 0, FULL // 2, FULL), FULL, 40)
    assert sieve.is_worth_a_line(cells)
    assert not sieve.is_worth_a_line(cells)
    assert not sieve.is_worth_a_line(cells, is_wanted=True)


def test_ten_lines_of_waiting_last_an_hour(view: Any) -> None:
    assert sum(itertools.islice(view.plain_pauses(), view.MOST_LINES)) > 3600


def test_sizes_use_the_unit_of_the_input(view: Any) -> None:
    from kvelastic.instance.status import UNLIMITED_BYTES

    assert view.megabytes(96 * MIB) == "96M"
    assert view.megabytes(UNLIMITED_BYTES) == "none"
    legend = view.legend(FULL)
    assert "a bar is 768M" in legend
    for what in ("in use", "cached", "parked", "the rest", "limit"):
        assert what in legend


def test_readme_has_the_final_lines_of_the_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "_demo"))
    import by_hand

    block = "".join(f"    {line}\n" for line in by_hand.LINES)
    assert block in (ROOT / "README.md").read_text()
    assert len(by_hand.LINES) == 4
