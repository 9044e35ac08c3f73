"""What the tests of kvctl share."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import pytest
from segment_owner import Owner
from waiting import DEADLINE_S

from kvelastic import _vmm
from kvelastic.shared import segment
from kvelastic.shared.liveness import Liveness
from kvelastic.shared.segment_listing import SHM_DIR


@pytest.fixture
def name() -> Iterator[str]:
    """Of an instance; what has that name in shared memory goes at the end."""
    unique = f"kvctl_{os.getpid()}_{random.randrange(1 << 40):x}"
    yield unique
    (SHM_DIR / unique).unlink(missing_ok=True)


@pytest.fixture
def owner(name: str) -> Iterator[Owner]:
    with Owner(name) as running:
        yield running


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command whose `--wait` is over looks at the answer when there is one.

    For instances that answer every request.
    """
    read_ack = segment._ack

    def when_answered(record: _vmm.ControlBlock, revision: int, life: Liveness) -> segment.Ack:
        assert record.wait_ack(revision, DEADLINE_S)
        return read_ack(record, revision, life)

    monkeypatch.setattr(segment, "_ack", when_answered)
