"""KVManager over a server: started by client 0, or by somebody else; and ranks without a server."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from waiting import DEADLINE_S, wait_until

from kvelastic.errors import (
    ChannelClosedError,
    ChannelError,
    ConfigError,
    EngineError,
    InvalidArgumentError,
    NotInitializedError,
    UnsupportedError,
)
from kvelastic.flexkv.common.config import CacheConfig, ModelConfig
from kvelastic.flexkv.common.memory_handle import shared_zeros
from kvelastic.flexkv.common.request import KVResponseStatus
from kvelastic.flexkv.common.storage import KVCacheLayout, KVCacheLayoutType, block_axis_of
from kvelastic.flexkv.kvmanager import KVManager
from kvelastic.flexkv.server import process
from kvelastic.flexkv.server.client import KVTPClient

TOKENS, BLOCKS = 4, 16
ONE = ModelConfig(num_layers=2, num_kv_heads=2, head_size=8, dtype="float16")
TWO = ModelConfig(num_layers=2, num_kv_heads=2, head_size=8, dtype="float16", dp_size=2)
CACHE = CacheConfig(tokens_per_block=TOKENS, num_cpu_blocks=64)
LAYOUT = KVCacheLayout(KVCacheLayoutType.LAYERFIRST, 2, BLOCKS, TOKENS, 2, 8)
PROMPT = np.arange(12)
SLOTS = np.arange(12) + 2 * TOKENS


@pytest.fixture
def ends() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def manager(ends: ExitStack, model: ModelConfig, **more: Any) -> KVManager:
    one = KVManager(model, CACHE, **more)
    ends.callback(one.shutdown)
    return one


def put(one: KVManager, kv: Any) -> None:
    import torch

    kv[...] = np.random.default_rng(1).random(kv.shape)
    task, mask = one.put_match(torch.from_numpy(PROMPT))
    assert mask.all()
    assert one.launch(task, torch.from_numpy(SLOTS)) == [task]
    assert one.wait(task, DEADLINE_S)[task].status is KVResponseStatus.SUCCESS
    assert one.wait(task, DEADLINE_S, completely=True)[task].status is KVResponseStatus.SUCCESS


def got(one: KVManager, kv: Any) -> Any:
    kv[...] = 0
    task, mask = one.get_match(PROMPT)
    assert mask.all()
    one.launch([task], [SLOTS])
    response = one.wait([task], DEADLINE_S)[task]
    assert response.status is KVResponseStatus.SUCCESS
    assert response.get_mask().all()
    return kv.copy()


@pytest.mark.slow
def test_client_0_starts_and_ends_the_server(
    tmp_path: Path, ends: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEXKV_SERVER_CLIENT_MODE", "1")
    monkeypatch.setenv("FLEXKV_SERVER_RECV_PORT", f"ipc://{tmp_path}/s")
    one = manager(ends, ONE)
    with pytest.raises(NotInitializedError):
        one.get_match(PROMPT)
    with pytest.raises(NotInitializedError):
        _ = one.task_engine
    one.start()
    one.start()
    assert not one.is_ready()
    kv = shared_zeros(LAYOUT.kv_shape, "float16")
    one.register_kv_caches([kv], LAYOUT)
    assert one.is_ready()
    put(one, kv)
    kept = kv.copy()
    assert (got(one, kv)[:, :, 2:5] == kept[:, :, 2:5]).all()
    assert one._server is not None
    with pytest.raises(InvalidArgumentError, match="each has its own"):
        one.get_match(PROMPT, dp_id=1)
    with pytest.raises(UnsupportedError, match="layer_granularity"):
        one.get_match(PROMPT, layer_granularity=1)
    server = one._server.process
    one.shutdown()
    one.shutdown()
    assert server.poll() == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_served_manager_restarts_after_shutdown(
    tmp_path: Path, ends: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEXKV_SERVER_CLIENT_MODE", "1")
    one = manager(ends, ONE, server_recv_port=f"ipc://{tmp_path}/s")
    kv = shared_zeros(LAYOUT.kv_shape, "float16")
    for _ in range(2):
        one.start()
        one.register_kv_caches([kv], LAYOUT)
        assert one.is_ready()
        put(one, kv)
        one.shutdown()
        one.reconnect()  # nothing is opened behind a shutdown
        with pytest.raises(NotInitializedError):
            one.get_match(PROMPT)
        assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_clients_share_stored_blocks(tmp_path: Path, ends: ExitStack) -> None:
    port = f"ipc://{tmp_path}/s"
    second = manager(ends, TWO, server_recv_port=port, dp_client_id=1)
    waiting = threading.Thread(target=second.start)  # until client 0 has started the server
    waiting.start()
    first = manager(ends, TWO, server_recv_port=port)
    first.start()
    waiting.join()
    caches = [shared_zeros(LAYOUT.kv_shape, "float16") for _ in range(2)]
    first.register_kv_caches([caches[0]], LAYOUT)
    assert not first.is_ready()
    second.register_kv_caches(list(caches[1]), LAYOUT)
    assert first.is_ready()
    assert second.is_ready()
    put(first, caches[0])
    assert (got(second, caches[1])[:, :, 2:5] == caches[0][:, :, 2:5]).all()
    second.shutdown()
    task, _ = first.get_match(PROMPT)  # the server is still there for the first one
    first.cancel(task)


@pytest.mark.slow
def test_external_server_outlives_its_clients(
    tmp_path: Path, ends: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEXKV_SERVER_LAUNCH_MODE", "external")
    port = f"ipc://{tmp_path}/s"
    (tmp_path / "c.json").write_bytes(process.dump(TWO, CACHE, "", port))
    command = [sys.executable, "-m", "kvelastic.flexkv.server", str(tmp_path / "c.json")]
    server = subprocess.Popen(command)
    ends.callback(server.wait)
    ends.callback(server.terminate)
    for _ in range(2):
        one = manager(ends, TWO, server_recv_port=port)
        one.start()
        _, mask = one.get_match(PROMPT)
        assert not mask.any()
        one.shutdown()
        assert server.poll() is None
    one = manager(ends, TWO, server_recv_port=port, dp_client_id=1)
    one.start()
    server.kill()
    server.wait()
    with pytest.raises(ChannelClosedError):
        one.get_match(PROMPT)
    one.reconnect()  # there is none yet
    with pytest.raises((ChannelError, NotInitializedError)):
        one.get_match(PROMPT)
    server = subprocess.Popen(command)
    ends.callback(server.wait)
    ends.callback(server.terminate)
    one.start()
    assert not one.get_match(PROMPT)[1].any()


def test_external_launch_mode_without_server_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXKV_SERVER_LAUNCH_MODE", "external")
    with pytest.raises(ConfigError, match="FLEXKV_SERVER_CLIENT_MODE=1"):
        KVManager(ONE, CACHE)


@pytest.mark.parametrize(
    "arguments",
    [(0, "ipc:///tmp/a", "ipc:///tmp/b"), (None, None, "1"), (None, None, True), (None, 5)],
)
def test_newer_positional_arguments_are_refused(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(InvalidArgumentError, match="pass them by name"):
        KVManager(ONE, CACHE, *arguments)


def test_unknown_client_id_is_refused() -> None:
    for client in (-1, 1):
        with pytest.raises(InvalidArgumentError, match="none of 1"):
            KVManager(ONE, CACHE, dp_client_id=client)


def test_rank_in_another_process_registers_without_server(tmp_path: Path, ends: ExitStack) -> None:
    port = f"ipc://{tmp_path}/ranks"
    rank = KVTPClient(port)
    ends.callback(rank.close)
    kv = shared_zeros(LAYOUT.kv_shape, "float16")
    rank.register_to_server([kv], LAYOUT)
    one = manager(ends, ONE, gpu_register_port=port)
    one.start()
    rank.wait_until_registered()
    assert one.is_ready()
    put(one, kv)
    one.check_integrity()
    with pytest.raises(ChannelError, match="cannot listen"):
        manager(ends, ONE, gpu_register_port=port).start()
    task, _ = one.get_match(PROMPT)
    rank.close()
    wait_until(lambda: not one.is_ready())
    with pytest.raises(NotInitializedError, match="ranks of client 0 have registered"):
        one.launch(task, SLOTS)
    one.cancel(task)
    one.check_integrity()


def test_managers_without_server_have_separate_endpoints(
    ends: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(tempfile.mkdtemp(dir="/tmp"))  # a short path
    ends.callback(folder.rmdir)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    managers = [manager(ends, ONE) for _ in range(2)]
    for one in managers:
        one.start()
        rank = KVTPClient(one.gpu_register_port)
        ends.callback(rank.close)
        kv = shared_zeros(LAYOUT.kv_shape, "float16")
        rank.register_to_server([kv], LAYOUT)
        rank.wait_until_registered()
        put(one, kv)
        assert list(folder.iterdir()) == [Path(one.gpu_register_port.removeprefix("ipc://"))]
        one.shutdown()
    assert list(folder.iterdir()) == []


def test_endpoint_falls_back_to_a_shorter_path(
    tmp_path: Path, ends: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    one = manager(ends, ONE)
    one.start()
    assert one.gpu_register_port.startswith("ipc:///tmp/")


def test_manager_without_endpoint_folder_serves_its_process(
    ends: ExitStack, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log = logging.getLogger("kvelastic.flexkv")  # kvelastic's does not reach the root's handlers
    log.addHandler(caplog.handler)
    ends.callback(log.removeHandler, caplog.handler)
    folder = Path(tempfile.mkdtemp(dir="/tmp"))  # a short path
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    one, named = (
        manager(ends, ONE),
        manager(ends, ONE, gpu_register_port=f"ipc://{folder}/ranks"),
    )
    folder.rmdir()
    one.start()
    assert "Set gpu_register_port" in caplog.text
    kv = shared_zeros(LAYOUT.kv_shape, "float16")
    one.register_kv_caches([kv], LAYOUT)
    assert one.is_ready()
    put(one, kv)
    with pytest.raises(ChannelError, match="cannot listen"):
        named.start()


def test_ranks_with_unequal_block_counts_use_minimum(tmp_path: Path, ends: ExitStack) -> None:
    model = ModelConfig(num_layers=2, num_kv_heads=4, head_size=8, dtype="float16", tp_size=2)
    one = manager(ends, model, gpu_register_port=f"ipc://{tmp_path}/ranks")
    one.start()
    for rank, blocks in enumerate((BLOCKS + 3, BLOCKS)):
        client = KVTPClient(one.gpu_register_port, tp_rank=rank)
        ends.callback(client.close)
        layout = KVCacheLayout(KVCacheLayoutType.LAYERFIRST, 2, blocks, TOKENS, 2, 8)
        client.register_to_server([shared_zeros(layout.kv_shape, "float16")], layout)
        client.wait_until_registered()
    assert one.is_ready()
    task, _ = one.put_match(PROMPT)
    with pytest.raises(InvalidArgumentError, match=f"names block {BLOCKS} of {BLOCKS}"):
        one.launch(task, np.arange(12) + (BLOCKS - 2) * TOKENS)
    one.launch(task, np.arange(12) + (BLOCKS - 3) * TOKENS)
    assert one.wait(task, DEADLINE_S)[task].status is KVResponseStatus.SUCCESS


def test_disconnected_rank_leaves_other_ranks_registered(ends: ExitStack) -> None:
    model = ModelConfig(num_layers=2, num_kv_heads=4, head_size=8, dtype="float16", tp_size=2)
    one = manager(ends, model)
    one.start()
    one.register_kv_caches([shared_zeros(LAYOUT.kv_shape, "float16")], LAYOUT, tp_rank=0)
    for _ in range(2):
        rank = KVTPClient(one.gpu_register_port, tp_rank=1)
        ends.callback(rank.close)
        rank.register_to_server([shared_zeros(LAYOUT.kv_shape, "float16")], LAYOUT)
        rank.wait_until_registered()
        assert one.is_ready()
        rank.close()
        wait_until(lambda: not one.is_ready())
    one.check_integrity()


@pytest.mark.parametrize("is_served", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_is_ready_raises_the_rank_refusal(
    tmp_path: Path, ends: ExitStack, monkeypatch: pytest.MonkeyPatch, is_served: bool
) -> None:
    if is_served:
        monkeypatch.setenv("FLEXKV_SERVER_CLIENT_MODE", "1")
    one = manager(ends, ONE, server_recv_port=f"ipc://{tmp_path}/s")
    one.start()
    wrong = KVTPClient(one.gpu_register_port)
    ends.callback(wrong.close)
    wrong.register_to_server([shared_zeros((2, 2, BLOCKS, TOKENS, 2, 4), "float16")], block_axis=2)
    with pytest.raises(InvalidArgumentError, match="256 bytes"):
        wrong.wait_until_registered()
    for _ in range(2):
        with pytest.raises(EngineError, match=r"rank 0 of client 0 .* a block .* 256 bytes"):
            one.is_ready()
    wrong.close()
    right = KVTPClient(one.gpu_register_port)
    ends.callback(right.close)
    right.register_to_server([shared_zeros(LAYOUT.kv_shape, "float16")], LAYOUT)
    right.wait_until_registered()
    assert one.is_ready()
    another = KVTPClient(one.gpu_register_port)  # one too many concerns no one else
    ends.callback(another.close)
    another.register_to_server([shared_zeros(LAYOUT.kv_shape, "float16")], LAYOUT)
    with pytest.raises(InvalidArgumentError, match="already"):
        another.wait_until_registered()
    assert one.is_ready()
    right.close()
    wait_until(lambda: not one.is_ready())


@pytest.mark.parametrize("kv_dim", [1, 2])
@pytest.mark.parametrize("is_own_process", [True, False])
def test_stored_objects_are_independent_of_tensor_layout(
    tmp_path: Path, ends: ExitStack, kv_dim: int, is_own_process: bool
) -> None:
    model = ModelConfig(num_layers=2, num_kv_heads=2, head_size=8, dtype="float16", kv_dim=kv_dim)
    one = manager(ends, model, gpu_register_port=f"ipc://{tmp_path}/ranks")
    one.start()

    def registered(kind: KVCacheLayoutType, count: int, axes: int) -> list[Any]:
        layout = KVCacheLayout(kind, 2, BLOCKS, TOKENS, 2, 8, kv_dim)
        tensors = [shared_zeros(layout.kv_shape[axes:], "float16") for _ in range(count)]
        if is_own_process:
            one.register_kv_caches(tensors, layout)
        else:
            rank = KVTPClient(one.gpu_register_port)
            ends.callback(rank.close)
            rank.register_to_server(tensors, layout)
            rank.wait_until_registered()
            leave.append(rank)
        return tensors

    def leaves() -> None:
        if is_own_process:
            one.task_engine.forget_client(0)
            one.task_engine.transfer_engine.gpu_worker.unregister(0)
        else:
            leave.pop().close()
            wait_until(lambda: not one.is_ready())

    leave: list[KVTPClient] = []
    (whole,) = registered(KVCacheLayoutType.LAYERFIRST, 1, 0)
    put(one, whole)
    rows = whole[:, :, 2:5].copy()
    leaves()
    apart = registered(KVCacheLayoutType.LAYERFIRST, 4, 2)  # K of all layers, then V of all
    task, _ = one.get_match(PROMPT)
    one.launch(task, SLOTS)
    assert one.wait(task, DEADLINE_S)[task].status is KVResponseStatus.SUCCESS
    for layer in range(2):
        for kv in range(kv_dim):
            assert (apart[layer + 2 * kv][2:5] == rows[layer, kv]).all()
    leaves()
    (blocks,) = registered(KVCacheLayoutType.BLOCKFIRST, 1, 0)
    task, _ = one.get_match(PROMPT)
    one.launch(task, SLOTS)
    assert one.wait(task, DEADLINE_S)[task].status is KVResponseStatus.SUCCESS
    assert (blocks[2:5] == np.moveaxis(rows, 2, 0)).all()


@pytest.mark.parametrize(
    ("kind", "shape", "each", "axis"),
    [
        (KVCacheLayoutType.LAYERFIRST, (2, 2, 16, 4, 2, 8), 1, 2),
        (KVCacheLayoutType.LAYERFIRST, (2, 16, 4, 2, 8), 2, 1),
        (KVCacheLayoutType.LAYERBLOCK, (2, 16, 2, 4, 2, 8), 1, 1),
        (KVCacheLayoutType.LAYERBLOCK, (16, 2, 4, 2, 8), 2, 0),
        (KVCacheLayoutType.BLOCKFIRST, (16, 2, 2, 4, 2, 8), 1, 0),
    ],
)
def test_layout_determines_the_block_axis(
    kind: KVCacheLayoutType, shape: tuple[int, ...], each: int, axis: int
) -> None:
    layout = KVCacheLayout(kind, 2, BLOCKS, TOKENS, 2, 8)
    assert block_axis_of(layout, [np.empty(shape, "float16")] * each) == axis
    with pytest.raises(InvalidArgumentError, match=kind.name):
        block_axis_of(layout, [np.empty((*shape, 3), "float16")] * each)
    with pytest.raises(InvalidArgumentError):
        block_axis_of(None, [np.empty(shape)])
    assert os.environ.get("FLEXKV_SERVER_RECV_PORT") is None


def test_layout_with_kv_dim_1_has_no_axis() -> None:
    layout = KVCacheLayout(KVCacheLayoutType.LAYERFIRST, 3, BLOCKS, TOKENS, 1, 8, kv_dim=1)
    assert block_axis_of(layout, [np.empty((BLOCKS, TOKENS, 8))] * 3) == 0
