"""SGLang's allocator of pages of tokens on top of kvelastic's native pool of blocks.

An SGLang page is a block of the pool, with the same id. SGLang's kernels compute the slots of new
tokens from a list of free pages. This allocator takes exactly as many blocks from the pool as a
call needs, puts them into that list, and runs SGLang's kernels. Id 0, where SGLang writes padding,
is the pool's null block.

Blocks in the radix cache that no request has locked are cached in the pool (`tree_blocks`). SGLang
counts them as evictable, so they do not count as available here. Code that needs room evicts
through the tree.

    session:  | admit: `ElasticPrefillBudget` maps memory        | evict    | alloc ...   |
              | or decode: `check_decode_capacity` maps memory   | the tree |
    so an admitted request can always allocate: a failed alloc would end SGLang's scheduler.

Imports SGLang, so only its scheduler's process may import this module.
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
    from kvelastic.pool.scheduling.blocks import SchedulerBlocks
    from kvelastic.pool.scheduling.over_limit import OverLimit
    from kvelastic.pool.scheduling.waiting import WaitingRequests


class ElasticPagedAllocator(PagedTokenToKVPoolAllocator):  # type: ignore[misc]  # untyped here
    """Replaces SGLang's paged allocator; its methods have the same meaning."""

    wakes_later = False
    """True if SGLang has resumed, but the pool could not wake yet."""
    radix_cache: ElasticRadixCache | None = None
    """The radix cache that uses these blocks, once it exists."""

    prefill_budget: ElasticPrefillBudget | None = None
    """This round's budget; None before SGLang looks for a prefill."""

    over_limit: OverLimit
    """Measures how long requests have kept the pool over its limit."""
    waiting: WaitingRequests
    """Reports requests that wait for memory."""
    to_retract: tuple[Any, ...] = ()
    """Requests to retract in this round because of the limit."""

    late_releases: LateReleases
    """Releases of memory that wait for running requests."""

    @property
    def blocks(self) -> SchedulerBlocks:
        """The pool's blocks."""
        blocks: SchedulerBlocks = self._kvcache.elastic.blocks
        return blocks

    # --- how much there is ---------------------------------------------------------------------

    def available_size(self) -> int:
        """Return the tokens available under the current limit without evicting from the tree."""
        return max(0, self.blocks.reachable - self._cached()) * int(self.page_size)

    def used_size(self) -> int:
        """Return the tokens of blocks that requests or the radix cache hold."""
        return (self.blocks.used + self._cached()) * int(self.page_size)

    def reachable_size(self, tree_cache: Any) -> int:
        """Return the tokens available under the current limit, with eviction."""
        return self.blocks.reachable * int(self.page_size) + self._let_go(tree_cache)

    def have(self, tokens: int, tree_cache: Any) -> bool:
        """Map memory for `tokens`, beyond what eviction frees. Returns False if it is too little.

        Blocks on the driver, and up to `KVELASTIC_RECLAIM_WAIT` for memory from other instances. In
        a session the result stays valid.
        """
        wanted = -(-(tokens - self._let_go(tree_cache)) // self.page_size)
        return bool(self.blocks.prepare(wanted) >= wanted)

    def _cached(self) -> int:
        """Return the blocks of the radix cache that are cached in the pool."""
        return 0 if self.radix_cache is None else self.radix_cache.tree_blocks.cached

    def _let_go(self, tree_cache: Any) -> int:
        """Return the tokens in unlocked tree nodes that the pool still counts as used.

        Returns 0 over the limit: then evicted blocks are not reused.
        """
        if self.blocks.pool.is_over_limit:
            return 0
        return int(tree_cache.evictable_size()) - self._cached() * int(self.page_size)

    def get_all_free_pages(self) -> None:
        """Return None: there is no list of free pages for SGLang to check."""

    # --- taking --------------------------------------------------------------------------------

    def alloc(self, need_size: int) -> torch.Tensor | None:
        """Return slots of whole pages, or None if there are too few."""
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
        """Return slots for each request's new tokens in a prefill, or None if there are too few."""
        pages = num_new_pages
        if pages is None:
            pages = get_num_new_pages(
                seq_lens=seq_lens_cpu, page_size=self.page_size, prefix_lens=prefix_lens_cpu
            )
        if not self._take(pages):
            return None
        return super().alloc_extend(
            prefix_lens, prefix_lens_cpu, seq_lens, seq_lens_cpu, last_loc, extend_num_tokens, pages
        )

    def alloc_decode(
        self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor
    ) -> torch.Tensor | None:
        """Return a slot for each request's next token, or None if there are too few."""
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
        """Do nothing: the pool keeps its free blocks in order."""

    def clear(self) -> None:
        """Release all blocks; the pool keeps at most one page mapped."""
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
        """Return the budget of one prefill."""
        self.prefill_budget = ElasticPrefillBudget(
            self, tree_cache, num_mixed_decode_tokens=num_mixed_decode_tokens
        )
        return self.prefill_budget

    def evict_to_free_tokens(self, tree_cache: Any, num_tokens: int) -> None:
        """Evict from the radix cache until `num_tokens` are available or the tree is empty."""
        if tree_cache is None or not tree_cache.supports_prefix_sharing():
            return
        while (short := num_tokens - self.available_size()) > 0 and tree_cache.evictable_size():
            if not evict(tree_cache, short, self.page_size):
                break

    def check_decode_capacity(
        self, *, num_tokens: int, tree_cache: Any, requests: Any = None, spec_algorithm: Any = None
    ) -> bool:
        """Map memory for the next step's tokens, evicting if needed. False: SGLang must retract.

        Also returns False if one of `requests` was chosen to be retracted for the limit.
        """
        if any(one is request for one in self.to_retract for request in requests or ()):
            return False
        self.evict_to_free_tokens(tree_cache, num_tokens)
        pages = -(-num_tokens // self.page_size)
        return bool(self.blocks.prepare(pages) >= pages)


def evict(tree_cache: Any, tokens: int, page_size: int) -> int:
    """Evict at least one SGLang page; return the number of evicted tokens."""
    result = tree_cache.evict(EvictParams(num_tokens=max(tokens, page_size)))
    return int(result.num_tokens_evicted)


class ElasticPrefillBudget(PrefillBudget):  # type: ignore[misc]  # SGLang is untyped here
    """Limits a prefill to memory that is certain to be available when it allocates."""

    allocator: ElasticPagedAllocator

    short_blocks: int | None = None
    """With how many blocks SGLang admits the first request that lacks memory."""
    chunk_waits = False
    """True if a partly computed prompt waits for memory. Then no other request is admitted.

    SGLang would take the prompt's next chunk for a part of any batch of this round, and drop one
    first token of the response per such batch.
    """

    def _available_and_evictable(self) -> int:
        return self.allocator.reachable_size(self.tree_cache)

    def check_prefill(
        self, *, extend_input_len: int, total_tokens: int, input_tokens: int, **more: Any
    ) -> tuple[bool, int | None]:
        """Return whether the request fits, and how many of its tokens may run at once."""
        fits, chunk = super().check_prefill(
            extend_input_len=extend_input_len,
            total_tokens=total_tokens,
            input_tokens=input_tokens,
            **more,
        )
        now = extend_input_len if chunk is None else min(extend_input_len, chunk)
        if fits and self._have(self.ceil_paged_tokens(now) + self.page_size):
            return True, chunk
        if self.short_blocks is None and not self.chunk_waits:
            prefix = max(0, input_tokens - extend_input_len)
            # SGLang admits a request only if more than its total is left.
            self.short_blocks = int(prefix + total_tokens) // self.page_size + 1
        return False, None

    def can_allocate_prefill(self, *, paged_input: int, **more: Any) -> bool:
        """Return True if the request's prompt fits now."""
        return bool(super().can_allocate_prefill(paged_input=paged_input, **more)) and self._have(
            paged_input
        )

    def available_chunk_tokens(self, chunk_limit: int) -> int:
        """Return SGLang's limit; `fit_chunk` checks the available memory."""
        return chunk_limit

    def fit_chunk(
        self, *, extend_input_len: int, max_new_tokens: int, chunk_limit: int
    ) -> int | None:
        """Return how many tokens of a partly computed prompt can run, or None: it waits.

        Stock SGLang always continues, because its pool does not shrink.
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
