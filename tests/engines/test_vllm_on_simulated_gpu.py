"""`vllm serve` with its KV cache in memory of the CUDA driver: real tokens over the simulated GPU.

CPU kernels compute; everything below them is what runs on a GPU: the worker's driver and its named
stream, the device's own ledger, pages that are created, mapped and unmapped. Fresh pages are
poisoned.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from engine_server import Request
from simulated_machine import SimulatedMachine
from vllm_server import PAGE_BYTES, VllmServer, make_requests
from waiting import DEADLINE_S, wait_until

from kvelastic.shared import ledger, segment

pytestmark = pytest.mark.timeout(900)

NAME = f"kvelastic_gpu_{os.getpid()}"
DEVICE_BYTES = 256 << 20


def settings(name: str, **further: str) -> dict[str, str]:
    return {
        "ENABLE_KVELASTIC": "true",
        "KVELASTIC_IPC_NAME": name,
        "KVELASTIC_MAX_CACHED_TOKENS": "-1",
        "KVELASTIC_SANITY_CHECK": "true",
        "VLLM_SERVER_DEV_MODE": "1",
        **further,
    }


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimulatedMachine]:
    folder = tmp_path_factory.mktemp("machine")
    with SimulatedMachine(folder, memory_bytes=DEVICE_BYTES) as machine:
        machine.environment["KVSIM_TRACE"] = str(folder / "trace")
        yield machine


@pytest.fixture(scope="module")
def server(tiny_model: Path, log_folder: Path, machine: SimulatedMachine) -> Iterator[VllmServer]:
    environment = settings(NAME) | machine.engine_environment()
    with VllmServer(tiny_model, log_folder / "gpu.log", environment) as server:
        yield server.wait_until_ready()


@pytest.fixture
def on_gpu(server: VllmServer) -> Iterator[VllmServer]:
    """The server, without a limit; the limit is lifted again afterwards."""
    yield server
    if server.process.poll() is None:
        segment.request(NAME, limit_bytes=DEVICE_BYTES, asleep=False, wait_s=DEADLINE_S)


def differing(left: list[list[int]], right: list[list[int]]) -> int:
    return sum(one != other for one, other in zip(left, right, strict=True))


def peak_usage_while(machine: SimulatedMachine, done: threading.Event) -> int:
    """The most that the device held from now until then, by looks from outside."""
    most = machine.used_bytes()
    while not done.is_set():
        most = max(most, machine.used_bytes())
    return most


def test_same_tokens_and_usage_grows_with_load(stock, on_gpu, machine) -> None:
    segment.request(NAME, limit_bytes=PAGE_BYTES, wait_s=DEADLINE_S)
    segment.request(NAME, limit_bytes=DEVICE_BYTES, wait_s=DEADLINE_S)
    assert machine.used_bytes() == PAGE_BYTES  # the null block's
    hits = on_gpu.metrics()["prefix_cache_hits_total"]
    requests = make_requests(24, 1)
    expected = stock.complete_all(requests)
    for _ in range(2):  # the second time, every prompt is in the prefix cache
        assert differing(on_gpu.complete_all(requests), expected) == 0
    assert on_gpu.metrics()["prefix_cache_hits_total"] - hits > 1000
    assert machine.used_bytes() >= 4 * PAGE_BYTES


def test_zeroed_device_memory_changes_the_tokens(stock, on_gpu, machine) -> None:
    """The control: it is this memory that the tokens come from."""
    requests = make_requests(16, 3, shortest=100)
    expected = stock.complete_all(requests)
    assert differing(on_gpu.complete_all(requests), expected) == 0
    assert machine.zero() >= PAGE_BYTES
    assert differing(on_gpu.complete_all(requests), expected) >= len(requests) // 2
    # What was cached is wrong now: a limit of one page, all of which one request needs, drops it.
    segment.request(NAME, limit_bytes=PAGE_BYTES, wait_s=DEADLINE_S)
    on_gpu.complete(Request([5] * 990, 1))


def test_limit_below_the_working_set(stock, on_gpu, machine) -> None:
    requests = make_requests(32, 4, shortest=100, longest=600)
    expected = stock.complete_all(requests)
    preempted = on_gpu.metrics()["num_preemptions_total"]
    assert segment.request(NAME, limit_bytes=3 * PAGE_BYTES, wait_s=DEADLINE_S).state == "applied"
    done = threading.Event()
    with ThreadPoolExecutor(1) as looking:
        most = looking.submit(peak_usage_while, machine, done)
        try:
            tokens = on_gpu.complete_all(requests)
        finally:
            done.set()
        assert most.result() <= 3 * PAGE_BYTES
    assert differing(tokens, expected) == 0
    assert on_gpu.metrics()["num_preemptions_total"] > preempted


def test_limits_at_random_under_load(stock, on_gpu, machine) -> None:
    requests = make_requests(32, 5, shortest=100, longest=600)
    expected = stock.complete_all(requests)
    pick, applied = random.Random(8), 0
    with ThreadPoolExecutor(1) as serving:
        tokens = serving.submit(on_gpu.complete_all, requests)
        while not tokens.done():
            pages = pick.choice([2, 3, 4, 6, 8, 16])
            answer = segment.request(NAME, limit_bytes=pages * PAGE_BYTES, wait_s=0.5)
            if answer.state == "applied":
                applied += 1
                assert machine.used_bytes() <= pages * PAGE_BYTES
    assert differing(tokens.result(), expected) == 0
    assert applied > 0


def test_sleep_empties_device_and_wake_keeps_tokens(stock, on_gpu, machine) -> None:
    requests = make_requests(12, 6)
    expected = stock.complete_all(requests)
    on_gpu.post("/sleep?level=1")
    assert machine.used_bytes() == 0
    on_gpu.post("/wake_up")
    assert machine.used_bytes() == PAGE_BYTES
    assert differing(on_gpu.complete_all(requests), expected) == 0


def test_device_ledger_grants_equal_device_usage(on_gpu, machine) -> None:
    on_gpu.complete_all(make_requests(8, 7))
    (info,) = [one for one in ledger.list_ledgers() if one.device.startswith("GPU-")]
    assert info.capacity_bytes == int(DEVICE_BYTES * 0.95)
    wait_until(lambda: _granted(info.device) == machine.used_bytes())


def _granted(device: str) -> int:
    return sum(one.granted_bytes for one in ledger.list_ledgers() if one.device == device)


def test_scheduler_makes_no_cuda_calls(on_gpu, machine) -> None:
    on_gpu.complete_all(make_requests(8, 8))
    processes = on_gpu.processes()
    callers = {
        int(line.split()[-1])
        for line in Path(machine.environment["KVSIM_TRACE"]).read_text().splitlines()
    }
    assert processes["worker"].pid in callers
    assert {processes["api"].pid, processes["core"].pid} & callers == set()


def test_servers_share_device_and_killed_server_frees_memory(
    stock, on_gpu, machine, tiny_model, tmp_path
) -> None:
    """The first fills the device with what it has cached; the second gets what it needs of it."""
    requests = make_requests(16, 9, shortest=100)
    expected = stock.complete_all(requests)
    device = next(one.device for one in ledger.list_ledgers() if one.device.startswith("GPU-"))
    group = os.environ["KVELASTIC_LEDGER"]
    before = ledger.set_capacity(device, group=group, capacity_bytes=10 * PAGE_BYTES)
    other = f"{NAME}_other"
    try:
        environment = settings(other) | machine.engine_environment()
        with VllmServer(tiny_model, tmp_path / "other.log", environment) as second:
            second.wait_until_ready()
            on_gpu.complete_all(make_requests(40, 10, shortest=100))
            with ThreadPoolExecutor(2) as both:
                first = both.submit(on_gpu.complete_all, requests)
                assert differing(second.complete_all(requests), expected) == 0
                assert differing(first.result(), expected) == 0
            assert machine.used_bytes() <= 10 * PAGE_BYTES
            held = machine.used_bytes()
            processes = second.processes()
            processes["worker"].send_signal(signal.SIGKILL)
            processes["core"].send_signal(signal.SIGKILL)
            second.kill()
            assert machine.used_bytes() < held
        assert differing(on_gpu.complete_all(requests), expected) == 0
        segment.reap()
        ledger.reap()
        assert _granted(device) == machine.used_bytes()
    finally:
        ledger.set_capacity(device, group=group, capacity_bytes=before)


@pytest.fixture
def mig_instances(tmp_path: Path) -> Iterator[SimulatedMachine]:
    with SimulatedMachine(tmp_path, devices=2, memory_bytes=DEVICE_BYTES, mig=2) as machine:
        yield machine


def test_driver_failures_on_mig_instance_keep_the_tokens(
    stock, mig_instances: SimulatedMachine, tiny_model, tmp_path
) -> None:
    """Creating, mapping and giving access fail while the cache grows: pages come later."""
    machine = mig_instances
    requests = make_requests(24, 11, shortest=100)
    expected = stock.complete_all(requests)
    plan = "cuMemCreate:4:2,cuMemMap:7:2,cuMemSetAccess:9:2,cuMemCreate:12-13:2,cuMemUnmap:2:600"
    environment = settings(f"{NAME}_faults") | machine.engine_environment()
    with VllmServer(tiny_model, tmp_path / "f.log", environment | {"KVSIM_FAIL": plan}) as server:
        server.wait_until_ready()
        before = machine.used_bytes()
        assert differing(server.complete_all(requests), expected) == 0
        assert machine.used_bytes() > before
        assert any(info.device.startswith("MIG-") for info in ledger.list_ledgers())
        assert server.stop() == 0


def test_device_memory_is_released_at_exit(server, machine) -> None:
    assert server.stop() == 0
    assert machine.used_bytes() == 0
