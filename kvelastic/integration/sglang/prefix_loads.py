"""Prefixes of waiting requests come back from the tiers, beside SGLang's rounds.

    round n     a request waits: its prefix is looked up where the radix cache ends. Spare blocks
                are put back into the tree at once; for what lies in tiers it gets blocks, and a
                load begins. It is kept back: SGLang does not see it in this round
    ...         others run; where nothing else can, the scheduler naps
    round n+k   the load is over: what has come is put into the tree, as if a request had left it
                there, and the request is scheduled. What has not come is computed

Nothing here can make a request fail. What is loaded is in use until it is in the tree, and cached
from then on: other requests may use it before the one that it was loaded for.

Used by the scheduler's thread only; threads of the tiers carry the loads out. Imports SGLang.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import compute_node_hash_values, get_storage_hash_str

from kvelastic.integration.sglang.kept_back import kept_back
from kvelastic.tiers.base import KEY_BYTES, NO_KEY
from kvelastic.tiers.loads import Load, Loads

if TYPE_CHECKING:
    from kvelastic.integration.sglang.allocator import ElasticPagedAllocator
    from kvelastic.integration.sglang.radix_cache import ElasticRadixCache
    from kvelastic.tiers.manager import Tiers

_log = logging.getLogger("kvelastic.sglang")

_END_LOADS_S: Final = 60.0


class _Waiting(NamedTuple):
    """A request whose prefix is being loaded."""

    key: RadixKey
    """All of its tokens that are cached once the load is over."""
    priority: int
    there: int
    """Blocks of it that the tree had."""
    lock: Any
    """Keeps them there."""
    ids: list[int]
    """The blocks that are being loaded."""
    first: bytes
    """The key of the first of them."""


class PrefixLoads:
    """See the module."""

    def __init__(
        self,
        cache: ElasticRadixCache,
        tiers: Tiers,
        *,
        compares: bool,
        sleep_wait_s: float,
        exit_wait_s: float,
    ) -> None:
        """From here on the cache's blocks have keys."""
        self._cache = cache
        self._tiers = tiers
        self._namespace = tiers.namespace
        self._sleep_wait_s = sleep_wait_s
        self._exit_wait_s = exit_wait_s
        self._loads = Loads(tiers, compares=compares)
        self._waiting: dict[int, _Waiting] = {}
        """By the number of the load."""
        self._job_of: dict[str, int] = {}
        """By the request."""
        self._looked_up: set[str] = set()
        """Requests of the queue that have been looked up."""
        self._lacked: dict[str, int] = {}
        """Requests that were looked up and for whose prefixes there was no memory: tokens."""
        self._jobs = count()
        self._keeps_copies = False
        cache.tree_blocks.keys_of = self._keys_of
        cache.prefix_loads = self

    # --- rounds --------------------------------------------------------------------------------

    @contextmanager
    def kept_back(self, scheduler: Any) -> Iterator[None]:
        """While it lasts, requests whose prefixes are on their way are not in SGLang's queue.

        In a session of the pool.
        """
        queue = scheduler.waiting_queue
        self._finish()
        back = self._begin_loads(queue, int(scheduler.max_running_requests)) if queue else []
        if not queue:
            self._looked_up.clear()
            self._lacked.clear()
        with kept_back(scheduler, back):
            yield

    def wait_for_any(self, timeout_s: float) -> bool:
        """Block until a load is over, `timeout_s` at most. False at once: there is none."""
        if not self._loads.open:
            return False
        self._loads.wait_for_any(timeout_s)
        return True

    @property
    def loading_tokens(self) -> int:
        """Tokens of blocks that are in use by loads alone."""
        return sum(len(each.ids) for each in self._waiting.values()) * int(self._cache.page_size)

    def computed(self, tokens: int, seconds: float) -> None:
        """A step has computed so many tokens of prompts."""
        blocks = tokens // self._cache.page_size
        if blocks:
            self._loads.computed(blocks, seconds)

    def _begin_loads(self, queue: list[Any], most: int) -> list[Any]:
        """Look up what was not looked up yet; answers who is to be kept back.

        No more than `most` loads at a time: as many requests can run, and what is loaded ahead of
        these would displace it. Memory goes to the first that lacks some: it is looked up again
        once there is as much, and those behind it after that. SGLang's queue has it meanwhile, for
        what is too little for its prefix may do for a chunk of it.
        """
        rids = {request.rid for request in queue}
        self._looked_up &= rids
        self._lacked = {rid: tokens for rid, tokens in self._lacked.items() if rid in rids}
        back = []
        is_short = False
        for request in queue:
            rid = request.rid
            if rid in self._job_of:
                back.append(request)
            if rid in self._looked_up or is_short or self._loads.open >= most:
                continue
            if self._lacks(rid):
                is_short = True
                continue
            if not self._begin(request):
                back.append(request)  # another one loads the same: it is looked up after that
            elif rid in self._lacked:
                is_short = True
            else:
                self._looked_up.add(rid)
                if rid in self._job_of:
                    back.append(request)
        return back

    def _lacks(self, rid: str) -> bool:
        """Whether there is still too little memory for its prefix."""
        tokens = self._lacked.get(rid, 0)
        if tokens:
            allocator: ElasticPagedAllocator = self._cache.token_to_kv_pool_allocator
            if allocator.reachable_size(self._cache) < tokens:
                return True
            del self._lacked[rid]
        return False

    def _begin(self, request: Any) -> bool:
        """Begin the load of a request, if there is one; False: look it up after another's load.

        Where there is no memory for it, `_lacked` has the request.
        """
        cache, page = self._cache, int(self._cache.page_size)
        tokens = array("q", request.origin_input_ids) + array("q", request.output_ids)
        blocks = request._compute_max_prefix_len(len(tokens)) // page
        if blocks == 0 or request.positional_embed_overrides is not None:
            return True
        key = RadixKey(tokens[: blocks * page], request.extra_key, cache_salt=request.cache_salt)
        found = cache.match_prefix(MatchPrefixParams(key=key))
        there = found.device_prefix_len // page
        if there == blocks:
            return True
        keys = self._keys(get_storage_hash_str(key, None, page_size=page))
        spare = cache.tree_blocks.adopt(keys[there * KEY_BYTES :])
        if spare:
            lock = cache.lock(found.last_device_node)
            there += self._insert(_Waiting(key, request.priority or 0, there, lock, spare, b""))
            found = cache.match_prefix(MatchPrefixParams(key=key[: there * page]))
        rest = keys[there * KEY_BYTES :]
        first = rest[:KEY_BYTES]
        if any(first == each.first for each in self._waiting.values()):
            return False
        match = self._tiers.match(
            rest, chain_after=keys[: there * KEY_BYTES][-KEY_BYTES:] or NO_KEY
        )
        if match.count == 0:
            match.release()
            return True
        lock = cache.lock(found.last_device_node)
        ids = self._take(match.count)
        if ids is None:
            self._lacked[request.rid] = match.count * page
            cache.unlock(lock)
            match.release()
            return True
        job = next(self._jobs)
        whole = key[: (there + match.count) * page]
        self._waiting[job] = _Waiting(whole, request.priority or 0, there, lock, ids, first)
        self._job_of[request.rid] = job
        self._loads.begin(request.rid, job, match, ids)
        return True

    def _take(self, blocks: int) -> list[int] | None:
        allocator: ElasticPagedAllocator = self._cache.token_to_kv_pool_allocator
        tokens = blocks * int(self._cache.page_size)
        if not allocator.have(tokens, self._cache):
            return None
        allocator.evict_to_free_tokens(self._cache, tokens)
        return self._cache.blocks.take(blocks)

    def _finish(self) -> None:
        """Put into the tree what has come."""
        self._loads.give_up_slow()
        for load in self._loads.take_finished():
            self._job_of.pop(load.request, None)
            waiting = self._waiting.pop(load.job, None)
            if waiting is not None:  # else the cache was emptied before it ended
                self._put(load, waiting)

    def _put(self, load: Load, waiting: _Waiting) -> None:
        if load.leading < load.blocks:
            self._cache.blocks.give_back(waiting.ids[load.leading :])
            _log.info(
                "Of request %s, %d of %d blocks could not be read from the tiers: they are"
                " computed.",
                load.request,
                load.blocks - load.leading,
                load.blocks,
            )
        page = int(self._cache.page_size)
        self._insert(
            waiting._replace(
                ids=waiting.ids[: load.leading],
                key=waiting.key[: (waiting.there + load.leading) * page],
            )
        )

    def _insert(self, blocks: _Waiting) -> int:
        """Put blocks that are in use, and hold their records, into the tree, where nobody locks
        them; answers how many."""
        cache, page = self._cache, int(self._cache.page_size)
        if blocks.ids:
            before = cache.path_device_indices(blocks.lock.node)
            pages = torch.tensor(blocks.ids, dtype=torch.int64, device=before.device)
            slots = (pages[:, None] * page + torch.arange(page, device=before.device)).flatten()
            length = (blocks.there + len(blocks.ids)) * page
            # What the tree has got meanwhile stays, and the same blocks of ours are freed.
            inserted = cache.insert(
                InsertParams(
                    key=blocks.key[:length],
                    value=torch.cat([before.to(torch.int64), slots]),
                    prev_prefix_len=blocks.there * page,
                    inserted_len=length,
                    priority=blocks.priority,
                )
            )
            cache.unlock(cache.lock(inserted.last_device_node))
        cache.unlock(blocks.lock)
        return len(blocks.ids)

    # --- keys ----------------------------------------------------------------------------------

    def _keys(self, hashes: list[str]) -> bytes:
        """SGLang's SHA-256 of a block stands for all tokens up to it, salt and extra key."""
        return b"".join(self._namespace.key_of(bytes.fromhex(each)) for each in hashes)

    def _keys_of(self, node: Any) -> bytes:
        """The keys of a node's blocks; where SGLang needs no hashes, they are made here."""
        unnamed = []
        above = node
        while above.hash_value is None:
            unnamed.append(above)
            above = above.parent
        for each in reversed(unnamed):
            each.hash_value = compute_node_hash_values(each, int(self._cache.page_size))
        return self._keys(node.hash_value)

    # --- sleep, reset, end ---------------------------------------------------------------------

    @contextmanager
    def demoted(self) -> Iterator[None]:
        """The cache is emptied meanwhile, and found again in the tiers: all of it is copied first.

        Blocks as long as `KVELASTIC_TIER_SLEEP_SECONDS` says.
        """
        self._demote_all(self._tiers.clean_all, self._sleep_wait_s)
        self._keeps_copies = True
        try:
            yield
        finally:
            self._keeps_copies = False

    def reset(self) -> None:
        """The cache is emptied for good: nothing stored so far is found any more.

        Blocks while copies that have begun end.
        """
        if not self._loads.cancel_all(_END_LOADS_S):
            _log.warning("Loads from the tiers have not ended for %.0f s.", _END_LOADS_S)
        self._loads.take_finished()
        self._waiting.clear()
        self._job_of.clear()
        self._looked_up.clear()
        self._lacked.clear()
        if not self._keeps_copies:
            self._namespace = self._tiers.forget()

    def close(self) -> None:
        """The scheduler ends: what is dirty is demoted, for `KVELASTIC_TIER_EXIT_SECONDS`.

        Also to farther tiers, which may be all that the next start finds.
        """
        self._demote_all(self._tiers.clean_before_exit, self._exit_wait_s)
        self._tiers.close()

    def _demote_all(self, clean: Callable[[float], int], timeout_s: float) -> None:
        self._cache.settle()
        left = clean(timeout_s)
        if left:
            _log.warning("%d blocks of the radix cache could not be copied to a tier.", left)
