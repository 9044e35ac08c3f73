"""What was found in the tiers, held until it is used; and a load of it.

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
    """Leading keys that lie in tiers. What it names is not displaced until `release()`.

    A load of it holds that for itself, so a match is released when the step of the engine ends.
    As a context manager it releases at its end.
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
        """How many leading keys there are."""
        self.keys = keys[: self.count * KEY_BYTES]
        self.chain_after = chain_after
        self.epoch = epoch
        """How often its tiers had erased anything when it was found."""
        self._leases = tuple(leases)
        self._lock = threading.Lock()
        self._holders = 1
        self._is_released = False

    def hold(self) -> Callable[[], None]:
        """Hold it once more; answers what ends that, repeatable."""
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
        """The engine's own hold ends. Repeatable; never blocks but on an index."""
        with self._lock:
            if self._is_released:
                return
            self._is_released = True
        self._let_go()

    @property
    def is_held(self) -> bool:
        """Whether somebody holds it."""
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
    """Blocks on their way back. Any thread."""

    def __init__(self, ids: Sequence[int], run: Run) -> None:
        self.ids = tuple(ids)
        self._run = run

    @property
    def done(self) -> bool:
        """Whether its blocks are touched by nobody any more, and the results below stand."""
        return self._run.is_complete

    def wait(self, timeout_s: float | None = None) -> bool:
        """Until it is done, `timeout_s` at most; answers whether it is. Blocks."""
        return self._run.wait(timeout_s)

    def cancel(self) -> None:
        """Give it up. Its blocks may be written to until it is `done`, which a copy at most takes.

        Never blocks. Repeatable.
        """
        self._run.cancel()

    @property
    def arrived(self) -> int:
        """How many records have come from their tiers so far: they lie in staging, or farther."""
        return sum(self._run.staged)

    @property
    def failed(self) -> list[int]:
        """Places of the blocks that were not loaded: misses, to be computed. Once it is done."""
        return [at for at, is_loaded in enumerate(self._run.loaded) if not is_loaded]

    @property
    def count(self) -> int:
        """How many leading blocks were loaded. Once it is done."""
        failed = self.failed
        return failed[0] if failed else len(self.ids)
