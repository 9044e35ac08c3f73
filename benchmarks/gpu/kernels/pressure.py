"""What goes on under a decoder: its limit goes down and up, and a neighbour takes what it gave.

The neighbour is another pool of the same device. It writes poison into every page that it gets, and
gives them back, so who reads memory that was unmapped reads poison.
"""

from __future__ import annotations

import itertools
import queue
import threading
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from benchmarks.gpu.kernels.elastic_cache import ElasticCache

LIMITS: Final = (0.6, None, 0.8, None)
"""One after the other, of what is mapped then; None: of all that the pool has addresses for."""
ANSWER_S: Final = 0.5
"""How long a change waits until it holds; the next one comes in any case."""


class Pressure:
    """A thread that changes the limit once for each `next()`. Any failure is raised by `stop()`."""

    def __init__(
        self,
        cache: ElasticCache,
        neighbour: ElasticCache,
        least_blocks: int,
        stream: Any,
        answer_s: float = ANSWER_S,
    ) -> None:
        """`stream` is the neighbour's, a torch stream; None where kernels run at once.

        No limit is below the pages of `least_blocks` blocks.
        """
        self._least_bytes = cache.page_bytes * -(-least_blocks // cache.blocks_per_page)
        self._cache, self._neighbour, self._stream = cache, neighbour, stream
        self._answer_s = answer_s
        self._limits = itertools.cycle(LIMITS)
        self._changes: queue.Queue[tuple[float | None] | None] = queue.Queue(maxsize=1)
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._work, name="pressure")
        self.requests = 0
        self.applied = 0
        self.pages_poisoned = 0
        self._begun = 0
        self._ended = 0
        self._thread.start()

    def next(self) -> None:
        """Change the limit; waits where the change before the last one is still on its way."""
        self._begun += 1
        self._changes.put((next(self._limits),))

    @property
    def is_settled(self) -> bool:
        """No change is on its way."""
        return self._begun == self._ended

    def stop(self) -> None:
        """Wait for what was begun. Raises what a change has run into."""
        self._changes.put(None)
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def _work(self) -> None:
        while (change := self._changes.get()) is not None:
            if self._failure is None:
                self._try(*change)
            self._ended += 1

    def _try(self, part: float | None) -> None:
        try:
            self._change(part)
        except Exception as failure:
            self._failure = failure

    def _change(self, part: float | None) -> None:
        from kvelastic.shared import segment

        limit_bytes = self._cache.range_bytes
        if part is not None:
            # Below what one sequence needs nobody could compute.
            mapped_bytes = self._cache.pool.blocks.mapped_bytes
            limit_bytes = max(int(part * mapped_bytes), self._least_bytes)
        answer = segment.request(
            self._cache.pool.name, limit_bytes=limit_bytes, wait_s=self._answer_s
        )
        self.requests += 1
        if answer.state == "applied":
            self.applied += 1
            freed_bytes = self._cache.range_bytes - limit_bytes
            if freed_bytes > 0:
                self._poison(-(-freed_bytes // self._neighbour.page_bytes))

    def _poison(self, pages: int) -> None:
        import torch

        blocks = self._neighbour.pool.blocks
        ids = blocks.alloc(pages * self._neighbour.blocks_per_page)
        if ids is None:
            return
        device = self._neighbour.layers[0][0].device
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            self._neighbour.poison(torch.tensor(ids, device=device))
        blocks.free(ids)
        blocks.trim()
        self.pages_poisoned += pages
