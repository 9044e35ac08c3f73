"""Every case of the battery over every kind of store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from store_battery import WORLD, Bench, Case, Kind, cases_of
from store_kinds import KINDS


@pytest.fixture
def bench(kind: Kind, tmp_path: Path) -> Iterator[Bench]:
    store = kind.open(tmp_path)
    try:
        store.enter(WORLD)
        yield Bench(kind, store, tmp_path)
        store.check_integrity()
    finally:
        store.close()


@pytest.mark.parametrize(
    ("kind", "case"),
    [
        pytest.param(kind, case, id=f"{kind}-{case.__name__}")
        for kind in KINDS
        for case in cases_of(kind)
    ],
)
def test_store_battery(bench: Bench, case: Case) -> None:
    case(bench)
