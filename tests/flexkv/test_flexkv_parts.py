"""The parts below KVManager, each by what its name promises."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flexkv_engine import (
    MODEL,
    SOON_S,
    TOKENS,
    Engine,
    cache_config,
    prompt,
    running,
    slots_of,
    wait_for_media,
)

from kvelastic.config import load
from kvelastic.errors import (
    DoubleFreeError,
    InvalidArgumentError,
    PoolExhaustedError,
    UnknownBlockError,
    UnsupportedError,
)
from kvelastic.flexkv import kvtask
from kvelastic.flexkv.cache.mempool import Mempool
from kvelastic.flexkv.cache.radixtree import RadixTree
from kvelastic.flexkv.cache.transfer_pattern import (
    Fragment,
    get_graph,
    prefetch_graph,
    put_graph,
)
from kvelastic.flexkv.common.block import SequenceMeta
from kvelastic.flexkv.common.debug import describe
from kvelastic.flexkv.common.hash_utils import namespace_seed
from kvelastic.flexkv.common.request import KVResponseStatus
from kvelastic.flexkv.common.ring_buffer import RingBuffer
from kvelastic.flexkv.common.storage import KVCacheLayoutType
from kvelastic.flexkv.common.transfer import (
    GRAPH_END,
    DeviceType,
    TransferOp,
    TransferOpGraph,
    TransferOpStatus,
    TransferType,
)
from kvelastic.flexkv.kvmanager import KVManager
from kvelastic.flexkv.kvtask import KVTaskEngine, TaskStatus
from kvelastic.flexkv.storage.storage_engine import StorageEngine
from kvelastic.tiers.namespace import Namespace
from kvelastic.tiers.stores.host.store import HostStore
from tools.flexkv_replay import replay

# --- keys -----------------------------------------------------------------------------------------


def test_block_key_covers_all_preceding_tokens() -> None:
    tokens = prompt(1, 4, more=1)
    sequence = SequenceMeta(tokens, TOKENS)
    assert (sequence.num_blocks, len(sequence), len(sequence.keys)) == (4, 17, 64)
    changed = tokens.copy()
    changed[TOKENS] += 1
    other = SequenceMeta(changed, TOKENS)
    same = [sequence.key(at) == other.key(at) for at in range(4)]
    assert same == [True, False, False, False]
    assert sequence.block_hashes.shape == (4, 2)
    assert sequence.parent(0) == bytes(16)
    assert sequence.parent(2) == sequence.key(1)
    with pytest.raises(InvalidArgumentError):
        sequence.key(4)
    with pytest.raises(InvalidArgumentError):
        SequenceMeta(tokens, 0)


def test_namespace_seeds_do_not_collide() -> None:
    seeds = [
        namespace_seed(bytes(16), names) for names in (None, ["a"], ["a", "b"], ["ab"], ["b", "a"])
    ]
    assert len(set(seeds)) == len(seeds)
    for wrong in ("ab", ["a\0b"], [1]):
        with pytest.raises(InvalidArgumentError):
            namespace_seed(bytes(16), wrong)  # type: ignore[arg-type]


# --- layouts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KVCacheLayoutType)
def test_blocks_are_exchanged_between_different_layouts(kind: KVCacheLayoutType) -> None:
    tokens = prompt(3, 5)
    with running() as first:
        assert first.put(tokens) == 5
        other = Engine(first.manager, MODEL, kind)
        first.manager.task_engine.transfer_engine.gpu_worker.unregister(0)
        first.manager.register_kv_caches([other.tensor], other.layout)
        assert other.get(tokens) == 5


def test_per_layer_tensors_equal_one_tensor() -> None:
    with KVManager(MODEL, cache_config()) as manager:
        own = Engine(manager)
        layers = [own.tensor[layer] for layer in range(MODEL.num_layers)]
        manager.register_kv_caches(layers, own.layout)
        tokens = prompt(1, 3)
        assert own.put(tokens) == 3
        assert own.get(tokens) == 3


def test_mismatched_tensors_are_refused() -> None:
    with KVManager(MODEL, cache_config()) as manager:
        own = Engine(manager)
        for wrong in (
            [own.tensor[:1]],
            [own.tensor, own.tensor],
            [own.tensor.transpose()],
            [bytes(own.tensor.nbytes)],
        ):
            with pytest.raises(InvalidArgumentError):
                manager.register_kv_caches(wrong, own.layout)
        manager.register_kv_caches([own.tensor], own.layout)
        with pytest.raises(InvalidArgumentError, match="already"):
            manager.register_kv_caches([own.tensor], own.layout)
        with pytest.raises(InvalidArgumentError, match="client 1"):
            manager.register_kv_caches([own.tensor], own.layout, 1)
        with pytest.raises(InvalidArgumentError, match="rank 1"):
            manager.register_kv_caches([own.tensor], own.layout, 0, 1)


# --- mempool, ring --------------------------------------------------------------------------------


def test_mempool_refuses_double_free() -> None:
    pool = Mempool(4)
    blocks = pool.allocate_blocks(3)
    assert len(set(blocks.tolist())) == 3
    assert (pool.num_free_blocks, pool.num_used_blocks) == (1, 3)
    with pytest.raises(PoolExhaustedError, match="1 of 4"):
        pool.allocate_blocks(2)
    with pytest.raises(ValueError, match="asked for"):
        pool.allocate_blocks(5)
    pool.recycle_blocks(blocks[:1])
    for wrong in (blocks[:2], [int(blocks[1])] * 2):
        with pytest.raises(DoubleFreeError):
            pool.recycle_blocks(wrong)
    with pytest.raises(UnknownBlockError):
        pool.recycle_blocks([4])
    assert pool.num_used_blocks == 2
    pool.check_integrity()
    pool.reset()
    assert pool.num_free_blocks == 4


def test_ring_buffer_keeps_the_newest_in_order() -> None:
    ring: RingBuffer[int] = RingBuffer(3)
    for number in range(5):
        ring.append(number)
    assert list(ring) == [2, 3, 4]


# --- tree -----------------------------------------------------------------------------------------

WORLD = Namespace("m", record_bytes=4096)


@pytest.fixture
def store() -> Any:
    made = HostStore(4096, 8 << 20, settings=load(), policy="lru", max_records=6)
    made.enter(WORLD)
    yield made
    made.check_integrity()
    made.close()


def records(count: int) -> list[memoryview]:
    return [memoryview(bytes([at]) * 4096) for at in range(count)]


def test_radix_tree_matches_inserts_locks_and_evicts(store: HostStore) -> None:
    tree = RadixTree(store, WORLD)
    sequence = SequenceMeta(prompt(1, 5), TOKENS)
    assert tree.is_empty()
    place = tree.insert(sequence)
    assert place is not None
    assert all(slot >= 0 for slot in place.slots)
    assert (len(place.slots), place.first_new) == (5, 0)
    match = tree.match_prefix(sequence)
    assert (match.num_ready_matched_blocks, match.num_matched_blocks) == (0, 5)
    assert store.put(sequence.keys[:48], records(3), chain_after=bytes(16)) == [True] * 3
    match = tree.match_prefix(sequence)
    assert (match.num_ready_matched_blocks, match.num_matched_blocks) == (3, 5)
    store.check_integrity()
    place.release()
    place.release()
    match = tree.match_prefix(sequence)
    assert (match.num_ready_matched_blocks, match.num_matched_blocks) == (3, 3)
    with tree.lock(sequence, 2) as hold:
        assert hold.count == 2
        assert tree.evict(9) == 1
    assert tree.match_prefix(sequence).num_ready_matched_blocks == 2
    assert tree.remove(SequenceMeta(prompt(2, 1), TOKENS)) == 0
    assert tree.remove(sequence) == 2
    assert tree.is_empty()
    assert store.put(sequence.keys[:16], records(1)) == [True]
    assert tree.reset() == 1
    assert tree.is_empty()


def test_reservation_is_all_or_nothing(store: HostStore) -> None:
    tree = RadixTree(store, WORLD)
    old, new = SequenceMeta(prompt(1, 4), TOKENS), SequenceMeta(prompt(2, 7), TOKENS)
    assert store.put(old.keys, records(4)) == [True] * 4
    assert tree.insert(new) is None
    assert tree.match_prefix(old).num_ready_matched_blocks == 4, "displaced for nothing"
    with tree.lock(old, 4):
        assert tree.insert(SequenceMeta(prompt(3, 3), TOKENS)) is None
        store.check_integrity()
    place = tree.insert(SequenceMeta(prompt(3, 6), TOKENS))
    assert place is not None
    place.release()


def test_put_after_removal_stores_nothing(store: HostStore) -> None:
    tree = RadixTree(store, WORLD)
    sequence = SequenceMeta(prompt(1, 3), TOKENS)
    place = tree.insert(sequence)
    tree.remove(sequence)
    assert store.put(sequence.keys, records(3)) == [False] * 3
    assert place is not None
    place.release()
    store.check_integrity()
    assert tree.is_empty()


def test_failed_put_releases_its_reservation(store: HostStore) -> None:
    sequence = SequenceMeta(prompt(1, 3), TOKENS)
    place = RadixTree(store, WORLD).insert(sequence)
    assert place is not None
    with pytest.raises(InvalidArgumentError):
        store.put(sequence.keys, [memoryview(bytes(8192))[::2]] * 3)
    place.release()
    store.check_integrity()
    assert store.put(sequence.keys, records(3)) == [True] * 3


def test_releasing_an_old_reservation_keeps_the_new_one(store: HostStore) -> None:
    keys = SequenceMeta(prompt(1, 1), TOKENS).keys
    first = store.reserve(keys)
    assert first is not None
    assert store.put(keys, records(1)) == [True]
    assert store.evict(1) == 1
    second = store.reserve(keys)
    assert second is not None
    first.release()
    assert store.put(keys, records(1)) == [True]
    second.release()
    assert store.has(keys) == [True]


# --- graphs ---------------------------------------------------------------------------------------


def kinds(graph: TransferOpGraph) -> list[TransferType]:
    return [op.transfer_type for op in graph.order()]


def test_transfer_graphs_match_flexkv() -> None:
    keys = SequenceMeta(prompt(1, 5), TOKENS).keys
    fragments = [
        Fragment(DeviceType.CPU, 0, 2),
        Fragment(DeviceType.SSD, 2, 2),
        Fragment(DeviceType.REMOTE, 4, 1),
    ]
    graph = get_graph(keys, fragments)
    assert kinds(graph) == [TransferType.DISK2H, TransferType.REMOTE2H, TransferType.H2D]
    assert graph.ops[graph.task_end_op_id].transfer_type is TransferType.H2D
    assert [op.num_blocks for op in graph.order()] == [2, 1, 5]
    assert kinds(get_graph(keys, fragments[:1])) == [TransferType.H2D]
    assert kinds(prefetch_graph(keys, fragments[1:]))[-1] is TransferType.VIRTUAL
    graph = put_graph(keys, [DeviceType.SSD, DeviceType.REMOTE])
    assert kinds(graph) == [TransferType.D2H, TransferType.H2DISK, TransferType.H2REMOTE]
    assert graph.ops[graph.task_end_op_id].transfer_type is TransferType.D2H
    assert get_graph(b"", []).num_ops == 0


def test_invalid_transfer_graph_is_refused() -> None:
    graph = TransferOpGraph()
    keys = SequenceMeta(prompt(1, 2), TOKENS).keys
    first = graph.add_transfer_op(TransferOp(TransferType.DISK2H, keys=keys))
    second = graph.add_transfer_op(TransferOp(TransferType.H2D, keys=keys))
    graph.add_dependency(second, first)
    with pytest.raises(InvalidArgumentError, match="not in graph"):
        graph.add_dependency(second, 10**9)
    graph.add_dependency(first, second)
    with pytest.raises(InvalidArgumentError, match="wait for one another"):
        graph.order()
    for wrong in (
        {"keys": keys[:-1]},
        {"keys": keys, "src_block_ids": [1]},
        {"keys": keys, "dst_block_ids": [1, 2, 3]},
    ):
        with pytest.raises(InvalidArgumentError):
            TransferOp(TransferType.H2D, **wrong)


def test_transfer_engine_reports_completed_operations_and_graphs(tmp_path: Path) -> None:
    with running(cache_config(tmp_path)) as engine:
        transfers = engine.manager.task_engine.transfer_engine
        index = engine.manager.task_engine.cache_engine
        tokens = prompt(1, 3)
        engine.compute(tokens, range(3))
        graph, mask, plan, end, skipped = index.put(1, tokens, None, slots_of(range(3)))
        assert (mask.all(), skipped, end) == (True, 0, graph.task_end_op_id)
        transfers.submit_transfer_graph(graph)
        said: list[tuple[int, int]] = []
        while (graph.graph_id, GRAPH_END) not in said:
            said += transfers.get_completed_graphs_and_ops(SOON_S)
        put, disk = (op.op_id for op in graph.order())
        assert said == [(graph.graph_id, put), (graph.graph_id, disk), (graph.graph_id, GRAPH_END)]
        plan()
        assert transfers.get_completed_graphs_and_ops() == []
        with pytest.raises(InvalidArgumentError, match="completed already"):
            transfers.submit_transfer_graph(graph)
        engine.clear()
        longer = np.concatenate([tokens, prompt(2, 2)])
        graph, mask, plan, end = index.get(2, longer, np.ones(len(longer), np.bool_), None)
        assert mask.sum() == 3 * TOKENS
        graph.bind_engine_blocks([7, 8, 9])
        transfers.submit_transfer_graph([graph])
        while (graph.graph_id, GRAPH_END) not in said:
            said += transfers.get_completed_graphs_and_ops(SOON_S)
        plan()
        assert [engine.holds(7 + at, tokens, at) for at in range(3)] == [True] * 3
        *_, skipped = index.put(3, longer, None, None)
        assert skipped == 3


def test_graph_fails_whose_later_stage_cannot_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(cache_config(tmp_path)) as engine:
        transfers = engine.manager.task_engine.transfer_engine
        index = engine.manager.task_engine.cache_engine
        submit, submitted = transfers._executor.submit, []

        def submit_once(*arguments: Any) -> Any:
            submitted.append(arguments)
            if len(submitted) > 1:
                raise MemoryError("no memory for a second stage")
            return submit(*arguments)

        monkeypatch.setattr(transfers._executor, "submit", submit_once)
        tokens = prompt(1, 3)
        engine.compute(tokens, range(3))
        graph, _, plan, _, _ = index.put(1, tokens, None, slots_of(range(3)))
        transfers.submit_transfer_graph(graph)
        said: list[tuple[int, int]] = []
        while (graph.graph_id, GRAPH_END) not in said:
            said += transfers.get_completed_graphs_and_ops(SOON_S)
        plan()
        put, disk = graph.order()
        assert (put.status, disk.status) == (TransferOpStatus.COMPLETED, TransferOpStatus.FAILED)
        monkeypatch.undo()


def test_put_with_mismatched_slots_releases_its_reservation() -> None:
    with running() as engine:
        index = engine.manager.task_engine.cache_engine
        with pytest.raises(InvalidArgumentError):
            index.put(1, prompt(1, 3), None, slots_of([1]))
        assert engine.put(prompt(1, 3)) == 3
        with pytest.raises(UnsupportedError, match="layer_num"):
            index.get(1, prompt(1, 3), None, None, layer_num=1)


@pytest.mark.parametrize("kind", [TransferType.DISK2D, TransferType.PEERH2H, TransferType.H2DISK])
def test_unsupported_transfer_type_is_refused(kind: TransferType) -> None:
    with running() as engine:
        graph = TransferOpGraph()
        graph.add_transfer_op(TransferOp(kind, keys=bytes(range(16))))
        with pytest.raises(UnsupportedError, match=kind.value):
            engine.manager.task_engine.transfer_engine.submit_transfer_graph(graph)


def test_custom_transfer_graph_runs_in_dependency_order(tmp_path: Path) -> None:
    """CPU to disk and back by hand, without the cache engine."""
    with running(cache_config(tmp_path)) as engine:
        tokens = prompt(1, 20)
        engine.compute(tokens, range(20))
        transfers = engine.manager.task_engine.transfer_engine
        keys = engine.manager.task_engine.cache_engine.sequence(tokens).keys
        graph = TransferOpGraph()
        store = TransferOp(TransferType.D2H, keys=keys, src_block_ids=range(20))
        disk = TransferOp(TransferType.H2DISK, keys=keys)
        join = TransferOp(TransferType.VIRTUAL)
        for op in (disk, join, store):
            graph.add_transfer_op(op)
        graph.add_dependency(disk.op_id, store.op_id)
        graph.add_dependency(join.op_id, disk.op_id)
        transfers.submit_transfer_graph(graph)
        assert transfers.drain(SOON_S)
        assert {op.status for op in graph.ops.values()} == {TransferOpStatus.COMPLETED}
        assert [sum(op.moved) for op in (store, disk)] == [20, 20]
        engine.manager.task_engine.cache_engine.engine(DeviceType.CPU).evict(100)
        assert engine.get(tokens) == 20


def test_duplicate_block_in_a_graph_is_refused() -> None:
    with running() as engine:
        transfers = engine.manager.task_engine.transfer_engine
        key = bytes(range(16))
        graph = TransferOpGraph()
        graph.add_transfer_op(TransferOp(TransferType.D2H, keys=key * 2, src_block_ids=[0, 1]))
        with pytest.raises(InvalidArgumentError, match="twice"):
            transfers.submit_transfer_graph(graph)
        graph = TransferOpGraph()
        graph.add_transfer_op(TransferOp(TransferType.D2H, keys=key, src_block_ids=[10**6]))
        with pytest.raises(InvalidArgumentError, match="names block 1000000 of"):
            transfers.submit_transfer_graph(graph)


def test_one_graph_loads_a_key_into_several_blocks(tmp_path: Path) -> None:
    with running(cache_config(tmp_path)) as engine:
        tokens = prompt(1, 2)
        engine.put(tokens)
        transfers = engine.manager.task_engine.transfer_engine
        keys = engine.manager.task_engine.cache_engine.sequence(tokens).keys
        engine.manager.task_engine.cache_engine.engine(DeviceType.CPU).evict(1)
        engine.clear()
        graph = TransferOpGraph()
        read = TransferOp(TransferType.DISK2H, keys=keys[16:])
        loads = [
            TransferOp(TransferType.H2D, keys=keys, dst_block_ids=to) for to in ([5, 6], [9, 8])
        ]
        for op in (read, *loads):
            graph.add_transfer_op(op)
        for op in loads:
            graph.add_dependency(op.op_id, read.op_id)
        transfers.submit_transfer_graph(graph)
        assert transfers.drain(SOON_S)
        assert [op.moved for op in (read, *loads)] == [[True], [True, True], [True, True]]
        assert all(
            engine.holds(block, tokens, at) for block, at in ((5, 0), (6, 1), (9, 0), (8, 1))
        )


# --- storage --------------------------------------------------------------------------------------


def test_storage_opens_the_configured_tiers(tmp_path: Path) -> None:
    cache = cache_config(
        tmp_path, enable_remote=True, remote_cache_path=str(tmp_path / "shared"), num_cpu_blocks=7
    )
    storage = StorageEngine(MODEL, cache, load())
    try:
        assert storage.tiers == {DeviceType.CPU: 0, DeviceType.SSD: 1, DeviceType.REMOTE: 2}
        names = [store.name for store in storage.stores.values()]
        assert names == ["host", "disk", "folder"]
        assert storage.record_bytes == MODEL.token_size_in_bytes * TOKENS
        assert storage.store(DeviceType.CPU) is storage.stores[DeviceType.CPU]
        with pytest.raises(InvalidArgumentError, match="GPU"):
            storage.store(DeviceType.GPU)
        keys = os.urandom(16 * 9)
        views = [memoryview(bytes(storage.record_bytes))] * 9
        assert sum(storage.stores[DeviceType.CPU].put(keys, views)) == 7
    finally:
        storage.close()


def test_failed_store_open_closes_all_stores(tmp_path: Path) -> None:
    (tmp_path / "kv").mkdir(mode=0o777)
    (tmp_path / "kv").chmod(0o777)
    with pytest.raises(InvalidArgumentError):
        StorageEngine(MODEL, cache_config(tmp_path), load())  # the fixture looks at /dev/shm


def test_shared_folder_serves_as_remote_tier(tmp_path: Path) -> None:
    from dataclasses import replace

    model = replace(MODEL, weights="sha256:1")
    shared: dict[str, Any] = {"enable_remote": True, "remote_cache_path": str(tmp_path / "shared")}
    tokens = prompt(1, 5)
    with running(cache_config(**shared), model) as engine:
        assert engine.put(tokens) == 5
    with running(cache_config(**shared), model) as engine:
        wait_for_media(engine.manager)
        task = engine.manager.prefetch_async(tokens)
        answer = engine.manager.wait(task, SOON_S)[task]
        assert answer.status is KVResponseStatus.SUCCESS
        assert engine.get(tokens) == 5


# --- ranks ----------------------------------------------------------------------------------------


def test_ranks_get_their_own_heads_except_mla() -> None:
    from kvelastic.flexkv.common.config import ModelConfig

    for kv_dim in (2, 1):
        model = ModelConfig(
            num_layers=2, num_kv_heads=2, head_size=4, dtype="float32", tp_size=2, kv_dim=kv_dim
        )
        with KVManager(model, cache_config()) as manager:
            ranks = [Engine(manager, model) for _ in range(2)]
            for rank, own in enumerate(ranks):
                own.tensor[:] = np.random.default_rng(rank if kv_dim == 2 else 0).random(
                    own.tensor.shape, np.float32
                )
                manager.register_kv_caches([own.tensor], own.layout, tp_rank=rank)
            before = [own.tensor.copy() for own in ranks]
            tokens = prompt(1, 3)
            task = manager.put_async(tokens, slots_of(range(3)))
            assert manager.wait(task, SOON_S)[task].status is KVResponseStatus.SUCCESS
            for own in ranks:
                own.clear()
            task = manager.get_async(tokens, slots_of(range(3)))
            assert manager.wait(task, SOON_S)[task].status is KVResponseStatus.SUCCESS
            for own, was in zip(ranks, before, strict=True):
                assert (own.tensor[:, :, :3] == was[:, :, :3]).all()


# --- tasks ----------------------------------------------------------------------------------------


def test_expired_tasks_release_their_reservations() -> None:
    now = [0.0]
    tasks = KVTaskEngine(MODEL, cache_config(), clock=lambda: now[0])
    tasks.start()
    try:
        tokens = prompt(1, 3)
        old, _ = tasks.put_match(tokens)
        now[0] = kvtask.EXPIRY_S - 1
        young, _ = tasks.get_match(prompt(2, 1))
        assert tasks.status_of(old) is TaskStatus.UNREADY
        now[0] = kvtask.EXPIRY_S
        tasks.get_match(prompt(3, 1))
        assert tasks.status_of(old) is None
        assert tasks.status_of(young) is TaskStatus.COMPLETED
        assert tasks.wait(old, 0)[old].status is KVResponseStatus.NOTFOUND
        again, mask = tasks.put_match(tokens)
        assert mask.all(), "an expired task kept its places"
        tasks.cancel(again)
        tasks.check_integrity()
    finally:
        tasks.shutdown()


def test_oldest_tasks_expire_above_the_maximum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvtask, "MOST_TASKS", 3)
    with running() as engine:
        ids = [engine.manager.get_match(prompt(seed, 1))[0] for seed in range(5)]
        states = [engine.manager.task_engine.status_of(task) for task in ids]
        assert states == [None, None, *[TaskStatus.COMPLETED] * 3]


def test_failed_copy_fails_task_and_releases_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvelastic.errors import DriverError

    with running() as engine:
        worker = engine.manager.task_engine.transfer_engine.gpu_worker
        with monkeypatch.context() as broken:

            def fail(*_: object) -> None:
                raise DriverError("a copy that was made to fail")

            broken.setattr(worker, "copy_out", fail)
            tokens = prompt(1, 3)
            task = engine.manager.put_async(tokens, slots_of(range(3)))
            answer = engine.manager.wait(task, SOON_S, completely=True)[task]
            assert answer.status is KVResponseStatus.FAILED
            assert answer.return_mask is not None
            assert not answer.return_mask.any()
        assert engine.put(tokens) == 3
        assert engine.get(tokens) == 3


def test_threads_put_and_get_concurrently() -> None:
    errors: list[BaseException] = []
    with running(cache_config(num_cpu_blocks=24)) as engine:

        def work(number: int) -> None:
            try:
                own = range(number * 8, number * 8 + 8)
                for turn in range(20):
                    tokens = prompt(turn % 5, 1 + turn % 6)
                    blocks = list(own)[: len(tokens) // TOKENS]
                    task, mask = engine.manager.put_match(tokens)
                    count = int(mask.sum()) // TOKENS
                    engine.compute(tokens, blocks[:count], int(mask.argmax()) // TOKENS)
                    engine.manager.launch(task, slots_of(blocks[:count]))
                    engine.manager.wait(task, SOON_S)
                    task, mask = engine.manager.get_match(tokens)
                    count = int(mask.sum()) // TOKENS
                    engine.manager.launch(task, slots_of(blocks[:count]))
                    answer = engine.manager.wait(task, SOON_S)[task]
                    assert answer.status is KVResponseStatus.SUCCESS
                    for at in range(count):
                        assert engine.holds(blocks[at], tokens, at)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors, errors


# --- tracer, debug --------------------------------------------------------------------------------


def test_trace_replays_with_the_same_hits(tmp_path: Path) -> None:
    trace = tmp_path / "requests.jsonl"
    with running(cache_config(tmp_path, num_cpu_blocks=12, trace_path=str(trace))) as engine:
        for seed in (1, 2, 1, 3, 2, 1):
            engine.put(prompt(seed, 2 + seed))
            engine.get(prompt(seed, 6))
        task, _ = engine.manager.get_match(prompt(1, 3), np.arange(3 * TOKENS) >= TOKENS)
        engine.manager.cancel(task)
        engine.manager.put_match(prompt(9, 2), namespace=["a"])
        engine.manager.cancel(engine.manager.put_match(prompt(8, 2))[0])
        engine.manager.wait(engine.manager.prefetch_async(prompt(3, 5)), SOON_S)
    assert stat.S_IMODE(trace.stat().st_mode) == 0o600
    with running(cache_config(tmp_path / "other", num_cpu_blocks=12)) as engine:
        steps = list(replay(trace, engine.manager))
    assert len(steps) == 16
    assert [step.found for step in steps] == [step.recorded for step in steps]
    assert any(step.recorded[1] for step in steps)


@pytest.mark.parametrize(
    "line",
    [
        b'{"call":"get"}\n',
        b'{"call":"get","task":1,"tokens":"x","wanted":[0,1],"namespace":null,"found":[0,0]}\n',
        b'{"call":"steal"}\n',
        b"[]\n",
        b"not json\n",
    ],
)
def test_invalid_trace_is_refused(tmp_path: Path, line: bytes) -> None:
    trace = tmp_path / "trace"
    trace.write_bytes(b'{"kvelastic_flexkv_trace":1}\n' + line)
    with running() as engine:
        with pytest.raises(InvalidArgumentError, match="line 2"):
            list(replay(trace, engine.manager))
        trace.write_bytes(b'{"kvelastic_flexkv_trace":2}\n')
        with pytest.raises(InvalidArgumentError, match="version"):
            list(replay(trace, engine.manager))
        trace.write_bytes(b'{"kvelastic_flexkv_trace":1}\n{"call":"ge')
        assert list(replay(trace, engine.manager)) == []


def test_full_disk_stops_only_the_recording(
    caplog: pytest.LogCaptureFixture,
) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    with running(cache_config(trace_path="/dev/full")) as engine:
        assert engine.put(prompt(1, 2)) == 2
        assert engine.get(prompt(1, 2)) == 2
    assert "not recorded any more" in caplog.text


def test_describe_lists_open_and_completed_tasks(tmp_path: Path) -> None:
    with running(cache_config(tmp_path)) as engine:
        engine.put(prompt(1, 3))
        task, _ = engine.manager.get_match(prompt(1, 3))
        text = describe(engine.manager.task_engine)
        assert "CPU: 3 blocks" in text
        assert "SSD: 3 blocks" in text
        assert f"{task} get unready, 12 tokens" in text
        assert "put completed, 12 tokens" in text
        engine.manager.cancel(task)
