"""Limits with revisions, as kvcached's newer managers take them: of two the newer one holds.

    limit = RevisedLimit(pool, "kvelastic_vLLM_4711", group_id=0)
    limit.set(8 << 30, revision=3)["status"]       # applied, deferred, stale or conflict

Beside `kvctl limit` it is one more who asks: whoever asks last sets the limit.
"""

from __future__ import annotations

import threading
from operator import index
from typing import Any

from kvelastic import _vmm
from kvelastic.errors import InvalidArgumentError, LimitError


class RevisedLimit:
    """The newest limit of one pool, and its revision. Any thread."""

    def __init__(self, pool: _vmm.Pool, name: str, group_id: int) -> None:
        self._pool = pool
        self._name = name
        self._group_id = group_id
        self._lock = threading.Lock()
        self._revision: int | None = None
        self._limit_bytes: int | None = None

    def set(self, limit_bytes: int, *, revision: int) -> dict[str, Any]:
        """Set the limit of the whole pool, unless a newer revision has been set; see `state`.

        `status`: applied; deferred (blocks in use are over it; it holds when they are freed); stale
        (an older revision than the present one); conflict (the present revision, with another
        limit). With the last two nothing changes. Raises `LimitError` for a negative limit,
        `InvalidArgumentError` unless the revision is a whole number from 0 up.
        """
        try:
            limit_bytes, revision = index(limit_bytes), index(revision)
        except TypeError:
            raise InvalidArgumentError(
                f"limit_bytes={limit_bytes!r}, revision={revision!r}: both must be whole numbers"
            ) from None
        if limit_bytes < 0:
            raise LimitError(f"a limit of {limit_bytes} bytes is not accepted; give 0 or more")
        if revision < 0:
            raise InvalidArgumentError(f"revision={revision} is not accepted; give 0 or more")
        with self._lock:
            if self._revision is not None and revision < self._revision:
                return self._state("stale", f"the present revision is {self._revision}")
            if revision == self._revision and limit_bytes != self._limit_bytes:
                return self._state("conflict", "revision_reused_with_different_limit")
            if revision != self._revision:
                self._pool.set_limit(min(limit_bytes, _vmm.UNLIMITED_BYTES))
                self._revision, self._limit_bytes = revision, limit_bytes
            return self._state()

    def state(self) -> dict[str, Any]:
        """What holds now; `limit_bytes` and `revision` are None where none was set by revision."""
        with self._lock:
            return self._state()

    def _state(self, status: str = "", reason: str = "") -> dict[str, Any]:
        state, capacity_bytes = self._pool.limit_state(), self._pool.stats()
        effective_bytes, mapped_bytes = state["effective_limit_bytes"], state["mapped_bytes"]
        over_bytes = state["over_bytes"]
        if not status:
            status = "deferred" if over_bytes else "applied"
            reason = "inuse_capacity_above_limit" if over_bytes else ""
        return {
            "status": status,
            "pool_name": self._name,
            "group_id": self._group_id,
            "limit_bytes": self._limit_bytes,
            "effective_limit_bytes": effective_bytes,
            "current_capacity_bytes": capacity_bytes["pages_limit"] * capacity_bytes["page_bytes"],
            "revision": self._revision,
            "mapped_bytes": mapped_bytes,
            "remaining_bytes": max(0, effective_bytes - mapped_bytes),
            "overage_bytes": over_bytes,
            "reason": reason or None,
        }
