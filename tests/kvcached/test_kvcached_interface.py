"""kvcached's interface: what its document shows is run as it stands there, and newer versions'."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from native_pools import alloc
from waiting import wait_until

from kvelastic import errors, vmm_ops
from kvelastic.integration.sglang import interfaces as sglang
from kvelastic.integration.vllm import interfaces as vllm
from kvelastic.kvcached.manager import KVCacheManager
from kvelastic.shared import segment

if TYPE_CHECKING:
    import torch

MIB = 1 << 20
PAGE = 2 * MIB
LAYERS, BLOCKS, TOKENS, HEADS, DIM = 2, 256, 16, 2, 64
CELL_BYTES = HEADS * DIM * 2


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("KVELASTIC_HOST_MEMORY", "1G")
    monkeypatch.setenv("KVELASTIC_LEDGER", f"kvcached_{os.getpid()}")
    yield
    vllm.shutdown_kvelastic()
    vmm_ops.shutdown_kvelastic()


# ------------------------------------------------------------------------------ its own document


@pytest.mark.parametrize("engine", [vllm, sglang])
def test_documented_initialization_runs(engine: ModuleType) -> None:
    for _ in range(2):
        engine.init_kvcached(
            tp_rank=0, tp_size=1, is_worker=False, device="cpu", async_sched=engine is sglang
        )


def test_documented_allocation_manager_and_shutdown_run() -> None:
    import torch

    vllm.init_kvcached(device="cpu")
    kv_tensors = vllm.alloc_kv_cache(
        (2, BLOCKS, TOKENS, HEADS, DIM),
        TOKENS,
        torch.float16,
        "cpu",
        LAYERS,
        attention_type="MHA",
        kv_layout="NHD",
    )
    manager = vllm.get_kv_cache_manager(BLOCKS, TOKENS, CELL_BYTES, LAYERS)
    before = manager.available_size()
    block_ids = alloc(manager, 8)
    kv_tensors[1][1][block_ids[0]].fill_(3.0)
    manager.free(block_ids)
    assert manager.available_size() == before
    vllm.shutdown_kvcached()
    with pytest.raises(RuntimeError, match="not initialized"):
        vllm.get_kv_cache_manager(BLOCKS, TOKENS, CELL_BYTES, LAYERS)


def test_documented_allocation_for_sglang_runs() -> None:
    import torch

    sglang.init_kvcached(device="cpu")
    k_tensors, v_tensors = sglang.alloc_kv_cache(
        (BLOCKS, HEADS, DIM),
        torch.bfloat16,
        "cpu",
        LAYERS,
        page_size=1,
        attention_type="MHA",
        kv_layout="NHD",
    )
    assert (len(k_tensors), len(v_tensors)) == (LAYERS, LAYERS)


def test_documented_manual_integration_runs() -> None:
    """Without a word of initialization, and with blocks whose size nobody has told."""
    raw_tensors = vmm_ops.create_kv_tensors(64 << 20, 2, "cpu", 2)
    page_ids, block_ids = [0, 1], [0, 1, 2, 3]
    vmm_ops.map_to_kv_tensors(page_ids, block_ids)
    for tensor in raw_tensors:
        assert tensor.numel() == 64 << 20
        for part in (0, 32 << 20):
            tensor[part : part + 2 * PAGE] = 7
    (row,) = [info for info in segment.list_segments() if info.header["pid"] == os.getpid()]
    assert row.usage["pages_mapped"] == 2, "the blocks lie in these pages"
    vmm_ops.unmap_from_kv_tensors(page_ids, block_ids)
    vmm_ops.map_to_kv_tensors(page_ids)
    with pytest.raises(errors.InvalidArgumentError, match="block_bytes"):
        vmm_ops.map_to_kv_tensors([], block_ids)


def test_documented_errors_are_raised() -> None:
    import torch

    with pytest.raises(RuntimeError, match="not initialized"):
        vllm.alloc_kv_cache((2, 4, 16, 2, 8), 16, torch.float16, "cpu", 1)
    with pytest.raises(FileNotFoundError) as missing:
        segment.inspect("no_such_segment")
    assert missing.value.filename == "/dev/shm/no_such_segment"
    assert str(missing.value) == "no segment is called 'no_such_segment'"
    sglang.init_kvcached(device="cpu")
    with pytest.raises(NotImplementedError, match="Hybrid models"):
        sglang.alloc_kv_cache((64, 2, 8), torch.float16, "cpu", 1, attention_type="HYBRID_LINEAR")


@pytest.mark.slow
def test_documented_variables_are_read() -> None:
    program = (
        "from kvelastic.integration.vllm import interfaces as kvi; import torch\n"
        "kvi.init_kvcached(device='cpu')\n"
        "kvi.alloc_kv_cache((2, 64, 16, 2, 64), 16, torch.float16, 'cpu', 2)\n"
        "print(kvi.get_kv_cache_manager(64, 16, 256, 2).pool_name)"
    )
    name = f"kvcached_doc_{os.getpid()}"
    environ = os.environ | {"KVCACHED_IPC_NAME": name, "KVCACHED_LOG_LEVEL": "DEBUG"}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environ, check=True
    )
    assert done.stdout == f"{name}\n"
    assert "DEBUG" in done.stderr


# ------------------------------------------------------------------------------------ a second init


@pytest.mark.parametrize("engine", [vllm, sglang])
@pytest.mark.parametrize(
    "arguments", [{"tp_size": 2}, {"world_size": 2}, {"tp_rank": 1}, {"pp_rank": 1}]
)
def test_repeated_unsupported_init_is_rejected_again(
    engine: ModuleType, arguments: dict[str, int]
) -> None:
    for _ in range(2):
        with pytest.raises(errors.UnsupportedError, match="ENABLE_KVELASTIC=true") as refused:
            engine.init_kvelastic(device="cpu", **arguments)
        assert "tp_size=1" in str(refused.value)
        engine.init_kvelastic(device="cpu")


def test_second_init_on_another_device_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm.init_kvelastic(device="cpu")
    vllm.init_kvelastic(device="host")
    vllm.init_kvelastic()
    with pytest.raises(errors.KvelasticError):
        vllm.init_kvelastic(device="cuda:0")
    with pytest.raises(errors.InvalidArgumentError, match="banana"):
        vllm.init_kvelastic(device="banana")
    with pytest.raises(errors.UnsupportedError, match="for vllm"):
        sglang.init_kvelastic(device="cpu")


# ------------------------------------------------------------------------------- newer versions'


def made() -> tuple[list[torch.Tensor], KVCacheManager]:
    import torch

    vllm.init_kvelastic(device="cpu")
    tensors = vllm.alloc_kv_cache(
        (2, BLOCKS, TOKENS, HEADS, DIM), TOKENS, torch.float16, "cpu", LAYERS
    )
    return tensors, vllm.get_kv_cache_manager(BLOCKS, TOKENS, CELL_BYTES, LAYERS)


@pytest.mark.parametrize("engine", [vllm, sglang])
def test_capabilities_list_the_snapshot_fields(
    engine: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVCACHED_PAGE_SIZE_MB", "4")
    offered = engine.get_capabilities()
    assert json.loads(json.dumps(offered)) == offered
    made()
    (pool,) = vllm.kv_cache_pool_snapshot_dicts()
    assert offered["schema_version"] == pool["schema_version"]
    assert offered["pool_snapshot_fields"] == list(pool)
    assert offered["runtime_snapshot_fields"] == list(vllm.observability_snapshot_dict())
    assert offered["backends"]["default_page_size_bytes"] == 4 << 20
    for kind in offered["integrations"]["vllm"]["attention_types"][:3]:
        assert kind in offered["integrations"]["sglang"]["attention_types"]


def test_stale_and_conflicting_limit_revisions_are_rejected() -> None:
    _, manager = made()
    assert manager.memory_limit_state()["revision"] is None
    first = manager.set_memory_limit(512 * MIB, revision=3)
    assert first["status"] == "applied"
    assert (first["limit_bytes"], first["revision"]) == (512 * MIB, 3)
    assert manager.set_memory_limit(512 * MIB, revision=3) == first
    assert manager.set_memory_limit(4 * MIB, revision=3)["status"] == "conflict"
    assert manager.set_memory_limit(4 * MIB, revision=2)["status"] == "stale"
    assert manager.memory_limit_state() == first
    ids = alloc(manager, manager.available_size())
    low = manager.set_memory_limit(PAGE, revision=4)
    assert (low["status"], low["reason"]) == ("deferred", "inuse_capacity_above_limit")
    assert low["overage_bytes"] == low["mapped_bytes"] - PAGE > 0
    manager.free(ids)
    # The maintenance thread may be releasing pages; then it releases these ones, too.
    wait_until(lambda: manager.memory_limit_state()["status"] == "applied")
    now = manager.set_memory_limit(PAGE, revision=4)
    assert (now["status"], now["overage_bytes"]) == ("applied", 0)
    assert now["effective_limit_bytes"] == now["current_capacity_bytes"] == PAGE
    assert segment.inspect(manager.name).usage["limit_bytes"] == PAGE
    for wrong in ({"limit_bytes": -1, "revision": 5}, {"limit_bytes": 1, "revision": -1}):
        with pytest.raises(ValueError, match="not accepted"):
            manager.set_memory_limit(**wrong)
    with pytest.raises(ValueError, match="whole numbers"):
        manager.set_memory_limit(1.5, revision=5)


@pytest.mark.parametrize("engine", [vllm, sglang])
def test_snapshots_report_runtime_and_pools(engine: ModuleType) -> None:
    assert engine.observability_snapshot().initialized is False
    assert engine.kv_cache_pool_snapshots() == []
    engine.init_kvelastic(device="cpu", async_sched=True, is_worker=True)
    runtime = engine.observability_snapshot_dict()
    assert (runtime["initialized"], runtime["device"], runtime["async_sched"]) == (
        True,
        "host",
        True,
    )
    manager = engine.get_kv_cache_manager(BLOCKS, TOKENS, CELL_BYTES, LAYERS)
    ids = alloc(manager, 10)
    assert manager.try_to_reserve(5)
    (pool,) = engine.kv_cache_pool_snapshot_dicts()
    json.dumps([runtime, pool])
    assert len(pool) == 29
    stats = manager.stats()
    assert pool["pool_name"] == manager.pool_name
    # As in kvcached: allocated blocks include reserved ones, and a block's size is of one buffer.
    assert (pool["allocated_blocks"], pool["reserved_blocks"]) == (len(ids) + 5, 5)
    assert pool["block_size_bytes"] == TOKENS * CELL_BYTES
    assert pool["available_blocks"] == manager.available_size()
    for count in ("available", "allocated", "reserved"):
        block_bytes = pool["block_size_bytes"] * pool["num_layers"] * pool["num_kv_buffers"]
        assert pool[f"{count}_bytes"] == pool[f"{count}_blocks"] * block_bytes
    assert pool["inuse_pages"] + pool["reserved_pages"] == stats["pages_mapped"]
    assert pool["mapped_bytes"] == manager.get_mapped_memory_size()
    assert pool["in_shrink"] is False
    assert manager.observability_snapshot(integration="mine").integration == "mine"
    assert engine.shutdown_kvcached() is True
    assert engine.shutdown_kvcached() is True


@pytest.mark.parametrize("contiguous", ["true", "false"])
@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        ((2, BLOCKS, TOKENS, HEADS, DIM), "MHA"),
        ((BLOCKS, 2, TOKENS, HEADS, DIM), "MHA"),
        ((BLOCKS, TOKENS, DIM), "MLA"),
    ],
)
def test_kv_views_over_existing_cache_share_its_bytes(
    shape: tuple[int, ...], kind: str, contiguous: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice the tokens of half the heads are the same bytes; kernels may count smaller blocks."""
    import torch

    monkeypatch.setenv("KVELASTIC_CONTIGUOUS_LAYOUT", contiguous)
    vllm.init_kvelastic(device="cpu")
    tensors, meta = vllm.alloc_kv_cache(
        shape, TOKENS, torch.float16, "cpu", LAYERS, kind, return_meta=True
    )
    buffers = 1 if kind == "MLA" else 2
    cell = DIM * 2 if kind == "MLA" else CELL_BYTES
    manager = vllm.get_kv_cache_manager(BLOCKS, TOKENS, cell, LAYERS, buffers)
    ids = alloc(manager, 200)
    views, block_bytes = vllm.build_kv_views(
        meta["raw_kv_tensors"],
        shape,
        TOKENS,
        torch.float16,
        kind,
        meta["num_blocks_per_layer"],
        meta["gpu_mem_bytes_per_layer_k_or_v"],
        LAYERS,
        kernel_block_size=4,
    )
    assert block_bytes == TOKENS * cell * buffers
    at = 1 if shape[0] == 2 else 0
    for n, block in enumerate(ids):
        for layer in range(LAYERS):
            views[layer].narrow(at, block * 4, 4).fill_(n + layer * 300)
    for n, block in enumerate(ids):
        for layer in range(LAYERS):
            assert bool((tensors[layer].select(at, block) == n + layer * 300).all())
    with pytest.raises(errors.LayoutError, match="blocks of"):
        vllm.build_kv_views(
            meta["raw_kv_tensors"], (2, 9, 8, 3, 8), 8, torch.float16, "MHA", 1, 1, LAYERS
        )
    with pytest.raises(errors.InvalidArgumentError, match="no tensors of kvelastic"):
        vllm.build_kv_views([torch.zeros(9)], shape, TOKENS, torch.float16, kind, 1, 1, LAYERS)
    with pytest.raises(errors.LayoutError, match="no multiple"):
        vllm.alloc_kv_cache(shape, TOKENS, torch.float16, "cpu", LAYERS, kind, kernel_block_size=5)


@pytest.mark.parametrize(
    "shape", [(2, BLOCKS, TOKENS, HEADS, DIM), (BLOCKS, 2, TOKENS, HEADS, DIM)]
)
@pytest.mark.parametrize("kernel", [None, 4])
def test_hybrid_models_place_k_and_v_together(shape: tuple[int, ...], kernel: int | None) -> None:
    import torch

    vllm.init_kvelastic(device="cpu")
    tensors, info = vllm.alloc_kv_cache(
        shape,
        TOKENS,
        torch.float16,
        "cpu",
        LAYERS,
        "HYBRID_LINEAR",
        kernel_block_size=kernel,
    )
    manager = vllm.get_kv_cache_manager(BLOCKS, TOKENS, 2 * CELL_BYTES, LAYERS, num_kv_buffers=1)
    ids = alloc(manager, 100)
    ratio = TOKENS // kernel if kernel else 1
    at = 1 if shape[0] == 2 else 0
    assert info["num_pools"] == len(info["buffers"]) == LAYERS
    assert info["page_size_bytes"] == TOKENS * CELL_BYTES * 2
    for n, block in enumerate(ids):
        for layer in range(LAYERS):
            tensors[layer].narrow(at, block * ratio, ratio).fill_(n + layer * 200)
    for n, block in enumerate(ids):
        for layer in range(LAYERS):
            start = block * info["block_stride_bytes"]
            states = info["buffers"][layer][start : start + info["page_size_bytes"]]
            assert bool((states.view(torch.float16) == n + layer * 200).all())


@pytest.mark.parametrize("contiguous", ["true", "false"])
def test_mamba_states_use_slots_of_a_manager(
    contiguous: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setenv("KVELASTIC_CONTIGUOUS_LAYOUT", contiguous)
    sglang.init_kvelastic(device="cpu")
    params = SimpleNamespace(
        shape=SimpleNamespace(conv=[(5, 3), (7, 3)], temporal=(4, 8, 16)),
        dtype=SimpleNamespace(conv=torch.bfloat16, temporal=torch.float32),
    )
    conv, temporal, info = sglang.alloc_mamba_states(
        num_slots=64, num_mamba_layers=3, cache_params=params, device="cpu", group_id=1000
    )
    manager = sglang.get_kv_cache_manager(
        64, 1, info["cell_size"], 3, num_kv_buffers=1, group_id=1000
    )
    states = [*conv, temporal]
    assert [tuple(state.shape[2:]) for state in states] == [(5, 3), (7, 3), (4, 8, 16)]
    slots = alloc(manager, 63)
    for state in states:
        for layer in range(3):
            for slot in slots:
                state[layer, slot] = layer * 80 + slots.index(slot)
    for state in states:
        for layer in range(3):
            for n, slot in enumerate(slots):
                assert bool((state[layer, slot] == layer * 80 + n).all())
