"""The server and its clients: who is let in, whose tasks are whose, and what nonsense comes to."""

from __future__ import annotations

import errno
import itertools
import os
import random
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from channel import connect
from hypothesis import given
from hypothesis import strategies as st
from processes import LineProgram
from waiting import DEADLINE_S, wait_until

from kvelastic.errors import (
    ChannelClosedError,
    ChannelError,
    ChannelTimeoutError,
    ConfigError,
    InvalidArgumentError,
    KvelasticError,
    MessageError,
    NotInitializedError,
    UnsupportedError,
)
from kvelastic.flexkv.common import calls
from kvelastic.flexkv.common.config import CacheConfig, ModelConfig
from kvelastic.flexkv.common.hash_utils import Tokens
from kvelastic.flexkv.common.memory_handle import TensorDescription, shared_zeros
from kvelastic.flexkv.common.request import KVResponse, KVResponseStatus, Mask
from kvelastic.flexkv.server import process, rank_client
from kvelastic.flexkv.server import request as messages
from kvelastic.flexkv.server import server as server_module
from kvelastic.flexkv.server.client import KVDPClient, KVTPClient
from kvelastic.flexkv.server.registration import Registrations
from kvelastic.flexkv.server.server import KVServer
from kvelastic.flexkv.server.utils import (
    default_endpoint,
    remove_dead_endpoints,
    socket_address,
)
from kvelastic.flexkv.transfer.shared_blocks import DeviceSpan, SharedBlocks
from kvelastic.messages import Address, Connection, Endpoint, Request, parse_address
from kvelastic.messages.frames import Kind

MODEL = ModelConfig(num_layers=2, num_kv_heads=2, head_size=8, dtype="float16", dp_size=2)
TOKENS = 4
CACHE = CacheConfig(tokens_per_block=TOKENS, num_cpu_blocks=64)
SHAPE = (2, 2, 16, TOKENS, 2, 8)
PROMPT = np.arange(12)


class Started:
    """A server, and clients of it that end with it."""

    def __init__(self, folder: Path) -> None:
        self.port = f"ipc://{folder}/s"
        self.ends: list[Callable[[], None]] = []
        self.server = self.start()

    def start(self) -> KVServer:
        server = KVServer(MODEL, CACHE, server_recv_port=self.port)
        self.ends.append(server.close)
        return server

    def client(self, dp_client_id: int = 0, model: ModelConfig = MODEL) -> KVDPClient:
        client = KVDPClient(self.port, model, dp_client_id)
        self.ends.append(client.unregister)
        client.start_server_and_register()
        return client

    def rank(self, dp_client_id: int = 0, **more: Any) -> tuple[KVTPClient, np.ndarray[Any, Any]]:
        kv = shared_zeros(SHAPE, "float16")
        rank = KVTPClient(f"{self.port}_gpu_register", dp_client_id, **more)
        self.ends.append(rank.close)
        rank.register_to_server(list(kv), block_axis=1)
        return rank, kv

    def close(self) -> None:
        for end in reversed(self.ends):
            end()


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Started]:
    one = Started(tmp_path)
    yield one
    one.close()


def slots(*blocks: int) -> np.ndarray[Any, Any]:
    return np.concatenate([np.arange(TOKENS) + block * TOKENS for block in blocks])


def put(client: KVDPClient, *blocks: int) -> None:
    task, mask = client.put_match(PROMPT)
    client.launch_tasks([task], [slots(*blocks)[: int(mask.sum())]])
    assert client.wait([task], DEADLINE_S, completely=True)[task].status is KVResponseStatus.SUCCESS


# --- what it is for -------------------------------------------------------------------------------


def test_blocks_put_by_one_client_reach_another(started: Started) -> None:
    (first, kv), (second, other) = started.rank(0), started.rank(1)
    one, two = started.client(0), started.client(1)
    first.wait_until_registered()
    second.wait_until_registered()
    assert one.is_ready()
    kv[...] = np.random.default_rng(0).random(SHAPE)
    put(one, 5, 3, 8)
    mask = np.ones(12, bool)
    mask[:4] = False
    task, found = two.get_match(PROMPT, mask)
    assert (found == mask).all()
    assert two.launch_tasks([task], [slots(1, 2)]) == [task]
    assert two.wait([task], DEADLINE_S)[task].status is KVResponseStatus.SUCCESS
    assert (other[:, :, [1, 2]] == kv[:, :, [3, 8]]).all()
    assert (other[:, :, 3] == 0).all()


def test_client_supports_each_manager_call(started: Started) -> None:
    rank, kv = started.rank(0)
    client = started.client()
    rank.wait_until_registered()
    kv[...] = 1
    task = client.put_async(PROMPT, slots(0, 1, 2))
    assert client.wait([task], DEADLINE_S)[task].status is KVResponseStatus.SUCCESS
    kv[...] = 0
    task = client.get_async(PROMPT, slots(0, 1, 2))
    response = client.wait([task], DEADLINE_S)[task]
    assert response.return_mask is not None
    assert (response.status, int(response.return_mask.sum())) == (KVResponseStatus.SUCCESS, 12)
    assert (kv[:, :, :3] == 1).all()
    task = client.prefetch_async(PROMPT)
    client.wait([task], DEADLINE_S)
    elsewhere, mask = client.get_match(PROMPT, namespace=["another"])
    assert not mask.any()
    task, mask = client.get_match(PROMPT)
    assert client.try_wait([task, 10**9])[10**9].status is KVResponseStatus.NOTFOUND
    client.cancel_tasks([task, elsewhere])
    client.reset()
    task, mask = client.get_match(PROMPT)
    assert not mask.any()


# --- who is let in --------------------------------------------------------------------------------


def test_client_of_another_model_is_refused(started: Started) -> None:
    other = ModelConfig(num_layers=3, num_kv_heads=2, head_size=8, dtype="float16", dp_size=2)
    with pytest.raises(InvalidArgumentError, match="num_layers=3"):
        started.client(model=other)


def test_duplicate_and_excess_clients_are_refused(started: Started) -> None:
    started.client(0)
    with pytest.raises(InvalidArgumentError, match=f"process {os.getpid()} already"):
        started.client(0)
    with pytest.raises(InvalidArgumentError, match="none of 2"):
        started.client(2)


def test_client_reconnecting_before_disconnect_is_noticed_is_accepted(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = started.client(0)
    rank, _ = started.rank(0)
    rank.wait_until_registered()
    deaf = [
        *started.server._clients,
        *(one[0] for one in started.server._registrations._ranks.values()),
    ]
    for connection in deaf:
        # The server does not hear that it has gone.
        monkeypatch.setattr(connection, "read", lambda handle: None)
    assert first._endpoint is not None
    first._endpoint.close()
    rank._is_closed = True
    rank._endpoint.close()
    started.client(0)
    again, _ = started.rank(0)
    again.wait_until_registered()
    assert len(started.server._clients) == 1
    assert started.server.registered_ranks == 1


def test_endpoint_in_use_leaves_no_threads(started: Started) -> None:
    before = threading.active_count()
    with pytest.raises(ChannelError, match="cannot listen"):
        started.start()
    assert threading.active_count() == before
    started.client(0)


def test_ranks_with_wrong_shape_or_index_are_refused(started: Started) -> None:
    for more, why in (({"tp_rank": 1}, "none of 1"), ({"dp_client_id": 7}, "none of 2")):
        rank, _ = started.rank(**more)
        with pytest.raises(InvalidArgumentError, match=why):
            rank.wait_until_registered()
    small = KVTPClient(f"{started.port}_gpu_register")
    small.register_to_server([shared_zeros((2, 16, TOKENS, 2, 8), "float16")], block_axis=1)
    with pytest.raises(InvalidArgumentError, match="a block of these tensors has 256 bytes"):
        small.wait_until_registered()
    small.close()
    one, _ = started.rank()
    one.wait_until_registered()
    two, _ = started.rank()
    with pytest.raises(InvalidArgumentError, match="already"):
        two.wait_until_registered()


def hand_over_descriptors(started: Started, fds: list[int], span: DeviceSpan | None = None) -> str:
    """What a rank hears that hands these over as the memory of its cache."""
    channel = connect(
        parse_address(f"unix://{started.port.removeprefix('ipc://')}_gpu_register"),
        messages.PROTOCOL,
    )
    body = messages.PROTOCOL.encode(messages.AddMemory(is_elastic=False))
    tensor = TensorDescription(0, SHAPE, np.empty(SHAPE, "float16").strides, "float16", 2)
    try:
        for first in range(0, len(fds), 16):
            some = fds[first : first + 16]
            frame = channel.writer.write(Kind.NOTICE, 0, body, len(some))
            socket.send_fds(channel.socket, [frame], some)
        channel.call(messages.RegisterTPClient(0, 0, False, [(0, tensor)], 2, span), DEADLINE_S)
        return "registered"
    except (KvelasticError, OSError) as error:
        return str(error)
    finally:
        channel.close()


def test_non_memory_descriptors_are_refused_and_closed(started: Started, tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    folder = os.open(tmp_path, os.O_RDONLY)
    zeros = os.open("/dev/zero", os.O_RDWR)
    short, good = os.memfd_create("short"), os.memfd_create("good")
    os.ftruncate(short, 100)
    os.ftruncate(good, 1 << 20)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for fd in (read_end, folder, zeros):
        assert "no memory" in hand_over_descriptors(started, [fd])
    assert "does not lie in its memory of 100 bytes" in hand_over_descriptors(started, [short])
    assert hand_over_descriptors(started, [good] * 1000) != "registered"
    on_gpu = DeviceSpan("GPU-0", 2 << 20, 2)
    assert "give one kind" in hand_over_descriptors(started, [good], on_gpu)
    assert hand_over_descriptors(started, [good]) == "registered"
    wait_until(lambda: len(list(Path("/proc/self/fd").iterdir())) <= before)
    started.server.check_integrity()
    for fd in (read_end, write_end, folder, zeros, short, good):
        os.close(fd)


def test_get_into_read_only_memory_fails(started: Started) -> None:
    rank, kv = started.rank(0)
    client = started.client()
    rank.wait_until_registered()
    kv[...] = 1
    put(client, 0, 1, 2)
    (blocks,) = [one[1] for one in started.server._registrations._ranks.values()]
    assert isinstance(blocks, SharedBlocks)
    for fd, _ in blocks._buffers:
        read_only = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
        os.dup2(read_only, fd)
        os.close(read_only)
    task, _ = client.get_match(PROMPT)
    client.launch_tasks([task], [slots(0, 1, 2)])
    assert client.wait([task], DEADLINE_S)[task].status is KVResponseStatus.FAILED
    started.server.check_integrity()


def test_rank_registers_with_later_and_restarted_servers(tmp_path: Path) -> None:
    kv = shared_zeros(SHAPE, "float16")
    rank = KVTPClient(f"ipc://{tmp_path}/s_gpu_register")
    rank.register_to_server(list(kv), block_axis=1)
    for _ in range(2):
        server = KVServer(MODEL, CACHE, server_recv_port=f"ipc://{tmp_path}/s")
        rank.wait_until_registered()
        assert server.registered_ranks == 1
        server.close()
        wait_until(lambda: not rank._is_registered)
    rank.close()


def test_rank_registers_after_a_connect_without_reply(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "s_gpu_register"
    connect, timed_out = Endpoint.connect, threading.Event()

    def impatient(endpoint: Endpoint, address: Address, timeout_s: float = 5.0) -> Connection:
        try:
            return connect(endpoint, address, timeout_s if timed_out.is_set() else 0.0)
        except ChannelTimeoutError:
            timed_out.set()
            raise

    monkeypatch.setattr(Endpoint, "connect", impatient)
    with socket.socket(socket.AF_UNIX) as deaf:
        deaf.bind(str(path))
        deaf.listen()
        rank = KVTPClient(f"ipc://{path}")
        rank.register_to_server(list(shared_zeros(SHAPE, "float16")), block_axis=1)
        assert timed_out.wait(DEADLINE_S)
    path.unlink()
    server = KVServer(MODEL, CACHE, server_recv_port=f"ipc://{tmp_path}/s")
    rank.wait_until_registered(DEADLINE_S)
    rank.close()
    server.close()


def test_rank_registers_after_a_shortage_of_descriptors(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect, attempts = Endpoint.connect, itertools.count()

    def connect_later(*arguments: Any) -> Connection:
        if next(attempts) == 0:
            raise ChannelError("no socket") from OSError(errno.EMFILE, "none left")
        return connect(*arguments)

    monkeypatch.setattr(Endpoint, "connect", connect_later)
    rank, _ = started.rank()
    rank.wait_until_registered(DEADLINE_S)


def test_rank_registers_again_if_its_registration_times_out(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    receive = Registrations.receive

    def receive_later(registrations: Registrations, request: Request) -> bool:
        if isinstance(request.message, messages.RegisterTPClient) and not rank_client.ANSWER_S:
            monkeypatch.setattr(rank_client, "ANSWER_S", DEADLINE_S)
            return True  # it gets no reply
        return receive(registrations, request)

    monkeypatch.setattr(rank_client, "ANSWER_S", 0.0)
    monkeypatch.setattr(Registrations, "receive", receive_later)
    rank, _ = started.rank()
    rank.wait_until_registered(DEADLINE_S)
    wait_until(lambda: len(rank._endpoint.connections) == 1)


def test_missing_server_error_names_the_endpoint_variable(tmp_path: Path) -> None:
    client = KVDPClient(f"ipc://{tmp_path}/nobody", MODEL)
    with pytest.raises(NotInitializedError):
        client.get_match(PROMPT)
    with pytest.raises(ChannelError, match="FLEXKV_SERVER_RECV_PORT"):
        client.start_server_and_register(0.2)
    client.shutdown()
    client.unregister()


def test_calls_after_server_close_raise(started: Started) -> None:
    client = started.client()
    started.server.close()
    with pytest.raises(ChannelClosedError):
        client.get_match(PROMPT)


def test_clients_reconnect_to_a_restarted_server(started: Started) -> None:
    clients = [started.client(0), started.client(1)]
    lost = [client.put_match(PROMPT)[0] for client in clients]
    started.server.close()
    for client in clients:
        with pytest.raises(ChannelClosedError):
            client.get_match(PROMPT)
    started.start()
    for client, task in zip(clients, lost, strict=True):
        assert client.try_wait(task)[task].status is KVResponseStatus.NOTFOUND
        new, mask = client.put_match(PROMPT)
        assert new != task
        assert mask.any()
        client.cancel(new)


def test_concurrent_threads_register_once_with_new_server(started: Started) -> None:
    client = started.client()
    started.server.close()
    started.start()
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda _: client.get_match(PROMPT)[0], range(32)))
    assert len(set(found)) == 32


def test_endpoints_are_parsed_or_refused() -> None:
    assert socket_address("ipc:///tmp/a") == socket_address("unix:///tmp/a")
    assert str(socket_address("/tmp/a")) == "unix:///tmp/a"
    assert default_endpoint("x").startswith("ipc:///")
    with pytest.raises(UnsupportedError, match="one server on each machine"):
        socket_address("tcp://10.0.0.1:5000")
    for endpoint in ("", "ipc://", "ipc://relative", "ipc:///" + "x" * 200):
        with pytest.raises(ConfigError):
            socket_address(endpoint)


def test_dead_endpoints_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    paths = [Path(default_endpoint(name).removeprefix("ipc://")) for name in ("old", "new", "up")]
    sockets = [socket.socket(socket.AF_UNIX) for _ in paths]
    for one, path in zip(sockets, paths, strict=True):
        one.bind(str(path))
    sockets[2].listen()
    for path in (paths[0], paths[2]):
        os.utime(path, (0, 0))
    (tmp_path / f"flexkv_{os.geteuid()}_file").write_text("")
    os.utime(tmp_path / f"flexkv_{os.geteuid()}_file", (0, 0))
    remove_dead_endpoints()
    assert [path.exists() for path in paths] == [False, True, True]
    assert (tmp_path / f"flexkv_{os.geteuid()}_file").exists()
    for one in sockets:
        one.close()


# --- whose tasks ----------------------------------------------------------------------------------


def test_clients_cannot_use_each_others_tasks(started: Started) -> None:
    rank, _ = started.rank(0)
    one, two = started.client(0), started.client(1)
    rank.wait_until_registered()
    task, _ = one.put_match(PROMPT)
    with pytest.raises(InvalidArgumentError, match="none of this client's"):
        two.launch_tasks([task], [slots(0, 1, 2)])
    two.cancel_tasks([task])
    assert two.wait([task], DEADLINE_S)[task].status is KVResponseStatus.NOTFOUND
    assert started.server.open_tasks == 1
    one.launch_tasks([task], [slots(0, 1, 2)])
    assert one.wait([task], DEADLINE_S)[task].status is KVResponseStatus.SUCCESS


def test_disconnected_client_releases_its_tasks(started: Started) -> None:
    rank, _ = started.rank(0)
    one = started.client(0)
    rank.wait_until_registered()
    one.put_match(PROMPT)
    one.put_match(PROMPT + 100)
    one.unregister()
    assert started.server.open_tasks == 0
    two = started.client(0)
    _, mask = two.put_match(PROMPT)
    assert mask.all()  # the plan of the one that went has left nothing behind
    started.server.check_integrity()


def test_completed_tasks_per_client_are_bounded(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "MOST_TASKS_OF_A_CLIENT", 32)
    client = started.client(0)
    for number in range(200):  # nothing is found: they are over at once
        client.get_match(PROMPT + 100 * number)
    assert started.server.open_tasks <= 32
    for number in range(32):
        client.put_match(np.arange(4) + 100 * number)
    with pytest.raises(InvalidArgumentError, match="wait for them or cancel them"):
        client.put_match(PROMPT + 7)
    client.unregister()
    assert started.server.open_tasks == 0
    started.server.check_integrity()


@pytest.mark.slow
def test_waiting_client_does_not_block_others(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank, _ = started.rank(0)
    one, two = started.client(0), started.client(1)
    rank.wait_until_registered()
    task, _ = one.put_match(PROMPT)
    engine: Any = started.server._engine
    may_end = threading.Event()

    def slow(call: Any, owner: int, *, is_late: bool) -> dict[int, KVResponse] | None:
        if not may_end.is_set() and not is_late:
            return None
        status = KVResponseStatus.SUCCESS if may_end.is_set() else KVResponseStatus.TIMEOUT
        return {one: KVResponse(status, one) for one in call.task_ids}

    monkeypatch.setattr(engine, "answers", slow)
    answers: list[dict[int, KVResponse]] = []
    waiting = threading.Thread(target=lambda: answers.append(one.wait([task], DEADLINE_S)))
    waiting.start()
    for _ in range(20):
        two.cancel_tasks([two.get_match(PROMPT)[0]])
    one.cancel_tasks([])  # of the same client, too
    assert one.wait([task], 0.0)[task].status is KVResponseStatus.TIMEOUT
    assert waiting.is_alive()
    may_end.set()
    waiting.join()
    assert answers[0][task].status is KVResponseStatus.SUCCESS


def test_calls_behind_a_blocking_call_keep_order(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank, _ = started.rank(0)
    one, two = started.client(0), started.client(1)
    rank.wait_until_registered()
    engine: Any = started.server._engine
    worker, calls_of = engine.transfer_engine.gpu_worker, started.server._calls
    ask, copy_out = engine.ask, worker.copy_out
    is_copying, may_end = threading.Event(), threading.Event()
    ran: list[tuple[str, str]] = []

    def noted(call: messages.Message, *more: int) -> Any:
        ran.append((type(call).__name__, threading.current_thread().name))
        return ask(call, *more)

    def slow(*arguments: Any) -> None:
        is_copying.set()
        may_end.wait(DEADLINE_S)
        copy_out(*arguments)

    monkeypatch.setattr(engine, "ask", noted)
    monkeypatch.setattr(worker, "copy_out", slow)
    task, _ = one.put_match(PROMPT)
    one.launch_tasks([task], [slots(0, 1, 2)])
    assert is_copying.wait(DEADLINE_S)
    with ThreadPoolExecutor(2) as threads:
        cancelled = threads.submit(one.cancel_tasks, [task])
        wait_until(lambda: calls_of.unfinished_tasks == 1)
        matched = threads.submit(two.get_match, PROMPT)
        wait_until(lambda: calls_of.unfinished_tasks == 2)
        assert not two.is_ready()  # other messages are not behind it
        may_end.set()
        cancelled.result(DEADLINE_S)
        matched.result(DEADLINE_S)
    calls_of.join()
    two.get_match(PROMPT)
    at_once, queued = "flexkv-messages", "flexkv-engine"
    assert ran == [
        ("Match", at_once),
        ("Launch", at_once),
        ("Cancel", queued),
        ("Match", queued),
        ("Match", at_once),
    ]


# --- nonsense -------------------------------------------------------------------------------------


def speaking(started: Started, *, registered: bool) -> Any:
    channel = connect(
        parse_address(f"unix://{started.port.removeprefix('ipc://')}"), messages.PROTOCOL
    )
    if registered:
        shape = messages.shape_of(MODEL, TOKENS)
        channel.call(messages.RegisterDPClient(dp_client_id=1, shape=shape), DEADLINE_S)
    return channel


def valid(pick: random.Random) -> messages.Message:
    tokens: Any = calls.pack(np.arange(pick.randrange(20)))
    mask: Any = b"\0\xff"
    tensor = TensorDescription(0, (2, 2), (2, 1), "int8", 1)
    return pick.choice(
        [
            messages.Match("get", tokens, None, None),
            messages.Match("put", tokens, mask, ["a"], tokens),
            messages.Match("prefetch", tokens, None, None),
            messages.Launch([1, 2], [tokens, tokens], False),
            messages.Cancel([1]),
            messages.Wait([1, 2], 0.0, True),
            messages.IsReady(),
            messages.Unregister(),
            messages.RegisterTPClient(0, 0, False, [(0, tensor)], 0, None),
            messages.RegisterDPClient(0, messages.shape_of(MODEL, TOKENS)),
            messages.AddMemory(is_elastic=False),
            messages.AddMemory(is_elastic=True),
        ]
    )


def mutated(pick: random.Random, body: bytes) -> bytes:
    changed = bytearray(body)
    for _ in range(pick.randrange(4)):
        at = pick.randrange(len(changed) + 1)
        changed[at : at + pick.randrange(3)] = pick.randbytes(pick.randrange(4))
    return bytes(changed)


def test_mutated_messages_do_not_stop_the_server(started: Started) -> None:
    rank, _ = started.rank(0)
    good = started.client(0)
    rank.wait_until_registered()
    pick = random.Random(11)
    channel: Any = None
    for number in range(1200):
        if channel is None:
            channel = speaking(started, registered=pick.random() < 0.7)
        body = mutated(pick, messages.PROTOCOL.encode(valid(pick)))
        frame = channel.writer.write(Kind.NOTICE, 0, body)
        if pick.random() < 0.05:
            frame = frame[: pick.randrange(len(frame))] + pick.randbytes(3)
        try:
            channel.socket.sendall(frame)
            if pick.random() < 0.2:
                channel.close()
                channel = None
        except OSError:
            channel.close()
            channel = None
        if number % 100 == 0:
            good.cancel_tasks([good.get_match(PROMPT)[0]])
    if channel is not None:
        channel.close()
    good.unregister()
    rank.close()
    wait_until(lambda: not started.server.open_tasks and not started.server.registered_ranks)
    started.server.check_integrity()


@given(st.binary(max_size=300))
def test_random_bytes_decode_or_raise(body: bytes) -> None:
    try:
        found = messages.PROTOCOL.decode(body)
    except MessageError:
        return
    again = messages.PROTOCOL.encode(found)
    assert messages.PROTOCOL.encode(messages.PROTOCOL.decode(again)) == again


@pytest.mark.parametrize(
    ("tokens", "mask"),
    [(b"", None), (b"\5", None), (b"\4abc", None), (b"\4" + bytes(32), b""), (b"\4", b"\xff")],
)
def test_invalid_arrays_are_refused(tokens: Any, mask: Any) -> None:
    body = messages.PROTOCOL.encode(messages.Match("get", tokens, mask, None, None))
    with pytest.raises(MessageError):
        messages.PROTOCOL.decode(body)


@given(st.binary(max_size=64))
def test_random_packed_arrays_unpack_or_raise(packed: bytes) -> None:
    for kind in (Tokens, Mask):
        try:
            array = calls.unpack(kind, packed)
        except InvalidArgumentError:
            continue
        assert array.ndim == 1


@given(st.lists(st.integers(-(1 << 63), (1 << 63) - 1), max_size=40))
def test_packed_integers_round_trip(values: list[int]) -> None:
    array = np.array(values, np.int64)
    assert (calls.unpack(Tokens, calls.pack(array)) == array).all()


@given(st.lists(st.booleans(), max_size=70))
def test_packed_masks_round_trip(values: list[bool]) -> None:
    mask = np.array(values, bool)
    assert np.array_equal(calls.unpack(Mask, calls.pack(mask)), mask)


def test_invalid_token_arrays_are_refused_by_the_client(started: Started) -> None:
    client = started.client()
    for tokens in (np.zeros((2, 2), int), np.zeros(3), ["a"], np.zeros((1 << 20) + 1, int)):
        with pytest.raises(KvelasticError):
            client.get_match(tokens)
    with pytest.raises(KvelasticError):
        client.get_match(PROMPT, np.ones(12))


# --- as a program ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_server_process_ends_with_its_parent(tmp_path: Path) -> None:
    port = f"ipc://{tmp_path}/s"
    program = (
        "import sys; from kvelastic.flexkv.server.server import KVServer;"
        "from kvelastic.flexkv.common.config import *;"
        f"handle = KVServer.create_server({MODEL!r}, {CACHE!r}, '', {port!r}, inherit_env=False);"
        "print(handle.process.pid, flush=True); sys.stdin.read()"
    )
    with LineProgram("-c", program) as parent:
        pidfd = os.pidfd_open(int(parent.read()))
        client = KVDPClient(port, MODEL)
        client.start_server_and_register()
        _, mask = client.get_match(PROMPT)
        assert not mask.any()
    assert select.select([pidfd], [], [], DEADLINE_S)[0], "the server outlives its parent"
    os.close(pidfd)
    client.unregister()
    assert not (tmp_path / "s").exists()


@pytest.mark.slow
def test_server_started_by_hand_ends_on_request(tmp_path: Path) -> None:
    file = tmp_path / "server.json"
    file.write_bytes(process.dump(MODEL, CACHE, "", f"ipc://{tmp_path}/s"))
    command = [sys.executable, "-m", "kvelastic.flexkv.server", str(file)]
    server = subprocess.Popen(command)
    client = KVDPClient(f"ipc://{tmp_path}/s", MODEL)
    client.start_server_and_register()
    client.unregister()  # which leaves the server to others
    client = KVDPClient(f"ipc://{tmp_path}/s", MODEL)
    client.start_server_and_register()
    client.shutdown()
    assert server.wait(DEADLINE_S) == 0
    again = subprocess.Popen(command)
    client = KVDPClient(f"ipc://{tmp_path}/s", MODEL)
    client.start_server_and_register()
    again.send_signal(signal.SIGTERM)
    assert again.wait(DEADLINE_S) == 0
    client.unregister()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "no JSON"),
        ("[]", "has the keys"),
        ('{"model": {}}', "has the keys"),
        ('{"model_config": {"layers": 1}}', "ModelConfig has the keys"),
        ('{"cache_config": {"enable_gds": true}}', "enable_gds"),
        ('{"model_config": {"nnodes": 2}}', "nnodes=2"),
        ('{"server_recv_port": 5}', "endpoints"),
        ('{"server_recv_port": "tcp://0.0.0.0:1"}', "tcp"),
    ],
)
def test_invalid_configuration_error_names_the_cause(text: str, why: str) -> None:
    with pytest.raises(KvelasticError, match=why):
        KVServer(*process.load(text.encode()))
