"""A wish that was refused is over: it neither spoils nor slips into those that come after it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvelastic import segment

sys.path.insert(0, str(Path(__file__).parents[1] / "programs"))
from ledger_instance import Instance

MIB = 1 << 20
WAIT_S = 30.0


@pytest.fixture
def pair() -> Iterator[tuple[Instance, Instance]]:
    settings = {"KVELASTIC_HOST_MEMORY": "64M"}
    with Instance(**settings, KVELASTIC_MIN="40M") as a, Instance(**settings) as b:
        yield a, b


def test_a_refused_guarantee_changes_nothing_and_is_not_judged_again(
    pair: tuple[Instance, Instance],
) -> None:
    _, b = pair
    limit = segment.inspect(b.name).answer["effective_limit_bytes"]
    refused = segment.wish(b.name, min_bytes=40 * MIB, limit_bytes=48 * MIB, wait_s=WAIT_S)
    assert refused.state == "refused"
    assert refused.effective_limit_bytes == limit, "half of a refused wish was done"
    assert (refused.min_bytes, refused.priority) == (0, 0)

    assert segment.wish(b.name, priority=7, wait_s=WAIT_S).state == "applied"
    answer = segment.wish(b.name, min_bytes=8 * MIB, wait_s=WAIT_S)
    assert (answer.state, answer.min_bytes, answer.priority) == ("applied", 8 * MIB, 7)
    assert answer.effective_limit_bytes == limit, "the refused limit came with a later wish"


def test_what_was_refused_may_be_wished_for_again(pair: tuple[Instance, Instance]) -> None:
    a, b = pair
    assert segment.wish(b.name, min_bytes=40 * MIB, wait_s=WAIT_S).state == "refused"
    assert segment.wish(a.name, min_bytes=0, wait_s=WAIT_S).state == "applied"
    assert segment.wish(b.name, min_bytes=40 * MIB, wait_s=WAIT_S).min_bytes == 40 * MIB
