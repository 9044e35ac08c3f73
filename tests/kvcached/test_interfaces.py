"""kvcached's Python interface, for both engines: what callers of kvcached write, and mistakes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from native_pools import alloc
from waiting import DEADLINE_S

from kvelastic import _vmm, errors
from kvelastic.integration.sglang import interfaces as sglang
from kvelastic.integration.vllm import interfaces as vllm
from kvelastic.pool.pool import ElasticPool
from kvelastic.shared import segment
from kvelastic.shared.ledger import list_ledgers

if TYPE_CHECKING:
    import torch

LAYERS, BLOCKS, TOKENS, HEADS, DIM = 3, 500, 16, 2, 64
CELL_BYTES = HEADS * DIM * 2
SHAPES = {
    "split": (2, BLOCKS, TOKENS, HEADS, DIM),
    "fused": (BLOCKS, 2, TOKENS, HEADS, DIM),
    "latent": (BLOCKS, TOKENS, DIM),
}


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("KVELASTIC_HOST_MEMORY", "1G")
    yield
    vllm.shutdown_kvelastic()


@pytest.mark.parametrize("engine", [vllm, sglang])
def test_calls_before_init_raise_runtime_error(engine: ModuleType) -> None:
    import torch

    calls = [
        lambda: engine.alloc_kv_cache((64, 2, 8), torch.float16, "cpu", 1),
        lambda: engine.get_kv_cache_manager(10, 16, 512, 2),
    ]
    if engine is vllm:
        calls[0] = lambda: engine.alloc_kv_cache((2, 4, 16, 2, 8), 16, torch.float16, "cpu", 1)
    for call in calls:
        with pytest.raises(RuntimeError, match=r"^kvelastic is not initialized"):
            call()


def test_failed_start_of_a_pool_can_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **options: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setenv("KVELASTIC_IPC_NAME", "repeated")
    vllm.init_kvelastic(device="cpu")
    with monkeypatch.context() as patched:
        patched.setattr(_vmm, "MaintenanceThread", SimpleNamespace(start=refuse))
        with pytest.raises(RuntimeError, match="can't start"):
            vllm.get_kv_cache_manager(BLOCKS, TOKENS, CELL_BYTES, LAYERS)
    assert vllm.get_kv_cache_manager(BLOCKS, TOKENS, CELL_BYTES, LAYERS).alloc(1) is not None


@pytest.mark.parametrize("engine", [vllm, sglang])
def test_kvcached_names_are_aliases(engine: ModuleType) -> None:
    assert engine.init_kvcached is engine.init_kvelastic
    assert engine.shutdown_kvcached is engine.shutdown_kvelastic


def write_and_read_back(tensors: list[torch.Tensor], parts: Any, ids: list[int]) -> None:
    """Give every (block, layer, part) a value of its own, then look at all of them."""
    n = 0
    for block in ids:
        for layer in range(len(tensors)):
            for part in parts(tensors[layer], block):
                part.fill_(n % 251)
                n += 1
    n = 0
    for block in ids:
        for layer in range(len(tensors)):
            for part in parts(tensors[layer], block):
                assert bool((part == n % 251).all()), (block, layer)
                n += 1


@pytest.mark.parametrize("contiguous", ["true", "false"])
@pytest.mark.parametrize("form", list(SHAPES))
def test_blocks_of_all_layers_do_not_overlap(
    form: str, contiguous: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setenv("KVELASTIC_CONTIGUOUS_LAYOUT", contiguous)
    vllm.init_kvelastic(device="cpu")
    kind = "MLA" if form == "latent" else "MHA"
    tensors = vllm.alloc_kv_cache(SHAPES[form], TOKENS, torch.bfloat16, "cpu", LAYERS, kind)
    cell = DIM * 2 if form == "latent" else CELL_BYTES
    buffers = 1 if form == "latent" else 2
    manager = vllm.get_kv_cache_manager(BLOCKS, TOKENS, cell, LAYERS, buffers)
    assert len(tensors) == LAYERS
    ids = manager.alloc(BLOCKS - 1)
    assert ids is not None
    assert len(set(ids)) == BLOCKS - 1
    assert 0 not in ids
    assert manager.alloc(1) is None
    parts = {
        "split": lambda t, b: (t[0][b], t[1][b]),
        "fused": lambda t, b: (t[b][0], t[b][1]),
        "latent": lambda t, b: (t[b],),
    }[form]
    write_and_read_back(tensors, parts, ids)
    manager.check_integrity()


@pytest.mark.parametrize("page_size", [1, 32])
def test_sglang_tensors_are_indexed_by_token(page_size: int) -> None:
    import torch

    sglang.init_kvelastic(device="cpu", async_sched=True)
    tokens = page_size * 64
    k, v = sglang.alloc_kv_cache(
        (tokens, HEADS, DIM), torch.float16, "cpu", LAYERS, page_size=page_size
    )
    manager = sglang.get_kv_cache_manager(64, page_size, CELL_BYTES, LAYERS)
    ids = manager.alloc(63)
    assert ids is not None

    def parts(layer_k: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = slice(block * page_size, (block + 1) * page_size)
        layer = next(i for i, t in enumerate(k) if t is layer_k)
        return layer_k[rows], v[layer][rows]

    write_and_read_back(k, parts, ids)


def test_sglang_mla_returns_one_list() -> None:
    import torch

    sglang.init_kvelastic(device="cpu")
    latent = sglang.alloc_kv_cache(
        (128, 1, 72), torch.float16, "cpu", LAYERS, page_size=16, attention_type="MLA"
    )
    assert isinstance(latent, list)
    assert len(latent) == LAYERS
    assert latent[0].shape[1:] == (1, 72)


def small() -> tuple[list[torch.Tensor], Any]:
    import torch

    vllm.init_kvelastic(device="cpu")
    tensors = vllm.alloc_kv_cache(SHAPES["split"], TOKENS, torch.bfloat16, "cpu", LAYERS)
    return tensors, vllm.get_kv_cache_manager(BLOCKS, TOKENS, CELL_BYTES, LAYERS)


def test_too_large_alloc_returns_none_and_changes_nothing() -> None:
    _, manager = small()
    before = manager.stats()
    assert manager.alloc(BLOCKS) is None
    assert manager.alloc(10**12) is None
    after = manager.stats()
    assert after.pop("alloc_failures") == before.pop("alloc_failures") + 2
    assert after == before


def test_invalid_free_is_rejected_as_a_whole() -> None:
    _, manager = small()
    ids = manager.alloc(4)
    manager.free(ids[:1])
    available = manager.available_size()
    for wrong, error in [
        (ids, errors.DoubleFreeError),
        ([ids[1], ids[1]], errors.DoubleFreeError),
        ([ids[1], 0], errors.NullBlockError),
        ([ids[1], 10**9], errors.UnknownBlockError),
        ([ids[1], -3], errors.UnknownBlockError),
    ]:
        with pytest.raises(error):
            manager.free(wrong)
        assert manager.available_size() == available
    manager.free(ids[1:])
    manager.check_integrity()


def test_reserved_blocks_are_kept_for_the_next_alloc() -> None:
    _, manager = small()
    assert manager.try_to_reserve(50)
    assert not manager.try_to_reserve(BLOCKS)
    assert manager.available_size() == BLOCKS - 1
    ids = manager.alloc(20)
    assert manager.stats()["blocks_reserved"] == 30
    manager.free_reserved()
    assert manager.stats()["blocks_reserved"] == 0
    assert manager.available_size() == BLOCKS - 1 - len(ids)


def test_resize_shrinks_and_grows_without_double_allocation() -> None:
    tensors, manager = small()
    whole = BLOCKS * TOKENS * CELL_BYTES
    ids = manager.alloc(BLOCKS - 1)
    assert not manager.resize(whole // 4), "in use is over the new size"
    assert manager.available_size() == 0
    assert manager.alloc(1) is None
    kept, freed = ids[:20], ids[20:]
    manager.free(freed)
    assert manager.resize(whole // 4)
    assert manager.get_mapped_memory_size() <= 2 * LAYERS * whole // 4
    assert manager.resize(3 * whole)
    again = manager.alloc(BLOCKS - 1 - len(kept))
    assert not set(again) & set(kept)
    write_and_read_back(tensors, lambda t, b: (t[0][b], t[1][b]), kept + again)
    with pytest.raises(errors.LimitError, match="-1"):
        manager.resize(-1)


def test_clear_and_trim_leave_one_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVELASTIC_PAGE_PREALLOC_ENABLED", "false")  # nothing comes back by itself
    _, manager = small()
    ids = manager.alloc(BLOCKS - 1)
    assert sum(manager.get_page_occupancy().values()) == len(ids)
    page_bytes = manager.stats()["page_bytes"]
    held = manager.get_mapped_memory_size()
    manager.clear()
    assert manager.trim() == held - page_bytes
    assert manager.get_mapped_memory_size() == page_bytes, "the null block's page stays"
    assert manager.get_mapped_memory_size("mb") == page_bytes / 2**20
    assert manager.get_page_occupancy([0, 1]) == {0: 0}
    with pytest.raises(errors.InvalidArgumentError, match="furlong"):
        manager.get_mapped_memory_size("furlong")


def test_manager_before_tensors_gives_the_same_cache() -> None:
    import torch

    vllm.init_kvelastic(device="cpu")
    manager = vllm.get_kv_cache_manager(BLOCKS, TOKENS, CELL_BYTES, LAYERS)
    tensors = vllm.alloc_kv_cache(SHAPES["split"], TOKENS, torch.bfloat16, "cpu", LAYERS)
    assert vllm.get_kv_cache_manager(BLOCKS, TOKENS, CELL_BYTES, LAYERS) is manager
    write_and_read_back(tensors, lambda t, b: (t[0][b], t[1][b]), alloc(manager, 5))


def test_groups_are_separate_instances(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setenv("KVELASTIC_IPC_NAME", "groups_test")
    small()
    vllm.alloc_kv_cache(SHAPES["fused"], TOKENS, torch.float16, "cpu", LAYERS, group_id=1)
    names = {info.name for info in segment.list_segments()}
    assert {"groups_test", "groups_test_g1"} <= names
    vllm.shutdown_kvelastic()
    assert not {"groups_test", "groups_test_g1"} & {i.name for i in segment.list_segments()}


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"kvcache_shape": (3, 4, 16, 2, 8)}, errors.LayoutError, r"\(3, 4, 16, 2, 8\)"),
    ({"block_size": 8}, errors.LayoutError, "block_size=8"),
    ({"dtype": "bf16"}, errors.InvalidArgumentError, "bf16"),
    ({"device": "cuda"}, errors.InvalidArgumentError, "cuda.*host"),
    ({"device": "tpu"}, errors.InvalidArgumentError, "tpu"),
    ({"attention_type": "XHA"}, errors.InvalidArgumentError, "XHA.*MHA or GQA or MLA"),
    ({"attention_type": "HYBRID"}, NotImplementedError, "^Hybrid models"),
    ({"kv_layout": "HND"}, errors.InvalidArgumentError, "HND.*NHD"),
    ({"kvcache_shape": (2, 4, 1 << 20, 64, 256)}, errors.LayoutError, "does not"),
]


@pytest.mark.parametrize(("change", "error", "match"), WRONG)
def test_invalid_arguments_are_named(
    change: dict[str, Any], error: type[Exception], match: str
) -> None:
    import torch

    vllm.init_kvelastic(device="cpu")
    arguments: dict[str, Any] = {
        "kvcache_shape": SHAPES["split"],
        "block_size": TOKENS,
        "dtype": torch.float16,
        "device": "cpu",
        "num_layers": LAYERS,
    }
    with pytest.raises(error, match=match):
        vllm.alloc_kv_cache(**{**arguments, **change})


def test_manager_with_other_block_size_is_rejected() -> None:
    small()
    with pytest.raises(errors.LayoutError, match="cell_size=64"):
        vllm.get_kv_cache_manager(BLOCKS, TOKENS, 64, LAYERS)
    with pytest.raises(errors.LayoutError, match=f"{BLOCKS + 1}"):
        vllm.get_kv_cache_manager(BLOCKS + 1, TOKENS, CELL_BYTES, LAYERS)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"tp_size": 2}, "world_size=2"),
        ({"world_size": 4}, "world_size=4"),
    ],
)
def test_init_rejects_unsupported_arguments(arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(errors.UnsupportedError, match=match):
        vllm.init_kvelastic(**{"device": "cpu", **arguments})


def test_start_limit_is_enforced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVELASTIC_LIMIT", "4M")
    _, manager = small()
    assert 0 < manager.available_size() < BLOCKS - 1
    assert manager.alloc(manager.available_size() + 1) is None
    ids = manager.alloc(manager.available_size())
    assert len(ids) > 0
    assert manager.get_mapped_memory_size() <= 4 << 20


@pytest.mark.parametrize("limit", ["0", "0%", "1M"])
def test_start_limit_below_a_page_can_be_raised(
    limit: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As `kvctl limit NAME 0` is: one page is held, and a higher limit gives more."""
    monkeypatch.setenv("KVELASTIC_LIMIT", limit)
    monkeypatch.setattr(logging.getLogger("kvelastic"), "propagate", True)
    _, manager = small()
    assert "less than a page" in caplog.text
    assert manager.alloc(BLOCKS - 1) is None
    assert segment.request(manager.name, limit_bytes=1 << 30, wait_s=DEADLINE_S).state == "applied"
    assert manager.alloc(BLOCKS - 1) is not None


def test_threads_share_one_manager() -> None:
    _, manager = small()
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for i in range(300):
                ids = manager.alloc((seed * 7 + i) % 20 + 1)
                if ids is not None:
                    manager.free(ids)
        except BaseException as error:  # told to the main thread
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    manager.check_integrity()
    assert manager.available_size() == BLOCKS - 1


def test_shutdown_releases_memory_and_refuses_alloc() -> None:
    vllm.init_kvelastic(device="cpu")
    manager = vllm.get_kv_cache_manager(BLOCKS, TOKENS, CELL_BYTES, LAYERS)
    assert len(manager.alloc(30) or []) == 30
    name = manager.name
    vllm.shutdown_kvelastic()
    assert manager.get_mapped_memory_size() == 0, "page 0 as well"
    with pytest.raises(errors.PoolFailedError, match="closed"):
        manager.alloc(1)
    assert manager.available_size() == 0
    assert all(member.name != name for info in list_ledgers() for member in info.members)


def test_interrupted_shutdown_closes_the_other_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm.init_kvelastic(device="cpu")
    for group in range(3):
        vllm.get_kv_cache_manager(BLOCKS, TOKENS, CELL_BYTES, LAYERS, group_id=group)
    close = ElasticPool.close
    interrupted: list[ElasticPool] = []

    def interrupt_second(pool: ElasticPool, *, discard: bool = False) -> None:
        interrupted.append(pool)
        if len(interrupted) == 2:
            raise KeyboardInterrupt
        close(pool, discard=discard)

    monkeypatch.setattr(ElasticPool, "close", interrupt_second)
    with pytest.raises(KeyboardInterrupt):
        vllm.shutdown_kvelastic()
    monkeypatch.undo()
    members = [member.name for info in list_ledgers() for member in info.members]
    assert members == [interrupted[1].segment.name]
    interrupted[1].close(discard=True)


def test_tiers_setting_is_reported_as_ignored(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setenv("KVELASTIC_TIERS", f"disk:{tmp_path}:1G")
    monkeypatch.setattr(logging.getLogger("kvelastic"), "propagate", True)
    small()
    assert "KVELASTIC_TIERS does nothing here" in caplog.text
