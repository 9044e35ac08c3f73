"""SGLang's allocator of pages of tokens, over kvelastic's native pool of blocks.

An SGLang page is a block of the pool, with the same id. SGLang computes the slots of new tokens
from a list of free pages, by kernels of its own; this allocator takes just as many blocks from the
pool as a call needs, puts them there, and lets those kernels do the rest. Id 0, where SGLang writes
what padding computes, is the pool's null block.

What the radix cache holds and no request has locked is cached in the pool (`tree_blocks`). SGLang
counts it as its own to evict, so it is not counted as available here, and who needs room evicts
through the tree.

    session:  | admit: `ElasticPrefillBudget` has memory mapped | evict | alloc ...   |
              | or decode: `check_decode_capacity`, the same    | from the tree       |
    so what was admitted can be taken: an alloc that finds none would end SGLang's scheduler.

Imports SGLang: only what runs in its scheduler's process may import this module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.prefill_budget import PrefillBudget
from sglang.srt.utils import get_num_new_pages

if TYPE_CHECKING:
    from kvelastic.integration.sglang.late_releases import LateReleases
    from kvelastic.integration.sglang.radix_cache import ElasticRadixCache
    from kvelastic.scheduling.blocks import SchedulerBlocks
    from kvelastic.scheduling.over_limit import OverLimit


class ElasticPagedAllocator(PagedTokenToKVPoolAllocator):  # type: ignore[misc]  # untyped here
    """Takes the place of the paged allocator; the same calls, the same meanings."""

    wakes_later = False
    """Whether SGLang has resumed, and the pool could not wake yet."""
    radix_cache: ElasticRadixCache | None = None
    """The tree whose blocks come from here, once there is one."""

    prefill_budget: ElasticPrefillBudget | None = None
    """The present round's; None: it has not looked for a prefill."""

    over_limit: OverLimit
    """How long requests have kept the pool over its limit."""
    making_way: tuple[Any, ...] = ()
    """Requests that are to be retracted in this round, for the limit."""

    late_releases: LateReleases
    """What the scheduler has still to release."""

    @property
    def blocks(self) -> SchedulerBlocks:
        """The pool's blocks."""
        blocks: SchedulerBlocks = self._kvcache.elastic.blocks
        return blocks

    # --- how much there is ---------------------------------------------------------------------

    def available_size(self) -> int:
        """Tokens that could be had now without evicting from the tree, under the present limit."""
        return max(0, self.blocks.reachable - self._cached()) * int(self.page_size)

    def used_size(self) -> int:
        """Tokens of blocks that requests or the radix cache hold."""
        return (self.blocks.used + self._cached()) * int(self.page_size)

    def reachable_size(self, tree_cache: Any) -> int:
        """Tokens that could be had now, also by evicting."""
        return self.blocks.reachable * int(self.page_size) + self._let_go(tree_cache)

    def have(self, tokens: int, tree_cache: Any) -> bool:
        """Have memory mapped for `tokens`, beyond what evicting gives; False: there is not enough.

        Waits for the driver, and for what others give as long as `KVELASTIC_RECLAIM_WAIT` says. In
        a session what it has found stays.
        """
        wanted = -(-(tokens - self._let_go(tree_cache)) // self.page_size)
        return bool(self.blocks.prepare(wanted) >= wanted)

    def _cached(self) -> int:
        """Blocks of the radix cache that are cached in the pool."""
        return 0 if self.radix_cache is None else self.radix_cache.tree_blocks.cached

    def _let_go(self, tree_cache: Any) -> int:
        """Tokens of the tree that no request has locked, and that are in use to the pool.

        Over the limit, what is evicted is the limit's.
        """
        if self.blocks.pool.is_over_limit:
            return 0
        return int(tree_cache.evictable_size()) - self._cached() * int(self.page_size)

    def get_all_free_pages(self) -> None:
        """SGLang's census of free pages; None: there is no list of them."""

    # --- taking --------------------------------------------------------------------------------

    def alloc(self, need_size: int) -> torch.Tensor | None:
        """Slots of whole pages; None: there are not enough."""
        return super().alloc(need_size) if self._take(need_size // self.page_size) else None

    def alloc_extend(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
        num_new_pages: int | None = None,
    ) -> torch.Tensor | None:
        """Slots for the new tokens of each request of a prefill; None: there are not enough."""
        pages = num_new_pages
        if pages is None:
            pages = get_num_new_pages(
                seq_lens=seq_lens_cpu, page_size=self.page_size, prefix_lens=prefix_lens_cpu
            )
        if not self._take(pages):
            return None
        return super().alloc_extend(
            prefix_lens,
            prefix_lens_cpu,
            seq_lens,
            seq_lens_cpu,
            last_loc,
            extend_num_tokens,
            pages,
        )

    def alloc_decode(
        self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor
    ) -> torch.Tensor | None:
        """A slot for each request's next token; None: there are not enough."""
        pages = get_num_new_pages(seq_lens=seq_lens_cpu, page_size=self.page_size, decode=True)
        if not self._take(pages):
            return None
        return super().alloc_decode(seq_lens, seq_lens_cpu, last_loc)

    def _take(self, pages: int) -> bool:
        ids = self.blocks.take(pages) if pages else []
        if ids is None:
            return False
        self.free_pages = torch.tensor(ids, dtype=torch.int64, device=self.device)
        return True

    # --- giving back ---------------------------------------------------------------------------

    def _release_page_ids(self, *page_ids: torch.Tensor) -> None:
        for ids in page_ids:
            self.blocks.give_back(ids.tolist())

    def merge_and_sort_free(self) -> None:
        """Nothing: what is free is the pool's, and it knows the order."""

    def clear(self) -> None:
        """Take every page back, and hold one of the pool's pages at most."""
        if self.radix_cache is not None:
            self.radix_cache.tree_blocks.clear()
        self.blocks.clear()
        self.blocks.pool.trim()
        self.free_pages = torch.empty((0,), dtype=torch.int64, device=self.device)
        self.free_group = None
        self.free_page_ids_group: list[torch.Tensor] = []
        self.staged_pages: list[torch.Tensor] = []
        self.num_staged_pages = 0

    # --- making room ---------------------------------------------------------------------------

    def create_prefill_budget(
        self, tree_cache: Any, *, num_mixed_decode_tokens: int = 0
    ) -> ElasticPrefillBudget:
        """What one prefill may take."""
        self.prefill_budget = ElasticPrefillBudget(
            self, tree_cache, num_mixed_decode_tokens=num_mixed_decode_tokens
        )
        return self.prefill_budget

    def evict_to_free_tokens(self, tree_cache: Any, num_tokens: int) -> None:
        """Evict from the radix cache until `num_tokens` can be had, or nothing is left to evict."""
        if tree_cache is None or not tree_cache.supports_prefix_sharing():
            return
        while (short := num_tokens - self.available_size()) > 0 and tree_cache.evictable_size():
            if not evict(tree_cache, short, self.page_size):
                break

    def check_decode_capacity(
        self,
        *,
        num_tokens: int,
        tree_cache: Any,
        requests: Any = None,
        spec_algorithm: Any = None,
    ) -> bool:
        """Have memory for the next step's tokens, evicting where needed; False: retract.

        Also where one of `requests` makes way for the limit.
        """
        if any(one is request for one in self.making_way for request in requests or ()):
            return False
        self.evict_to_free_tokens(tree_cache, num_tokens)
        pages = -(-num_tokens // self.page_size)
        return bool(self.blocks.prepare(pages) >= pages)


def evict(tree_cache: Any, tokens: int, page_size: int) -> int:
    """Evict at least a page of SGLang's; returns the tokens that were evicted."""
    result = tree_cache.evict(EvictParams(num_tokens=max(tokens, page_size)))
    return int(result.num_tokens_evicted)


class ElasticPrefillBudget(PrefillBudget):  # type: ignore[misc]  # SGLang is untyped here
    """What a prefill may admit: only what is sure to be had when it is allocated."""

    allocator: ElasticPagedAllocator

    chunk_waits = False
    """Whether a prompt that has begun waits for memory; then nobody else is admitted in this round.

    SGLang takes its next chunk for a part of whatever batch it makes then, and drops as many first
    tokens of the answer as there were batches too many.
    """

    def _available_and_evictable(self) -> int:
        return self.allocator.reachable_size(self.tree_cache)

    def check_prefill(self, *, extend_input_len: int, **more: Any) -> tuple[bool, int | None]:
        """Whether the request fits, and how much of it at once."""
        fits, chunk = super().check_prefill(extend_input_len=extend_input_len, **more)
        now = extend_input_len if chunk is None else min(extend_input_len, chunk)
        if fits and self._have(self.ceil_paged_tokens(now) + self.page_size):
            return True, chunk
        return False, None

    def can_allocate_prefill(self, *, paged_input: int, **more: Any) -> bool:
        """Whether the request's prompt fits now."""
        return bool(super().can_allocate_prefill(paged_input=paged_input, **more)) and self._have(
            paged_input
        )

    def available_chunk_tokens(self, chunk_limit: int) -> int:
        """As much as SGLang likes: `fit_chunk` decides, which knows how much is left."""
        return chunk_limit

    def fit_chunk(
        self, *, extend_input_len: int, max_new_tokens: int, chunk_limit: int
    ) -> int | None:
        """How much of the rest of a prompt that has begun can go on; None: it waits.

        Stock goes on in any case, for its pool does not shrink.
        """
        room = min(chunk_limit, int(self.remaining_total))
        whole_pages = room // self.page_size * self.page_size
        tokens = extend_input_len if extend_input_len <= room else whole_pages
        if tokens > 0 and self._have(self.ceil_paged_tokens(tokens)):
            return tokens
        self.chunk_waits = True
        return None

    def _have(self, tokens: int) -> bool:
        return not self.chunk_waits and self.allocator.have(
            self.current_offset + tokens, self.tree_cache
        )
