"""KVManager, sentence by sentence of FlexKV's semantics: match, launch, wait, cancel, reset."""

from __future__ import annotations

import gc
import inspect
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flexkv_engine import (
    ENGINE_BLOCKS,
    MODEL,
    SOON_S,
    TOKENS,
    Engine,
    cache_config,
    prompt,
    running,
    slots_of,
)
from waiting import DEADLINE_S

from kvelastic.errors import (
    ConfigError,
    InvalidArgumentError,
    NotInitializedError,
    TransferError,
    UnsupportedError,
)
from kvelastic.flexkv.cache.cache_engine import GlobalCacheEngine
from kvelastic.flexkv.common.config import GLOBAL_CONFIG_FROM_ENV, CacheConfig, ModelConfig
from kvelastic.flexkv.common.request import KVResponseStatus
from kvelastic.flexkv.common.transfer import DeviceType, TransferOpGraph
from kvelastic.flexkv.kvmanager import KVManager
from kvelastic.flexkv.kvtask import KVTaskEngine, TaskStatus
from kvelastic.flexkv.transfer.scheduler import TransferScheduler
from kvelastic.flexkv.transfer.transfer_engine import TransferEngine
from kvelastic.flexkv.transfer.worker import GPUCPUTransferWorker


@pytest.fixture
def engine() -> Iterator[Engine]:
    with running() as made:
        yield made


@pytest.fixture
def with_disk(tmp_path: Path) -> Iterator[Engine]:
    with running(cache_config(tmp_path)) as made:
        yield made


def evict_cpu(engine: Engine, count: int = 1000) -> None:
    engine.manager.task_engine.cache_engine.engine(DeviceType.CPU).evict(count)


# --- names ----------------------------------------------------------------------------------------

SIGNATURES: list[tuple[Any, str, list[tuple[str, Any]]]] = [
    (
        KVManager,
        "__init__",
        [
            ("model_config", inspect.Parameter.empty),
            ("cache_config", inspect.Parameter.empty),
            ("gpu_register_port", None),
            ("server_recv_port", None),
            ("dp_client_id", 0),
        ],
    ),
    (
        KVManager,
        "get_match",
        [
            ("token_ids", inspect.Parameter.empty),
            ("token_mask", None),
            ("layer_granularity", -1),
            ("dp_id", 0),
        ],
    ),
    (
        KVManager,
        "put_match",
        [("token_ids", inspect.Parameter.empty), ("token_mask", None), ("dp_id", 0)],
    ),
    (
        KVManager,
        "launch",
        [
            ("task_ids", inspect.Parameter.empty),
            ("slot_mappings", inspect.Parameter.empty),
        ],
    ),
    (
        KVManager,
        "wait",
        [("task_ids", inspect.Parameter.empty), ("timeout", 20.0), ("completely", False)],
    ),
    (
        GlobalCacheEngine,
        "get",
        [
            *((name, inspect.Parameter.empty) for name in ("request_id", "token_ids")),
            *((name, inspect.Parameter.empty) for name in ("token_mask", "slot_mapping")),
            ("layer_num", -1),
            ("layer_granularity", -1),
            ("dp_id", 0),
        ],
    ),
    (
        GlobalCacheEngine,
        "put",
        [
            *((name, inspect.Parameter.empty) for name in ("request_id", "token_ids")),
            *((name, inspect.Parameter.empty) for name in ("token_mask", "slot_mapping")),
            ("layer_num", -1),
            ("dp_id", 0),
        ],
    ),
    (
        TransferEngine,
        "submit_transfer_graph",
        [("transfer_graph", inspect.Parameter.empty)],
    ),
    (TransferEngine, "get_completed_graphs_and_ops", [("timeout", None)]),
]


@pytest.mark.parametrize(
    ("owner", "name", "expected"), SIGNATURES, ids=lambda value: getattr(value, "__name__", None)
)
def test_signatures_begin_as_in_flexkv(
    owner: Any, name: str, expected: list[tuple[str, Any]]
) -> None:
    parameters = list(inspect.signature(getattr(owner, name)).parameters.values())[1:]
    head = [(each.name, each.default) for each in parameters[: len(expected)]]
    assert head == expected


def test_newer_parameters_are_accepted_by_keyword() -> None:
    KVManager(
        MODEL,
        cache_config(),
        dp_client_id=0,
        server_recv_port="",
        gpu_register_port="",
        event_collector=None,
    )


# --- start and ready ------------------------------------------------------------------------------


def test_ready_after_every_rank_has_registered() -> None:
    model = ModelConfig(
        num_layers=2, num_kv_heads=2, head_size=4, dtype="float32", tp_size=2, dp_size=2
    )
    tasks = KVTaskEngine(model, cache_config())
    tasks.start()
    with KVManager(MODEL, cache_config()) as manager:
        for client in range(2):
            for rank in range(2):
                assert not tasks.is_ready()
                own = Engine(manager, model)
                tasks.register_kv_caches([own.tensor], own.layout, client, rank)
        assert tasks.is_ready()
    tasks.shutdown()


def test_calls_before_start_or_after_shutdown_raise() -> None:
    manager = KVManager(MODEL, cache_config())
    assert not manager.is_ready()
    with pytest.raises(NotInitializedError, match="start"):
        manager.get_match(prompt(1, 2))
    manager.start()
    manager.start()
    manager.shutdown()
    manager.shutdown()
    assert not manager.is_ready()
    for call in (
        lambda: manager.put_match(prompt(1, 2)),
        lambda: manager.launch(1, []),
        lambda: manager.wait(1),
        lambda: manager.try_wait(1),
        lambda: manager.cancel(1),
        manager.reset,
    ):
        with pytest.raises(NotInitializedError, match="shutdown"):
            call()


def test_manager_restarts_after_shutdown(tmp_path: Path) -> None:
    model = ModelConfig(
        num_layers=2, num_kv_heads=2, head_size=4, dtype="float32", model="m", weights="w"
    )
    manager = KVManager(model, cache_config(tmp_path))
    engine = Engine(manager, model)
    for found in (0, 3, 3):
        manager.start()
        assert not manager.is_ready()
        manager.register_kv_caches([engine.tensor], engine.layout)
        assert manager.is_ready()
        assert engine.get(prompt(1, 3)) == found  # from the disk
        engine.put(prompt(1, 3))
        task, _ = manager.get_match(prompt(1, 3))
        manager.check_integrity()
        manager.shutdown()
    manager.start()
    assert manager.wait(task)[task].status is KVResponseStatus.NOTFOUND
    manager.shutdown()


def test_manager_starts_after_an_early_shutdown() -> None:
    manager = KVManager(MODEL, cache_config())
    manager.shutdown()
    with manager:
        assert not manager.get_match(prompt(1, 2))[1].any()


def test_launch_before_registration_is_refused_and_repeatable() -> None:
    with KVManager(MODEL, cache_config()) as manager:
        task, _ = manager.put_match(prompt(1, 2))
        with pytest.raises(NotInitializedError, match="register"):
            manager.launch(task, slots_of([0, 1]))
        own = Engine(manager)
        manager.register_kv_caches([own.tensor], own.layout)
        manager.launch(task, slots_of([0, 1]))
        assert manager.wait(task, SOON_S)[task].status is KVResponseStatus.SUCCESS


def test_invalid_configuration_is_refused() -> None:
    with pytest.raises(ConfigError):
        KVManager(MODEL, CacheConfig(enable_ssd=True))
    with pytest.raises(UnsupportedError, match="enable_gds"):
        KVManager(MODEL, CacheConfig(enable_gds=True))


def test_unsupported_variable_is_refused_without_an_adapter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in vars(GLOBAL_CONFIG_FROM_ENV).copy():
        monkeypatch.delattr(GLOBAL_CONFIG_FROM_ENV, name)
    monkeypatch.setenv("FLEXKV_ENABLE_GDS", "1")
    with pytest.raises(UnsupportedError, match="enable_gds"):
        KVManager(MODEL, CacheConfig())


def test_file_overrides_an_unsupported_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    vars(GLOBAL_CONFIG_FROM_ENV).clear()
    monkeypatch.setenv("FLEXKV_ENABLE_GDS", "1")
    vars(GLOBAL_CONFIG_FROM_ENV)["enable_gds"] = False  # as a configuration file sets it
    assert GLOBAL_CONFIG_FROM_ENV.enable_gds is False
    KVManager(MODEL, CacheConfig())


# --- get_match ------------------------------------------------------------------------------------


def test_get_match_finds_the_longest_cached_prefix(engine: Engine) -> None:
    tokens = prompt(1, 6)
    assert engine.put(tokens[: 4 * TOKENS]) == 4
    assert engine.get(tokens) == 4
    other = tokens.copy()
    other[2 * TOKENS] += 1
    assert engine.get(other) == 2


def test_match_mask_is_one_bool_per_token(engine: Engine) -> None:
    tokens = prompt(1, 3, more=2)
    engine.put(tokens)
    task, mask = engine.manager.get_match(tokens)
    assert isinstance(task, int)
    assert (mask.dtype, mask.shape) == (np.bool_, (3 * TOKENS + 2,))
    engine.manager.cancel(task)


def test_partial_last_block_is_never_matched(engine: Engine) -> None:
    tokens = prompt(1, 3, more=TOKENS - 1)
    assert engine.put(tokens) == 3
    _, mask = engine.manager.get_match(tokens)
    assert mask[: 3 * TOKENS].all()
    assert not mask[3 * TOKENS :].any()


@pytest.mark.parametrize("first_true", [2 * TOKENS, 2 * TOKENS + 1, 3 * TOKENS - 1])
def test_match_starts_at_block_of_first_true_token(engine: Engine, first_true: int) -> None:
    tokens = prompt(1, 5)
    engine.put(tokens)
    token_mask = np.arange(len(tokens)) >= first_true
    task, mask = engine.manager.get_match(tokens, token_mask)
    assert mask.tolist() == [at >= 2 * TOKENS for at in range(len(tokens))]
    engine.clear()
    engine.manager.launch(task, slots_of([7, 8, 9]))
    assert engine.manager.wait(task, SOON_S)[task].status is KVResponseStatus.SUCCESS
    assert [engine.holds(7 + at, tokens, 2 + at) for at in range(3)] == [True] * 3


def test_mask_end_bounds_the_match_to_whole_blocks(engine: Engine) -> None:
    tokens = prompt(1, 5)
    engine.put(tokens)
    token_mask = np.arange(len(tokens)) < 3 * TOKENS + 1
    _, mask = engine.manager.get_match(tokens, token_mask)
    assert mask.sum() == 3 * TOKENS


def test_get_reads_cpu_first_then_ssd(with_disk: Engine) -> None:
    tokens = prompt(1, 6)
    with_disk.put(tokens)
    evict_cpu(with_disk, 4)  # the ends of chains go first
    cpu = with_disk.manager.task_engine.cache_engine.engine(DeviceType.CPU)
    assert cpu.num_used_blocks == 2
    assert with_disk.get(tokens) == 6


def test_get_from_ssd_promotes_blocks_to_cpu(with_disk: Engine) -> None:
    tokens = prompt(1, 5)
    with_disk.put(tokens)
    evict_cpu(with_disk)
    task, _ = with_disk.manager.get_match(tokens)
    with_disk.manager.launch(task, slots_of(range(5)))
    with_disk.manager.wait(task, SOON_S, completely=True)
    task, mask = with_disk.manager.get_match(tokens, cpu_only=True)
    assert mask.sum() == 5 * TOKENS
    with_disk.manager.cancel(task)


def test_cpu_only_match_skips_other_tiers(with_disk: Engine) -> None:
    tokens = prompt(1, 3)
    with_disk.put(tokens)
    evict_cpu(with_disk)
    _, mask = with_disk.manager.get_match(tokens, cpu_only=True)
    assert not mask.any()


def test_match_pins_its_blocks_until_cancelled(engine: Engine) -> None:
    tokens = prompt(1, 4)
    engine.put(tokens)
    cpu = engine.manager.task_engine.cache_engine.engine(DeviceType.CPU)
    task, _ = engine.manager.get_match(tokens)
    assert engine.manager.task_engine.status_of(task) is TaskStatus.UNREADY
    evict_cpu(engine)
    assert cpu.num_used_blocks == 4
    engine.manager.cancel(task)
    evict_cpu(engine)
    assert cpu.num_used_blocks == 0


def test_match_without_hits_is_complete(engine: Engine) -> None:
    task, mask = engine.manager.get_match(prompt(1, 3))
    assert not mask.any()
    assert engine.manager.task_engine.status_of(task) is TaskStatus.COMPLETED
    engine.manager.launch(task, np.empty(0, np.int64))
    engine.manager.launch([task], [slots_of([])])
    assert engine.manager.wait(task, 0)[task].status is KVResponseStatus.SUCCESS


@pytest.mark.parametrize("granularity", [0, 1, 2])
def test_partial_layer_granularity_is_refused_by_name(engine: Engine, granularity: int) -> None:
    with pytest.raises(NotImplementedError, match="layer_granularity"):
        engine.manager.get_match(prompt(1, 2), layer_granularity=granularity)


def test_namespaces_share_no_block(engine: Engine) -> None:
    tokens = prompt(1, 3)
    engine.put(tokens)
    for names in (["lora"], ["lo", "ra"], ["lora", ""]):
        _, mask = engine.manager.get_match(tokens, namespace=names)
        assert not mask.any()
        task, mask = engine.manager.put_match(tokens, namespace=names)
        assert mask.sum() == 3 * TOKENS
        engine.manager.launch(task, slots_of(range(3)))
        engine.manager.wait(task, SOON_S)
    task, mask = engine.manager.get_match(tokens, namespace=["lora"])
    assert mask.all()
    engine.manager.cancel(task)


@pytest.mark.parametrize(
    ("tokens", "mask"),
    [
        (np.zeros((2, 4), np.int64), None),
        (np.zeros(8), None),
        ("a prompt", None),
        (None, None),
        (np.zeros(8, np.int64), np.ones(7, np.bool_)),
        (np.zeros(8, np.int64), np.ones(8, np.int64)),
        (np.zeros(8, np.int64), np.array([1, 0, 1, 1, 1, 1, 1, 1], np.bool_)),
    ],
)
def test_invalid_tokens_or_mask_are_refused(engine: Engine, tokens: Any, mask: Any) -> None:
    for call in (engine.manager.get_match, engine.manager.put_match):
        with pytest.raises(InvalidArgumentError):
            call(tokens, mask)
    assert engine.manager.task_engine.open_tasks == 0


def test_torch_tokens_are_accepted() -> None:
    torch = pytest.importorskip("torch")
    with running() as engine:
        tokens = prompt(1, 3)
        task, _ = engine.manager.put_match(torch.from_numpy(tokens))
        engine.compute(tokens, range(3))
        engine.manager.launch([task], [torch.from_numpy(slots_of(range(3)))])
        answer = engine.manager.wait(task, SOON_S)[task]
        assert answer.get_mask().dtype is torch.bool
        assert engine.get(tokens) == 3


# --- put_match ------------------------------------------------------------------------------------


def test_put_match_mask_is_true_for_missing_blocks(engine: Engine) -> None:
    tokens = prompt(1, 6)
    engine.put(tokens[: 2 * TOKENS])
    task, mask = engine.manager.put_match(tokens)
    assert mask.tolist() == [at >= 2 * TOKENS for at in range(6 * TOKENS)]
    engine.manager.cancel(task)


def test_put_of_stored_blocks_is_complete(engine: Engine) -> None:
    tokens = prompt(1, 3)
    engine.put(tokens)
    task, mask = engine.manager.put_match(tokens)
    assert not mask.any()
    assert engine.manager.wait(task, 0)[task].status is KVResponseStatus.SUCCESS


def test_put_mask_must_be_a_prefix(engine: Engine) -> None:
    tokens = prompt(1, 4)
    with pytest.raises(InvalidArgumentError, match="False tokens"):
        engine.manager.put_match(tokens, np.arange(len(tokens)) >= TOKENS)
    _, mask = engine.manager.put_match(tokens, np.arange(len(tokens)) < 2 * TOKENS + 1)
    assert mask.sum() == 2 * TOKENS


def test_put_match_reserves_blocks_that_are_not_ready(engine: Engine) -> None:
    tokens = prompt(1, 4)
    task, _ = engine.manager.put_match(tokens)
    index = engine.manager.task_engine.cache_engine
    sequence = index.sequence(tokens)
    match = index.engine(DeviceType.CPU).match(sequence)
    assert (match.num_ready_matched_blocks, match.num_matched_blocks) == (0, 4)
    other, mask = engine.manager.put_match(tokens)
    assert not mask.any(), "what is on its way was promised twice"
    _, mask = engine.manager.get_match(tokens)
    assert not mask.any(), "what is not ready was found"
    engine.manager.cancel([task, other])
    match = index.engine(DeviceType.CPU).match(sequence)
    assert (match.num_ready_matched_blocks, match.num_matched_blocks) == (0, 0)


def test_put_evicts_least_recently_used_blocks() -> None:
    with running(cache_config(num_cpu_blocks=8)) as engine:
        old, new = prompt(1, 4), prompt(2, 8)
        assert engine.put(old) == 4
        assert engine.put(new) == 8
        assert engine.get(old) == 0
        assert engine.get(new) == 8


def test_put_without_space_stores_nothing() -> None:
    with running(cache_config(num_cpu_blocks=8)) as engine:
        held = prompt(1, 6)
        engine.put(held)
        task, _ = engine.manager.get_match(held)  # held: not evicted
        other, mask = engine.manager.put_match(prompt(2, 4))
        assert not mask.any()
        assert engine.manager.wait(other, 0)[other].status is KVResponseStatus.SUCCESS
        engine.manager.cancel(task)
        assert engine.put(prompt(2, 4)) == 4
        assert engine.put(prompt(3, 9)) == 0
        assert engine.get(prompt(2, 4)) == 4, "a put that cannot fit displaced others"


# --- async ----------------------------------------------------------------------------------------


def test_get_async_and_put_async_match_and_launch(engine: Engine) -> None:
    tokens = prompt(1, 5)
    engine.put(tokens[: 2 * TOKENS])
    engine.compute(tokens, range(5))
    task = engine.manager.put_async(tokens, slots_of(range(5)))
    answer = engine.manager.wait(task, SOON_S)[task]
    assert answer.status is KVResponseStatus.SUCCESS
    assert answer.return_mask is not None
    assert answer.return_mask.tolist() == [at >= 2 * TOKENS for at in range(len(tokens))]
    engine.clear()
    longer = np.concatenate([tokens, prompt(9, 2)])
    task = engine.manager.get_async(longer, slots_of(range(10, 17)))
    answer = engine.manager.wait(task, SOON_S)[task]
    assert answer.return_mask is not None
    assert answer.return_mask.sum() == 5 * TOKENS
    assert all(engine.holds(10 + at, tokens, at) for at in range(5))
    assert not engine.tensor[:, :, 15:17].any()


def test_get_async_takes_slots_of_masked_tokens_only(engine: Engine) -> None:
    tokens = prompt(1, 4)
    engine.put(tokens)
    engine.clear()
    mask = np.arange(len(tokens)) >= 2 * TOKENS
    task = engine.manager.get_async(tokens, slots_of([5, 6]), mask)
    assert engine.manager.wait(task, SOON_S)[task].status is KVResponseStatus.SUCCESS
    assert engine.holds(5, tokens, 2)
    assert engine.holds(6, tokens, 3)
    for wrong in (slots_of(range(4)), slots_of([5])):
        with pytest.raises(InvalidArgumentError, match="slot_mapping"):
            engine.manager.get_async(tokens, wrong, mask)
    with pytest.raises(InvalidArgumentError, match="inside a block"):
        engine.manager.get_async(
            tokens, slots_of([5, 6])[1:], np.arange(len(tokens)) >= 2 * TOKENS + 1
        )
    assert engine.manager.task_engine.open_tasks == 0


def test_prefetch_loads_from_disk_without_touching_gpu_blocks(with_disk: Engine) -> None:
    tokens = prompt(1, 6)
    with_disk.put(tokens)
    evict_cpu(with_disk, 4)
    with_disk.clear()
    task = with_disk.manager.prefetch_async(tokens)
    answer = with_disk.manager.wait(task, SOON_S)[task]
    assert answer.status is KVResponseStatus.SUCCESS
    assert answer.return_mask is not None
    assert answer.return_mask.all()
    assert not with_disk.tensor.any()
    cpu = with_disk.manager.task_engine.cache_engine.engine(DeviceType.CPU)
    assert cpu.num_used_blocks == 6


def test_failed_prefetch_mask_covers_loaded_blocks_only(with_disk: Engine) -> None:
    tokens = prompt(1, 6)
    with_disk.put(tokens)
    evict_cpu(with_disk, 4)
    ssd = with_disk.manager.task_engine.storage.stores[DeviceType.SSD]
    get = ssd.get
    ssd.get = lambda keys, into: [at < 2 and ok for at, ok in enumerate(get(keys, into))]  # type: ignore[method-assign]
    task = with_disk.manager.prefetch_async(tokens)
    answer = with_disk.manager.wait(task, SOON_S)[task]
    assert answer.status is KVResponseStatus.FAILED
    assert answer.return_mask is not None
    assert answer.return_mask.sum() == 4 * TOKENS


def test_prefetch_of_cached_blocks_is_complete_immediately(engine: Engine) -> None:
    tokens = prompt(1, 3)
    engine.put(tokens)
    task = engine.manager.prefetch_async(tokens)
    answer = engine.manager.try_wait(task)[task]
    assert answer.status is KVResponseStatus.SUCCESS
    assert answer.return_mask is not None
    assert answer.return_mask.all()


# --- launch ---------------------------------------------------------------------------------------


def test_launch_of_several_tasks_returns_their_ids(engine: Engine) -> None:
    first, second = prompt(1, 2), prompt(2, 3)
    tasks = [engine.manager.put_match(tokens)[0] for tokens in (first, second)]
    engine.compute(first, [0, 1])
    engine.compute(second, [2, 3, 4])
    assert engine.manager.launch(tasks, [slots_of([0, 1]), slots_of([2, 3, 4])]) == tasks
    answers = engine.manager.wait(tasks, SOON_S)
    assert [answers[task].status for task in tasks] == [KVResponseStatus.SUCCESS] * 2
    assert (engine.get(first), engine.get(second)) == (2, 3)


def test_batch_launch_returns_one_id(engine: Engine) -> None:
    first, second = prompt(1, 2), prompt(2, 3)
    tasks = [engine.manager.put_match(tokens)[0] for tokens in (first, second)]
    (batch,) = engine.manager.launch(tasks, [slots_of([0, 1]), slots_of([2, 3, 4])], as_batch=True)
    answer = engine.manager.wait(batch, SOON_S)[batch]
    assert answer.status is KVResponseStatus.SUCCESS
    assert [int(answer.get_mask(at).sum()) for at in range(2)] == [2 * TOKENS, 3 * TOKENS]
    assert answer.get_mask(2) is None


@pytest.mark.parametrize(
    "slots",
    [
        slots_of([0]),
        slots_of([0, 1, 2]),
        slots_of([0, 1])[::-1],
        slots_of([0, 1]) + 1,
        slots_of([0, 0]),
        np.zeros(2 * TOKENS, np.int64),
        slots_of([0, ENGINE_BLOCKS]),
        -slots_of([1, 2]),
        np.zeros((2, TOKENS), np.int64),
        "slots",
        None,
    ],
    ids=str,
)
def test_mismatched_slots_are_refused_and_task_stays_launchable(engine: Engine, slots: Any) -> None:
    tokens = prompt(1, 2)
    task, _ = engine.manager.put_match(tokens)
    with pytest.raises(InvalidArgumentError):
        engine.manager.launch(task, slots)
    assert engine.manager.task_engine.status_of(task) is TaskStatus.UNREADY
    engine.compute(tokens, [0, 1])
    engine.manager.launch(task, slots_of([0, 1]))
    assert engine.manager.wait(task, SOON_S)[task].status is KVResponseStatus.SUCCESS


def test_slot_mapping_may_repeat_first_slot_of_blocks(engine: Engine) -> None:
    """As FlexKV's own adapters build it: `block_ids.repeat(block_size) * block_size`."""
    tokens = prompt(1, 3)
    engine.compute(tokens, [7, 2, 9])
    task, _ = engine.manager.put_match(tokens)
    engine.manager.launch(task, np.array([7, 2, 9]).repeat(TOKENS) * TOKENS)
    assert engine.manager.wait(task, SOON_S)[task].status is KVResponseStatus.SUCCESS
    engine.clear()
    task = engine.manager.get_async(tokens, np.array([4, 8, 1]).repeat(TOKENS) * TOKENS)
    assert engine.manager.wait(task, SOON_S)[task].status is KVResponseStatus.SUCCESS
    assert [engine.holds(block, tokens, at) for at, block in enumerate([4, 8, 1])] == [True] * 3
    assert engine.get(tokens) == 3


def test_get_with_duplicate_slots_is_refused(engine: Engine) -> None:
    tokens = prompt(1, 2)
    engine.put(tokens)
    task, _ = engine.manager.get_match(tokens)
    with pytest.raises(InvalidArgumentError, match="twice"):
        engine.manager.launch(task, slots_of([3, 3]))
    engine.manager.cancel(task)


@pytest.fixture
def planning(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Graphs are planned once this is set."""
    may_plan = threading.Event()
    stages = TransferScheduler.stages

    def when_it_may(self: TransferScheduler, graph: TransferOpGraph) -> Any:
        assert may_plan.wait(DEADLINE_S)
        return stages(self, graph)

    monkeypatch.setattr(TransferScheduler, "stages", when_it_may)
    yield may_plan
    may_plan.set()


def test_launch_does_not_wait_for_graph_planning(planning: threading.Event, engine: Engine) -> None:
    first, second = prompt(1, 3), prompt(2, 3)
    engine.compute(first, [0, 1, 2])
    task, _ = engine.manager.put_match(first)
    dropped, _ = engine.manager.put_match(second)
    engine.manager.launch([task, dropped], [slots_of([0, 1, 2]), slots_of([3, 4, 5])])
    assert engine.manager.wait(task, 0)[task].status is KVResponseStatus.TIMEOUT
    engine.manager.cancel(dropped)
    planning.set()
    assert engine.manager.wait(task, SOON_S)[task].status is KVResponseStatus.SUCCESS
    assert engine.manager.wait(dropped, SOON_S)[dropped].status is KVResponseStatus.CANCELLED
    assert (engine.get(first), engine.get(second)) == (3, 0)


def test_shutdown_drops_unplanned_tasks(planning: threading.Event) -> None:
    with running() as engine:
        tasks = [engine.manager.put_match(prompt(seed, 3))[0] for seed in (1, 2)]
        engine.manager.launch(tasks, [slots_of([0, 1, 2]), slots_of([3, 4, 5])])
        ending = threading.Thread(target=engine.manager.shutdown)
        ending.start()
        planning.set()
        ending.join(DEADLINE_S)
        assert not ending.is_alive()


def test_planning_error_fails_the_task(monkeypatch: pytest.MonkeyPatch, engine: Engine) -> None:
    tokens = prompt(1, 2)
    task, _ = engine.manager.put_match(tokens)
    with monkeypatch.context() as broken:
        broken.setattr(TransferScheduler, "stages", lambda *_: 1 / 0)
        engine.manager.launch(task, slots_of([0, 1]))
        answer = engine.manager.wait(task, SOON_S, completely=True)[task]
    assert answer.status is KVResponseStatus.FAILED
    assert answer.return_mask is not None
    assert not answer.return_mask.any()
    assert engine.put(tokens) == 2, "its places were given back"


def test_completed_task_keeps_only_its_result(with_disk: Engine) -> None:
    """Nobody may ask for half an hour, and 100,000 tasks may be over."""
    manager, graphs = with_disk.manager, []
    over: dict[int, int] = {}

    def begun(task: int) -> int:
        graphs.append(weakref.ref(manager.task_engine._tasks[task].plan.graph))
        return task

    for seed in range(10):
        tokens = prompt(seed, 3)
        put = begun(manager.put_match(tokens)[0])
        manager.launch(put, slots_of([0, 1, 2]))
        assert manager.wait(put, SOON_S, completely=True)[put].status is KVResponseStatus.SUCCESS
        get, dropped = begun(manager.get_match(tokens)[0]), begun(manager.get_match(tokens)[0])
        manager.launch(get, slots_of([3, 4, 5]))
        manager.cancel(dropped)
        assert manager.wait(get, SOON_S, completely=True)[get].status is KVResponseStatus.SUCCESS
        over |= {put: 3 * TOKENS, get: 3 * TOKENS, dropped: 0}
    assert manager.task_engine.transfer_engine.drain(SOON_S)
    gc.collect()
    # A thread may still have its last one in hand.
    assert sum(graph() is not None for graph in graphs) < 6
    answers = manager.wait(over, SOON_S)
    masks = {task: answer.return_mask for task, answer in answers.items()}
    assert {task: 0 if mask is None else int(mask.sum()) for task, mask in masks.items()} == over


def test_launch_is_all_or_nothing(engine: Engine) -> None:
    tasks = [engine.manager.put_match(prompt(seed, 2))[0] for seed in (1, 2)]
    with pytest.raises(InvalidArgumentError):
        engine.manager.launch(tasks, [slots_of([0, 1]), slots_of([2])])
    with pytest.raises(InvalidArgumentError):
        engine.manager.launch(tasks, [slots_of([0, 1])])
    with pytest.raises(InvalidArgumentError):
        engine.manager.launch([tasks[0], tasks[0]], [slots_of([0, 1])] * 2)
    states = [engine.manager.task_engine.status_of(task) for task in tasks]
    assert states == [TaskStatus.UNREADY] * 2
    engine.manager.cancel(tasks)


def test_launching_a_launched_or_unknown_task_raises(engine: Engine) -> None:
    tokens = prompt(1, 2)
    task, _ = engine.manager.put_match(tokens)
    engine.manager.launch(task, slots_of([0, 1]))
    with pytest.raises(ValueError, match="launched once"):
        engine.manager.launch(task, slots_of([0, 1]))
    engine.manager.wait(task, SOON_S)
    with pytest.raises(ValueError, match="completed"):
        engine.manager.launch(task, slots_of([0, 1]))
    with pytest.raises(ValueError, match="not known"):
        engine.manager.launch(999, slots_of([0, 1]))


def test_layerwise_and_sliding_window_arguments_are_refused(engine: Engine) -> None:
    with pytest.raises(UnsupportedError, match="layerwise_transfer"):
        engine.manager.launch([], [], layerwise_transfer=True)
    with pytest.raises(UnsupportedError, match="swa"):
        engine.manager.launch([], [], swa_slot_mappings=[])
    with pytest.raises(UnsupportedError, match="swa"):
        engine.manager.get_match(prompt(1, 2), swa_aware=True)
    with pytest.raises(UnsupportedError, match="swa"):
        engine.manager.prefetch_async(prompt(1, 2), swa_aware=True)


# --- cancel ---------------------------------------------------------------------------------------


def test_cancelled_put_stores_nothing(engine: Engine) -> None:
    tokens = prompt(1, 4)
    task, _ = engine.manager.put_match(tokens)
    engine.manager.cancel(task)
    assert engine.manager.wait(task, 0)[task].status is KVResponseStatus.CANCELLED
    _, mask = engine.manager.get_match(tokens)
    assert not mask.any()
    assert engine.put(tokens) == 4


def test_cancelled_running_get_writes_no_blocks(with_disk: Engine) -> None:
    tokens = prompt(1, 8)
    with_disk.put(tokens)
    evict_cpu(with_disk)
    ssd = with_disk.manager.task_engine.storage.stores[DeviceType.SSD]
    reading, go_on = threading.Event(), threading.Event()
    get = ssd.get

    def slow(keys: bytes, into: Any) -> list[bool]:
        reading.set()
        assert go_on.wait(SOON_S)
        return get(keys, into)

    ssd.get = slow  # type: ignore[method-assign]
    task, _ = with_disk.manager.get_match(tokens)
    with_disk.clear()
    with_disk.manager.launch(task, slots_of(range(8)))
    assert reading.wait(SOON_S)
    with_disk.manager.cancel(task)
    answer = with_disk.manager.wait(task, 0)[task]
    assert answer.status is KVResponseStatus.CANCELLED
    assert answer.return_mask is not None
    assert not answer.return_mask.any()
    go_on.set()
    assert with_disk.manager.task_engine.transfer_engine.drain(SOON_S)
    assert not with_disk.tensor.any(), "a cancelled load has written to a block"


def test_cancel_during_an_endless_copy_names_the_task(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    transfers = engine.manager.task_engine.transfer_engine
    copy_out, cancel = transfers.gpu_worker.copy_out, transfers.cancel
    copying, go_on = threading.Event(), threading.Event()

    def slow(*arguments: Any) -> None:
        copying.set()
        assert go_on.wait(SOON_S)
        copy_out(*arguments)

    monkeypatch.setattr(transfers.gpu_worker, "copy_out", slow)
    task, _ = engine.manager.put_match(prompt(1, 4))
    engine.manager.launch(task, slots_of(range(4)))
    assert copying.wait(SOON_S)
    timeouts = iter([0.0, SOON_S])
    monkeypatch.setattr(transfers, "cancel", lambda graph_id: cancel(graph_id, next(timeouts)))
    with pytest.raises(TransferError, match=rf"the tasks \[{task}\] have not ended"):
        engine.manager.cancel(task)
    go_on.set()
    engine.manager.cancel(task)


def test_cancel_ignores_unknown_ids(engine: Engine) -> None:
    engine.manager.cancel([17, 18])
    engine.manager.cancel([])
    with pytest.raises(InvalidArgumentError):
        engine.manager.cancel("all")  # type: ignore[arg-type]


# --- wait -----------------------------------------------------------------------------------------


def test_wait_returns_the_status_of_each_task(engine: Engine) -> None:
    tokens = prompt(1, 2)
    put, _ = engine.manager.put_match(tokens)
    answers = engine.manager.wait([put, 999], 0)
    assert answers[put].status is KVResponseStatus.UNREADY
    assert answers[999].status is KVResponseStatus.NOTFOUND
    assert (answers[999].task_id, answers[999].return_mask) == (999, None)
    engine.manager.cancel(put)


def slow_disk(engine: Engine) -> tuple[threading.Event, threading.Event]:
    """The disk's puts say when they begin, and wait."""
    ssd = engine.manager.task_engine.storage.stores[DeviceType.SSD]
    put, begun, go_on = ssd.put, threading.Event(), threading.Event()

    def slow(*arguments: Any, **more: Any) -> list[bool]:
        begun.set()
        assert go_on.wait(SOON_S)
        return put(*arguments, **more)

    ssd.put = slow  # type: ignore[method-assign]
    return begun, go_on


def test_put_succeeds_before_the_disk_write_completes(with_disk: Engine) -> None:
    tokens = prompt(1, 3)
    begun, go_on = slow_disk(with_disk)
    task, _ = with_disk.manager.put_match(tokens)
    with_disk.compute(tokens, range(3))
    with_disk.manager.launch(task, slots_of(range(3)))
    assert with_disk.manager.wait(task, SOON_S)[task].status is KVResponseStatus.SUCCESS
    with_disk.clear()  # the engine's blocks are its own again
    assert begun.wait(SOON_S)
    late = with_disk.manager.wait(task, 0.01, completely=True)
    assert late[task].status is KVResponseStatus.TIMEOUT
    go_on.set()
    done = with_disk.manager.wait(task, SOON_S, completely=True)
    assert done[task].status is KVResponseStatus.SUCCESS
    evict_cpu(with_disk)
    assert with_disk.get(tokens) == 3


@pytest.mark.parametrize("waits", [True, False])
def test_disk_writes_of_ended_puts_outlive_their_client(
    with_disk: Engine, monkeypatch: pytest.MonkeyPatch, *, waits: bool
) -> None:
    tokens = prompt(1, 3)
    begun, go_on = slow_disk(with_disk)
    with_disk.compute(tokens, range(3))
    ended, _ = with_disk.manager.put_match(tokens)
    with_disk.manager.launch(ended, slots_of(range(3)))
    if waits:
        assert with_disk.manager.wait(ended, SOON_S)[ended].status is KVResponseStatus.SUCCESS
    assert begun.wait(SOON_S)
    tasks = with_disk.manager.task_engine
    cancelled: list[int] = []
    monkeypatch.setattr(tasks.transfer_engine, "cancel", cancelled.append)
    tasks.forget_client(0)
    monkeypatch.undo()
    go_on.set()
    assert cancelled == []
    assert tasks.status_of(ended) is None
    assert tasks.transfer_engine.drain(SOON_S)
    evict_cpu(with_disk)
    assert with_disk.get(tokens) == 3


def test_wait_deadline_is_shared_by_all_tasks(with_disk: Engine) -> None:
    _, go_on = slow_disk(with_disk)
    tasks = []
    for seed in range(3):
        task, _ = with_disk.manager.put_match(prompt(seed, 2))
        with_disk.manager.launch(task, slots_of([2 * seed, 2 * seed + 1]))
        tasks.append(task)
    answers = with_disk.manager.wait(tasks, 0.01, completely=True)
    assert {answer.status for answer in answers.values()} == {KVResponseStatus.TIMEOUT}
    go_on.set()
    answers = with_disk.manager.wait(tasks, SOON_S, completely=True)
    assert {answer.status for answer in answers.values()} == {KVResponseStatus.SUCCESS}


def test_try_wait_omits_running_tasks(with_disk: Engine) -> None:
    tokens = prompt(1, 4)
    with_disk.put(tokens)
    evict_cpu(with_disk)
    ssd = with_disk.manager.task_engine.storage.stores[DeviceType.SSD]
    get, go_on = ssd.get, threading.Event()

    def slow(keys: bytes, into: Any) -> list[bool]:
        assert go_on.wait(SOON_S)
        return get(keys, into)

    ssd.get = slow  # type: ignore[method-assign]
    task, _ = with_disk.manager.get_match(tokens)
    unready, _ = with_disk.manager.put_match(prompt(2, 1))
    with_disk.manager.launch(task, slots_of(range(4)))
    answers = with_disk.manager.try_wait([task, unready, 999])
    assert {key: answer.status for key, answer in answers.items()} == {
        unready: KVResponseStatus.UNREADY,
        999: KVResponseStatus.NOTFOUND,
    }
    go_on.set()
    with_disk.manager.wait(task, SOON_S)
    assert with_disk.manager.try_wait(task)[task].status is KVResponseStatus.SUCCESS
    with_disk.manager.cancel(unready)


def test_failed_get_mask_covers_loaded_tokens(with_disk: Engine) -> None:
    tokens = prompt(1, 6)
    with_disk.put(tokens)
    evict_cpu(with_disk)
    ssd = with_disk.manager.task_engine.storage.stores[DeviceType.SSD]
    get = ssd.get
    ssd.get = lambda keys, into: [at != 3 and ok for at, ok in enumerate(get(keys, into))]  # type: ignore[method-assign]
    task, _ = with_disk.manager.get_match(tokens)
    with_disk.clear()
    with_disk.manager.launch(task, slots_of(range(6)))
    answer = with_disk.manager.wait(task, SOON_S)[task]
    assert answer.status is KVResponseStatus.FAILED
    assert answer.return_mask is not None
    came = int(answer.return_mask.sum()) // TOKENS
    assert came == 3
    assert all(with_disk.holds(at, tokens, at) for at in range(came))


@pytest.mark.parametrize(("staging_blocks", "calls"), [(1024, 1), (64, 2)])
def test_small_blocks_are_copied_in_batches(
    monkeypatch: pytest.MonkeyPatch, staging_blocks: int, calls: int
) -> None:
    copied: list[int] = []
    copy_out = GPUCPUTransferWorker.copy_out

    def counted(self: Any, ids: Any, staging: Any, slots: Any) -> None:
        copied.append(len(ids))
        copy_out(self, ids, staging, slots)

    monkeypatch.setattr(GPUCPUTransferWorker, "copy_out", counted)
    record_bytes = MODEL.rank_token_bytes * TOKENS
    with running(cache_config(staging_bytes=staging_blocks * record_bytes)) as engine:
        assert engine.put(prompt(1, 32)) == 32
        assert engine.get(prompt(1, 32)) == 32
    assert copied == [32 // calls] * calls


# --- reset and shutdown ---------------------------------------------------------------------------


def test_reset_clears_all_tiers_and_cancels_tasks(with_disk: Engine) -> None:
    tokens = prompt(1, 4)
    with_disk.put(tokens)
    open_put, _ = with_disk.manager.put_match(prompt(2, 2))
    open_get, _ = with_disk.manager.get_match(tokens)
    with_disk.manager.reset()
    answers = with_disk.manager.wait([open_put, open_get], 0)
    assert {answer.status for answer in answers.values()} == {KVResponseStatus.CANCELLED}
    assert with_disk.get(tokens) == 0
    for store in with_disk.manager.task_engine.storage.stores.values():
        assert store.capacity().records == 0
    assert with_disk.put(tokens) == 4
    assert with_disk.get(tokens) == 4


def test_matching_weights_find_the_disk_after_restart(tmp_path: Path) -> None:
    tokens = prompt(1, 3)
    named = ModelConfig(
        num_layers=2, num_kv_heads=2, head_size=4, dtype="float32", weights="sha256:1"
    )
    other = ModelConfig(
        num_layers=2, num_kv_heads=2, head_size=4, dtype="float32", weights="sha256:2"
    )
    with running(cache_config(tmp_path), named) as engine:
        engine.put(tokens)
    for unlike in (other, replace(named, engine="another order of bytes")):
        with running(cache_config(tmp_path), unlike) as engine:
            assert engine.get(tokens) == 0
    with running(cache_config(tmp_path), named) as engine:
        assert engine.get(tokens) == 3
        engine.manager.reset()
    with running(cache_config(tmp_path), named) as engine:
        assert engine.get(tokens) == 0


def test_restart_without_weights_fingerprint_begins_empty(tmp_path: Path) -> None:
    with running(cache_config(tmp_path)) as engine:
        engine.put(prompt(1, 3))
    with running(cache_config(tmp_path)) as engine:
        assert engine.get(prompt(1, 3)) == 0


def test_shutdown_with_open_tasks_leaves_no_threads(tmp_path: Path) -> None:
    manager = KVManager(MODEL, cache_config(tmp_path))
    manager.start()
    own = Engine(manager)
    manager.register_kv_caches([own.tensor], own.layout)
    manager.put_match(prompt(1, 2))
    task, _ = manager.put_match(prompt(2, 2))
    manager.launch(task, slots_of([0, 1]))
    manager.shutdown()
    assert [t.name for t in threading.enumerate() if t.name.startswith("kvelastic-")] == []
