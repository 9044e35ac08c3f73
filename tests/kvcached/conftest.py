"""The instance that tests of kvcached's segment share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from kvcached_instance import CAPACITY_BYTES, NAME, opened

from kvelastic.pool.pool import ElasticPool


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[ElasticPool]:
    """An instance on host memory, with kvcached's segment."""
    monkeypatch.delenv("ENABLE_KVELASTIC", raising=False)
    monkeypatch.delenv("KVELASTIC_IPC_NAME", raising=False)
    monkeypatch.setenv("ENABLE_KVCACHED", "true")
    monkeypatch.setenv("KVCACHED_IPC_NAME", NAME)
    monkeypatch.setenv("KVELASTIC_HOST_MEMORY", str(CAPACITY_BYTES))
    with opened() as made:
        made.start_maintenance()
        yield made
        made.close(discard=True)
    assert not list(Path("/dev/shm").glob(f"{NAME}*"))
