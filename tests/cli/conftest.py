"""What the tests of kvctl share."""

from __future__ import annotations

import pytest
from waiting import DEADLINE_S

from kvelastic import _vmm, segment
from kvelastic.lease import Liveness


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command whose `--wait` is over looks at the answer when there is one.

    For instances that answer every request.
    """
    read_answer = segment._answer

    def when_answered(record: _vmm.Record, revision: int, life: Liveness) -> segment.Answer:
        assert record.wait_answer(revision, DEADLINE_S)
        return read_answer(record, revision, life)

    monkeypatch.setattr(segment, "_answer", when_answered)
