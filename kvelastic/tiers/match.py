"""The result of a lookup in the tiers, which holds the found records, and its load.

match = tiers.match(keys)
load = tiers.load(match, ids); match.release()
load.wait(1.0); load.failed
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from kvelastic.tiers.base import KEY_BYTES, NO_KEY, Lease
from kvelastic.tiers.plan import Segment
from kvelastic.tiers.run import Run


class Match:
    """Leading keys that are stored in tiers. Their records are not evicted until `release()`.

    A load holds the match itself. So the engine can release the match at the end of its step. As a
    context manager, the match releases itself on exit. Thread-safe.
    """

    def __init__(
        self,
        keys: bytes,
        segments: Sequence[Segment],
        leases: Sequence[Lease],
        chain_after: bytes = NO_KEY,
        epoch: int = 0,
    ) -> None:
        self.segments = tuple(segments)
        self.count = sum(segment.count for segment in segments)
        """Number of leading keys found."""
        self.keys = keys[: self.count * KEY_BYTES]
        self.chain_after = chain_after
        self.epoch = epoch
        """Number of erasures in the tiers when the match was made."""
        self._leases = tuple(leases)
        self._lock = threading.Lock()
        self._holders = 1
        self._is_released = False

    def hold(self) -> Callable[[], None]:
        """Take another reference. Returns an idempotent function that releases it."""
        with self._lock:
            self._holders += 1
        ended = threading.Event()

        def end() -> None:
            with self._lock:
                if ended.is_set():
                    return
                ended.set()
            self._let_go()

        return end

    def release(self) -> None:
        """Release the engine's reference. Idempotent. Does not wait for a medium."""
        with self._lock:
            if self._is_released:
                return
            self._is_released = True
        self._let_go()

    @property
    def is_held(self) -> bool:
        """Whether a reference is held, by the engine or by a load."""
        with self._lock:
            return self._holders > 0

    def _let_go(self) -> None:
        with self._lock:
            self._holders -= 1
            if self._holders:
                return
        for lease in self._leases:
            lease.release()

    def __enter__(self) -> Match:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Load:
    """A running load of blocks from the tiers. Thread-safe."""

    def __init__(self, ids: Sequence[int], run: Run) -> None:
        self.ids = tuple(ids)
        self._run = run

    @property
    def done(self) -> bool:
        """Whether the load no longer accesses its blocks and its results are final."""
        return self._run.is_complete

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until the load is done, for at most `timeout_s`. Returns whether it is done."""
        return self._run.wait(timeout_s)

    def cancel(self) -> None:
        """Cancel the load. Never blocks. Idempotent.

        Its blocks may be written to until it is `done`, which takes at most one copy.
        """
        self._run.cancel()

    @property
    def arrived(self) -> int:
        """Number of records read from their tiers so far, into staging or further into blocks."""
        return sum(self._run.staged)

    @property
    def failed(self) -> list[int]:
        """Indices into `ids` of blocks that were not loaded. Valid once the load is done.

        The engine must compute these blocks.
        """
        return [at for at, is_loaded in enumerate(self._run.loaded) if not is_loaded]

    @property
    def count(self) -> int:
        """Number of leading blocks that were loaded. Valid once the load is done."""
        failed = self.failed
        return failed[0] if failed else len(self.ids)
