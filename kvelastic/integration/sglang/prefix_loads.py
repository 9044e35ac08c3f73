"""Loads prefixes of waiting requests from the tiers, beside SGLang's rounds.

    round n     a request waits: its prefix is looked up from where the radix cache ends. Spare
                blocks return to the tree at once. For records in tiers it gets blocks, and a load
                begins. SGLang does not see the request in this round
    ...         other requests run; if none can, the scheduler backs off
    round n+k   the load has ended: loaded blocks are inserted into the tree like those of a
                finished request, and the request is scheduled. Missing blocks are computed

No failure here can fail a request. Blocks are used while they load and cached once they are in the
tree; other requests may use them before the one they were loaded for.

Used by the scheduler's thread only; the tiers' threads execute the loads. Imports SGLang.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import compute_node_hash_values, get_storage_hash_str

from kvelastic.integration.sglang.hidden_requests import hidden_requests
from kvelastic.tiers.base import KEY_BYTES, NO_KEY
from kvelastic.tiers.load import Load, Loads

if TYPE_CHECKING:
    from kvelastic.config import Config
    from kvelastic.integration.sglang.allocator import ElasticPagedAllocator
    from kvelastic.integration.sglang.radix_cache import ElasticRadixCache
    from kvelastic.tiers.manager import Tiers

_log = logging.getLogger("kvelastic.sglang")

_END_LOADS_S: Final = 60.0


class _Waiting(NamedTuple):
    """A request whose prefix is being loaded."""

    key: RadixKey
    """Its tokens that will be cached once the load has ended."""
    priority: int
    there: int
    """How many of its blocks the tree already had."""
    lock: Any
    """The lock that keeps these blocks."""
    ids: list[int]
    """The blocks being loaded."""
    first: bytes
    """The key of the first block being loaded."""


class PrefixLoads:
    """The loads of one scheduler."""

    def __init__(self, cache: ElasticRadixCache, tiers: Tiers, settings: Config) -> None:
        """Also gives the cache's blocks keys."""
        self._cache = cache
        self._tiers = tiers
        self._namespace = tiers.namespace
        self._settings = settings
        self._loads = Loads(tiers, compares=settings.tier_compare)
        self._waiting: dict[Load, _Waiting] = {}
        self._loading: set[str] = set()
        """Requests whose prefixes are loaded."""
        self._looked_up: set[str] = set()
        """Queued requests that have been looked up."""
        self._lacked: dict[str, int] = {}
        """Requests whose prefixes lacked memory when looked up, with the tokens needed."""
        self._keeps_copies = False
        cache.tree_blocks.keys_of = self._keys_of
        cache.prefix_loads = self

    # --- rounds --------------------------------------------------------------------------------

    @contextmanager
    def hidden_requests(self, scheduler: Any) -> Iterator[None]:
        """Hide requests whose prefixes are loading from SGLang's queue in the body.

        Call in a session of the pool.
        """
        queue = scheduler.waiting_queue
        self._finish()
        back = self._begin_loads(queue, int(scheduler.max_running_requests)) if queue else []
        if not queue:
            self._looked_up.clear()
            self._lacked.clear()
        with hidden_requests(scheduler, back):
            yield

    def wait_for_any(self, timeout_s: float) -> bool:
        """Block until a load ends, up to `timeout_s`. Returns False at once without loads."""
        if not self._loads.open:
            return False
        self._loads.wait_for_any(timeout_s)
        return True

    @property
    def loading_tokens(self) -> int:
        """Tokens of blocks that only loads use."""
        return sum(len(each.ids) for each in self._waiting.values()) * int(self._cache.page_size)

    def computed(self, tokens: int, seconds: float) -> None:
        """Record the time in which a step computed `tokens` prompt tokens."""
        blocks = tokens // self._cache.page_size
        if blocks:
            self._loads.computed(blocks, seconds)

    def _begin_loads(self, queue: list[Any], most: int) -> list[Any]:
        """Look up new requests and start loads; return the requests to hide from SGLang.

        At most `most` loads run: as many requests can run, and loading more would displace their
        blocks. The first request that lacks memory is served first: it is looked up again once
        enough is available, and later requests after it. SGLang still sees it, because a chunk
        of it may fit.
        """
        rids = {request.rid for request in queue}
        self._looked_up &= rids
        self._lacked = {rid: tokens for rid, tokens in self._lacked.items() if rid in rids}
        back = []
        is_short = False
        for request in queue:
            rid = request.rid
            if rid in self._loading:
                back.append(request)
            if rid in self._looked_up or is_short or self._loads.open >= most:
                continue
            if self._lacks(rid):
                is_short = True
                continue
            if not self._begin(request):
                back.append(request)  # another request loads the same prefix: look up after it
            elif rid in self._lacked:
                is_short = True
            else:
                self._looked_up.add(rid)
                if rid in self._loading:
                    back.append(request)
        return back

    def _lacks(self, rid: str) -> bool:
        """Return True if memory for the request's prefix is still too small."""
        tokens = self._lacked.get(rid, 0)
        if tokens:
            allocator: ElasticPagedAllocator = self._cache.token_to_kv_pool_allocator
            if allocator.reachable_size(self._cache) < tokens:
                return True
            del self._lacked[rid]
        return False

    def _begin(self, request: Any) -> bool:
        """Start a request's load, if any. Returns False if it must wait for another load.

        If there is no memory, the request is added to `_lacked`.
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
        load = self._tiers.match(rest, chain_after=keys[: there * KEY_BYTES][-KEY_BYTES:] or NO_KEY)
        if load.count == 0:
            load.release()
            return True
        lock = cache.lock(found.last_device_node)
        ids = self._take(load.count)
        if ids is None:
            self._lacked[request.rid] = load.count * page
            cache.unlock(lock)
            load.release()
            return True
        whole = key[: (there + load.count) * page]
        self._waiting[load] = _Waiting(whole, request.priority or 0, there, lock, ids, first)
        self._loading.add(request.rid)
        self._loads.begin(load.assign(request.rid, 0, ids))
        return True

    def _take(self, blocks: int) -> list[int] | None:
        allocator: ElasticPagedAllocator = self._cache.token_to_kv_pool_allocator
        tokens = blocks * int(self._cache.page_size)
        if not allocator.have(tokens, self._cache):
            return None
        allocator.evict_to_free_tokens(self._cache, tokens)
        return self._cache.blocks.take(blocks)

    def _finish(self) -> None:
        """Insert loaded blocks into the tree."""
        self._loads.give_up_slow()
        for load in self._loads.take_finished():
            self._loading.discard(load.request)
            waiting = self._waiting.pop(load, None)
            if waiting is not None:  # else the cache was reset before the load ended
                self._put(load, waiting)

    def _put(self, load: Load, waiting: _Waiting) -> None:
        if load.leading < len(load.ids):
            self._cache.blocks.give_back(waiting.ids[load.leading :])
            _log.info(
                "Request %s: %d of %d blocks could not be read from the tiers and are computed.",
                load.request,
                len(load.ids) - load.leading,
                len(load.ids),
            )
        page = int(self._cache.page_size)
        self._insert(
            waiting._replace(
                ids=waiting.ids[: load.leading],
                key=waiting.key[: (waiting.there + load.leading) * page],
            )
        )

    def _insert(self, blocks: _Waiting) -> int:
        """Insert used blocks with their loaded contents into the tree, unlocked; return their
        number."""
        cache, page = self._cache, int(self._cache.page_size)
        if blocks.ids:
            before = cache.path_device_indices(blocks.lock.node)
            pages = torch.tensor(blocks.ids, dtype=torch.int64, device=before.device)
            slots = (pages[:, None] * page + torch.arange(page, device=before.device)).flatten()
            length = (blocks.there + len(blocks.ids)) * page
            # If the tree already has some of them by now, ours are freed.
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
        """SGLang's SHA-256 of a block covers all tokens up to it, salt and extra key."""
        return b"".join(self._namespace.key_of(bytes.fromhex(each)) for each in hashes)

    def _keys_of(self, node: Any) -> bytes:
        """Return the keys of a node's blocks; computes SGLang's hashes if they are missing."""
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
        """The cache is emptied in the body; demote its blocks first, so that loads find them.

        Blocks up to `KVELASTIC_TIER_SLEEP_SECONDS`.
        """
        self._demote_all(self._tiers.clean_all, self._settings.tier_sleep_s)
        self._keeps_copies = True
        try:
            yield
        finally:
            self._keeps_copies = False

    def reset(self) -> None:
        """The cache is emptied: start a new generation unless `demoted` is active.

        Blocks until running copies have ended.
        """
        if not self._loads.cancel_all(_END_LOADS_S):
            _log.warning("Loads from the tiers have not ended for %.0f s.", _END_LOADS_S)
        self._loads.take_finished()
        self._waiting.clear()
        self._loading.clear()
        self._looked_up.clear()
        self._lacked.clear()
        if not self._keeps_copies:
            self._namespace = self._tiers.forget()

    def close(self) -> None:
        """Demote dirty blocks when the scheduler ends, for up to `KVELASTIC_TIER_EXIT_SECONDS`.

        Waits for farther tiers too: the next start may find nothing else.
        """
        self._demote_all(self._tiers.clean_before_exit, self._settings.tier_exit_s)
        self._tiers.close()

    def _demote_all(self, clean: Callable[[float], int], timeout_s: float) -> None:
        self._cache.settle()
        left = clean(timeout_s)
        if left:
            _log.warning("%d blocks of the radix cache could not be copied to a tier.", left)
