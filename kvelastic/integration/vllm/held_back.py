"""Blocks that were given back while a step that may still use them is on its way.

With asynchronous scheduling or pipeline stages vLLM schedules a step before the one before it has
ended. A request that ends (or is preempted) then gives its blocks back although a worker may still
write to them. Stock vLLM does not mind: the next user's writes come after in the same stream. Here
the page could be unmapped, or the contents moved, under that worker. So such a block stays *used*
for the native pool, where nothing happens to it, until every step has ended that was on its way
when it was given back. vLLM itself may have it again at once, as it always could, unless
its page is to drain (`ElasticBlockPool._reusable`)::

    schedule 7 | schedule 8 | 7 ends: request gives block 5 back | 8 ends: block 5 is free
                              (held back: step 8 is on its way)

A *pinned* block is one that something reads outside of any step: a transfer to another place.
Given back, it waits in the same way, until it is unpinned.

Pure bookkeeping over any block objects; used by the scheduler's thread only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, Final

_UNPINNED: Final = 1 << 62
"""In the place of the step that a block waits for: it waits until it is unpinned."""


class StepsOnTheirWay:
    """Which steps are scheduled and have not ended. They end in the order they began."""

    def __init__(self) -> None:
        self._newest = 0
        self._newest_at_work = 0
        self._ended = 0

    def begin(self, *, works: bool = True) -> int:
        """A step was scheduled; returns its number, 1 or more. An empty one has no work to do."""
        self._newest += 1
        if works:
            self._newest_at_work = self._newest
        return self._newest

    @property
    def is_at_work(self) -> bool:
        """Whether a step that has work to do is on its way."""
        return self._newest_at_work > self._ended

    def end(self, step: int) -> None:
        """The workers have carried out `step`, and with it all before it."""
        self._ended = max(self._ended, step)

    @property
    def newest(self) -> int:
        """The newest step that is on its way; 0: none is."""
        return self._newest if self._newest > self._ended else 0

    @property
    def next(self) -> int:
        """The number of the step that is scheduled next."""
        return self._newest + 1

    @property
    def ended(self) -> int:
        """The newest step that has ended."""
        return self._ended


class HeldBack:
    """The blocks that wait, by id, each with the step that it waits for; the oldest first."""

    def __init__(self) -> None:
        self._waiting: dict[int, tuple[Any, int]] = {}
        self._pins: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._waiting

    def ids(self) -> set[int]:
        """Of the blocks that wait."""
        return set(self._waiting)

    def blocks(self) -> list[Any]:
        """Those that wait, the oldest first."""
        return [block for block, _ in self._waiting.values()]

    def add(self, block: Any, step: int) -> None:
        """`block` was given back while `step` was the newest on its way."""
        self._waiting[block.block_id] = (block, step)

    def pin(self, block_ids: Iterable[int]) -> None:
        """Count one more reader of each block."""
        self._pins.update(block_ids)

    def unpin(self, block_ids: Iterable[int]) -> list[Any]:
        """Count one reader less; takes and answers the blocks that waited only for that."""
        done = []
        for block_id in block_ids:
            self._pins[block_id] -= 1
            if self._pins[block_id] > 0:
                continue
            del self._pins[block_id]
            if self._waiting.get(block_id, (None, 0))[1] == _UNPINNED:
                done.append(self._waiting.pop(block_id)[0])
        return done

    def keep_pinned(self, blocks: list[Any]) -> list[Any]:
        """Let the pinned ones of `blocks`, for which no step waits, wait; answers the others."""
        if not self._pins:
            return blocks
        for block in blocks:
            if self._pins[block.block_id] > 0:
                self._waiting[block.block_id] = (block, _UNPINNED)
        return [block for block in blocks if block.block_id not in self._waiting]

    def take(self, block_id: int) -> None:
        """The block is wanted again; it waits no more, if it did."""
        self._waiting.pop(block_id, None)

    def ids_to_reuse(self) -> list[int]:
        """Of the blocks that wait, in the order to use them anew: pinned ones and hashes last."""
        ordered = sorted(
            self._waiting.values(),
            key=lambda entry: (entry[1] == _UNPINNED, entry[0].block_hash is not None),
        )
        return [block.block_id for block, _ in ordered]

    def take_all(self, block_ids: Iterable[int]) -> list[Any]:
        """Take these blocks, all of which wait, to be used anew."""
        return [self._waiting.pop(block_id)[0] for block_id in block_ids]

    def take_ended(self, step: int) -> list[Any]:
        """Take the blocks that waited for `step` or an earlier one."""
        ended = [block for block, until in self._waiting.values() if until <= step]
        for block in ended:
            del self._waiting[block.block_id]
        return ended
