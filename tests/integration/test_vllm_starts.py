"""Servers that start at once on one GPU: each reserves what it holds itself, within 256 MiB."""

from __future__ import annotations

import os
import random
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_nvml import FakeGpu, FakeNvml
from processes import PROGRAMS
from simulated_machine import SimulatedMachine
from starting_server import StartingServer

from kvelastic.config import load
from kvelastic.device import nvml
from kvelastic.errors import OutOfMemoryError
from kvelastic.integration.vllm import executor_class, own_memory, scheduler_side
from kvelastic.integration.vllm.own_memory import LIBRARIES_BYTES, Seen, own_bytes
from kvelastic.integration.vllm.worker_device import DeviceFacts

MIB = 1 << 20
GIB = 1 << 30
CLOSE_BYTES = 256 * MIB
STEPS = [("torch", 1024), ("torch", 1024), ("outside", 94), ("torch", 200), ("outside", 30),
         ("outside", 104)]  # fmt: skip
"""What a server takes after its context, as an H100 showed it: weights, then its libraries."""


# ------------------------------------------------------------------------------ what a look says


@dataclass(eq=False)
class Server:
    is_elastic: bool
    torch: int = 0
    outside: int = 0
    is_there: bool = False
    first: Seen | None = None

    @property
    def used(self) -> int:
        return self.torch + self.outside + (527 * MIB if self.is_there else 0)


@pytest.mark.parametrize("tells", [True, False], ids=["NVML tells", "NVML does not tell"])
@pytest.mark.parametrize("seed", range(20))
def test_concurrent_starts_are_charged_only_their_own_usage(seed: int, tells: bool) -> None:
    dice = random.Random(seed)
    servers = [Server(is_elastic=number < 3) for number in range(5)]

    def look(server: Server) -> Seen:
        # A place of the start reserves 3 GiB; stock servers are in no ledger.
        others = sum(3 * GIB for one in servers if one.is_elastic and one.first and one != server)
        used = sum(one.used for one in servers)
        return Seen(used, server.torch, others, server.used if tells else None)

    left = [(server, step) for server in servers for step in range(len(STEPS) + 1)]
    done: list[tuple[Server, int]] = []
    while left:
        # In any order, but for that of each server's own steps.
        server = dice.choice([one for one, _ in left])
        step = next(step for one, step in left if one is server)
        left.remove((server, step))
        done.append((server, step))
        if step == 0:
            server.is_there = True
            server.first = look(server)
            continue
        kind, size_mib = STEPS[step - 1]
        setattr(server, kind, getattr(server, kind) + size_mib * MIB)
        if step == len(STEPS) and server.is_elastic:
            assert server.first is not None
            found = own_bytes(server.first, look(server))
            truth = server.torch + server.outside
            assert abs(found - truth) <= (0 if tells else CLOSE_BYTES), done


def test_foreign_usage_adds_at_most_the_library_share() -> None:
    first = Seen(used=GIB, reserved_by_torch=0, of_instances=0)
    now = Seen(used=GIB + 2 * GIB + 20 * GIB, reserved_by_torch=2 * GIB, of_instances=0)
    assert own_bytes(first, now) == 2 * GIB + LIBRARIES_BYTES


# ------------------------------------------------------------------------- which process it is


class Gpu:
    """A driver and its NVML: of each process what it holds."""

    granularity_bytes = 2 * MIB

    def __init__(self, held: dict[int, int], own: int | None) -> None:
        self.held, self.own = held, own
        self.creates = 0
        self.beside: Any = lambda: None

    def create(self, size_bytes: int) -> int:
        self.creates += 1
        self.beside()
        if self.own is not None:
            self.held[self.own] += size_bytes
        return 1

    def destroy(self, handle: int, size_bytes: int) -> None:
        if self.own is not None:
            self.held[self.own] -= size_bytes

    def processes(self, name: str) -> dict[int, int]:
        return dict(self.held)


def find_own_pid(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> int | None:
    monkeypatch.setattr(own_memory, "processes", gpu.processes)
    return own_memory.find_pid(gpu, "GPU-1")  # type: ignore[arg-type]


def test_own_process_is_found_by_a_test_allocation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = Gpu({70_001: 3 * GIB, 70_002: 5 * GIB}, own=70_002)
    assert find_own_pid(gpu, monkeypatch) == 70_002, (
        "whatever os.getpid() says: a container's differ"
    )
    assert gpu.held == {70_001: 3 * GIB, 70_002: 5 * GIB}


def test_driver_without_process_memory_is_not_trusted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert find_own_pid(Gpu({os.getpid(): 0, 70_001: 0}, own=None), monkeypatch) is None
    untold = Gpu({}, own=None)
    assert find_own_pid(untold, monkeypatch) is None
    assert untold.creates == 0, "without NVML nothing is tried"


def test_growing_neighbour_does_not_disturb_the_search(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = Gpu({1: GIB, 2: GIB}, own=2)

    def neighbour_loads() -> None:
        gpu.held[1] += 100 * MIB

    gpu.beside = neighbour_loads
    assert find_own_pid(gpu, monkeypatch) == 2

    def neighbour_allocates_the_same() -> None:
        gpu.held[1] += 66 * MIB * (1 if gpu.creates % 2 else -1)

    # One that takes just as much is not told apart while it keeps that; it does not for ever.
    gpu.beside = neighbour_allocates_the_same
    assert find_own_pid(gpu, monkeypatch) == 2


def test_full_device_ends_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu({2: 80 * GIB}, own=2)

    def full() -> None:
        raise OutOfMemoryError("no memory is left")

    gpu.beside = full
    assert find_own_pid(gpu, monkeypatch) is None


def test_gpu_processes_are_found_by_cuda_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"compute": [(7, GIB), (8, None), (9, 2 * GIB)]}
    gpus = [FakeGpu(), FakeGpu(uuid="GPU-AB", processes=told)]  # type: ignore[arg-type]
    monkeypatch.setattr(nvml, "find", lambda: FakeNvml(gpus))
    assert own_memory.processes("GPU-ab") == {7: GIB, 9: 2 * GIB}
    assert own_memory.processes("GPU-11111111-1111-1111-1111-111111111111") == {}
    monkeypatch.setattr(nvml, "find", lambda: None)
    assert own_memory.processes("GPU-ab") == {}


# ----------------------------------------------------------------------------------- processes

CONTEXT_BYTES = 526 * MIB
NVML_WAYS: dict[str, dict[str, str]] = {
    "no NVML": {},
    "NVML": {"TEST_NVML": "tells"},
    "NVML in a container": {"TEST_NVML": "tells", "TEST_NVML_SHIFT": "100000"},
    "NVML that says 0": {"TEST_NVML": "blind"},
}


@pytest.mark.parametrize("way", NVML_WAYS)
def test_five_processes_start_at_once(way: str, tmp_path: Path) -> None:
    is_told = NVML_WAYS[way].get("TEST_NVML") == "tells"
    folder = tmp_path / "nvml"
    folder.mkdir()
    with SimulatedMachine(tmp_path, memory_bytes=40 * GIB) as machine, ExitStack() as stack:
        environment = {
            **machine.environment,
            "KVSIM_CONTEXT_BYTES": str(CONTEXT_BYTES),
            "KVSIM_POISON": "0",  # which would touch all of this
            "KVELASTIC_LEDGER": f"kvstarts-{os.getpid()}",
            "PYTHONPATH": str(PROGRAMS),
            "TEST_NVML_FOLDER": str(folder),
            **NVML_WAYS[way],
        }
        kinds = ["elastic", "stock", "elastic", "stock", "stock"]
        servers = [stack.enter_context(StartingServer(kind, environment)) for kind in kinds]
        for server in servers:
            assert server.read() == "ready"
        for server in servers:
            assert server.ask("look") == "done"
        for kind, size_mib in STEPS:
            for server in servers:
                server.take(**{f"{kind}_bytes": size_mib * MIB})
        for server in servers:
            if server.is_elastic:
                truth = server.torch_bytes + server.outside_bytes
                error = abs(int(server.ask("reserve")) - truth)
                assert error <= (0 if is_told else CLOSE_BYTES)


# -------------------------------------------------------------------------------- and later less


class Pool:
    def __init__(self) -> None:
        self.asked: list[dict[str, int]] = []

    def reserve(self, size_bytes: dict[str, int]) -> None:
        self.asked.append(size_bytes)


def instance_with(reserved: dict[str, int], devices: str) -> scheduler_side.Instance:
    made = object.__new__(scheduler_side.Instance)
    made._pool = Pool()  # type: ignore[assignment]
    made._settings = load()
    assert made._settings.reserve is None
    made._devices = [DeviceFacts(name, 80 * GIB) for name in devices]
    made._reserved_bytes = dict(reserved)
    return made


def test_later_measurement_only_lowers_the_reserve() -> None:
    instance = instance_with({"a": 8 * GIB, "b": 8 * GIB}, "aab")
    instance.lower_reserve([4 * GIB, 4 * GIB, 9 * GIB])
    assert instance._pool.asked == []  # type: ignore[attr-defined]
    instance.lower_reserve([3 * GIB, 4 * GIB, 9 * GIB])
    instance.lower_reserve([4 * GIB, 4 * GIB, 7 * GIB])
    assert instance._pool.asked == [{"a": 7 * GIB}, {"b": 7 * GIB}]  # type: ignore[attr-defined]


def test_reserve_is_remeasured_when_an_awake_engine_sleeps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    happened: list[object] = []

    class Chosen:
        """vLLM's executor."""

        is_sleeping = False

        def collective_rpc(self, method: Any, *args: Any, **kwargs: Any) -> list[object]:
            return [method(SimpleNamespace(worker=rank)) for rank in (1, 2)]

        def sleep(self) -> None:
            happened.append("vLLM sleeps")

    class Executor(executor_class.ElasticExecutor, Chosen):
        def __init__(self) -> None:
            self.kvelastic_ranks = [1]

    monkeypatch.setattr(executor_class.in_worker, "hand_over_reserve", lambda worker: worker)
    executor: Any = Executor()
    executor.kvelastic_instance = SimpleNamespace(
        is_on_gpu=True,
        lower_reserve=happened.append,
        sleep=lambda: happened.append("cache sleeps"),
        report_engine_asleep=lambda _: None,
        tiers=None,
    )
    executor.sleep()
    assert happened == [[2], "vLLM sleeps", "cache sleeps"]
    executor.is_sleeping = True
    executor.sleep()
    assert happened[3:] == ["vLLM sleeps", "cache sleeps"]
