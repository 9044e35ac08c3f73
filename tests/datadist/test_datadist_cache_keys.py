"""Who refers to a cache: ids and keys against a model that only counts."""

from __future__ import annotations

import pytest
from datadist_local import local_manager, second_options
from hypothesis import seed as with_seed
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvelastic.datadist import Cache, CacheDesc, CacheKey, DataType, LLMException, LLMStatusCode
from kvelastic.datadist.descriptors import INVALID_ID
from kvelastic.datadist.status import LLMParamError

MIB = 1 << 20
ROWS = 3
TENSORS = 2
DESC = CacheDesc(TENSORS, [ROWS, MIB // 2], DataType.DT_INT8)  # 2 pages with its padding
PAGES_EACH = 2
POOL_PAGES = 12

REQUESTS = st.integers(0, 5)


class References(RuleBasedStateMachine):
    """Caches with keys come and go; the model knows which are left and what memory that is."""

    steps = 0

    def __init__(self) -> None:
        super().__init__()
        self.manager, self.caches = local_manager(second_options(POOL_PAGES * 2 * MIB))
        self.handles: dict[int, Cache] = {}
        self.rows: dict[int, dict[int, set[int]]] = {}  # cache id: request: tensors to come
        self.places: dict[int, tuple[int, int]] = {}  # request: cache id, row

    def teardown(self) -> None:
        self.caches.close()

    def alive(self) -> set[int]:
        return set(self.handles) | {cache for cache, rows in self.rows.items() if rows}

    @rule(requests=st.lists(st.one_of(REQUESTS, st.just(INVALID_ID)), max_size=ROWS + 1))
    def allocate(self, requests: list[int]) -> None:
        keys = [CacheKey(1, request) for request in requests]
        wanted = {request: row for row, request in enumerate(requests) if request != INVALID_ID}
        try:
            cache = self.manager.allocate_cache(DESC, keys)
        except LLMParamError:
            assert len(requests) > ROWS or wanted.keys() & self.places.keys()
            return
        except LLMException as error:
            self.refused(error)
            return
        assert len(requests) <= ROWS
        assert not wanted.keys() & self.places.keys()
        self.handles[cache.cache_id] = cache
        self.rows[cache.cache_id] = {one: set(range(TENSORS)) for one in wanted}
        self.places.update({one: (cache.cache_id, row) for one, row in wanted.items()})

    @precondition(lambda self: self.handles)
    @rule(data=st.data(), twice=st.booleans())
    def deallocate(self, data: st.DataObject, twice: bool) -> None:
        cache_id = data.draw(st.sampled_from(sorted(self.handles)))
        cache = self.handles.pop(cache_id)
        for _ in range(1 + twice):
            self.manager.deallocate_cache(cache)
        assert cache.tensor_addrs == []

    @rule(request=REQUESTS)
    def remove(self, request: int) -> None:
        self.manager.remove_cache_key(CacheKey(1, request))
        self.gone(request)

    @rule(request=REQUESTS, tensors=st.sets(st.integers(0, TENSORS - 1), min_size=1))
    def pulled(self, request: int, tensors: set[int]) -> None:
        """As a peer that has pulled some layers of a key says."""
        if request not in self.places:
            with pytest.raises(LLMException) as failed:
                self.caches.of_key(CacheKey(1, request).index)
            assert failed.value.status_code is LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
            return
        cache_id, row = self.places[request]
        entry, found = self.caches.of_key(CacheKey(1, request).index)
        assert (entry.cache_id, found) == (cache_id, row)
        self.caches.moved(cache_id, row, sorted(tensors))
        left = self.rows[cache_id][request]
        left -= tensors
        if not left:
            self.gone(request)

    @precondition(lambda self: self.alive())
    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        """A reader holds the memory, whoever lets go of the cache meanwhile."""
        cache_id = data.draw(st.sampled_from(sorted(self.alive())))
        if cache_id not in self.handles:
            return
        entry = self.caches.of_id(cache_id)
        with self.caches.held(entry):
            self.manager.deallocate_cache(self.handles.pop(cache_id))
            for request in list(self.rows[cache_id]):
                self.manager.remove_cache_key(CacheKey(1, request))
                self.gone(request)
            self.caches.check_integrity()

    def refused(self, error: LLMException) -> None:
        assert error.status_code is LLMStatusCode.LLM_OUT_OF_MEMORY
        assert (len(self.alive()) + 1) * PAGES_EACH > POOL_PAGES

    def gone(self, request: int) -> None:
        if request in self.places:
            cache_id, _ = self.places.pop(request)
            del self.rows[cache_id][request]

    @invariant()
    def agrees(self) -> None:
        References.steps += 1
        self.caches.check_integrity()
        (memory,) = self.caches.pools
        used = memory.pool.blocks.stats()["blocks_used"]
        assert used == len(self.alive()) * PAGES_EACH


def test_unknown_tensor_indices_consume_no_key() -> None:
    """A peer that says nonsense of what it has had."""
    manager, caches = local_manager(second_options(POOL_PAGES * 2 * MIB))
    cache = manager.allocate_cache(DESC, [CacheKey(1, 7)])
    caches.moved(cache.cache_id, 0, range(TENSORS, 1 << 16))
    entry, _ = caches.of_key(CacheKey(1, 7).index)
    assert not any(entry.moved.values())
    caches.moved(cache.cache_id, 0, range(1 << 16))
    assert not entry.rows
    caches.close()


References.TestCase.settings = settings(max_examples=10, stateful_step_count=40)
TestReferences = References.TestCase


@pytest.mark.soak
def test_ten_thousand_random_reference_steps() -> None:
    References.steps = 0
    for seed in range(1000):
        run_state_machine_as_test(
            with_seed(seed)(References),
            settings=settings(max_examples=50, stateful_step_count=100, database=None),
        )
        if References.steps >= 10_000:
            return
    pytest.fail(f"{References.steps} steps only")
