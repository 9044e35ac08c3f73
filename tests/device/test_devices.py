"""What the machine is found to have: every GPU by a strict NVML of our own, and the host."""

from __future__ import annotations

import os
import sys
from types import ModuleType

import pytest
from fake_nvml import (
    GIB,
    QUESTIONS,
    FakeGpu,
    FakeNvml,
    mig_machine,
    pynvml_module,
)

from kvelastic.device import machine, nvml
from kvelastic.device.machine import DeviceFacts, ProcessMemory, device_key, host_facts, list_gpus
from kvelastic.device.nvml import Nvml, Status, nvml_error


def by_itself(fake: FakeNvml) -> Nvml:
    return fake


def by_pynvml(fake: FakeNvml) -> Nvml:
    return Nvml(pynvml_module(fake))


WAYS = [by_itself, by_pynvml]
every_way = pytest.mark.parametrize("way", WAYS)


def name_of(pid: int) -> str | None:
    return f"process {pid}"


def gpus(fake: FakeNvml, way=by_itself) -> tuple[DeviceFacts, ...]:
    found, problem = list_gpus(way(fake), name_of)
    assert problem == ""
    assert fake.starts == fake.stops == 1
    return found


# --------------------------------------------------------------------------------------- healthy


@every_way
def test_a_healthy_gpu(way):
    (gpu,) = gpus(FakeNvml([FakeGpu()]), way)
    assert gpu == DeviceFacts(
        kind="gpu",
        name="NVIDIA Fake 80GB",
        index=0,
        uuid="GPU-11111111-1111-1111-1111-111111111111",
        total_bytes=80 * GIB,
        used_bytes=20 * GIB,  # total less free, whatever a package counts as used
        free_bytes=60 * GIB,
        driver_version="580.65.06",
        processes=(),
    )


@every_way
def test_no_gpu_is_not_a_problem(way):
    assert gpus(FakeNvml([]), way) == ()


@every_way
def test_processes_are_sorted_by_memory_unknown_last(way):
    fake = FakeNvml(
        [FakeGpu(processes={"compute": [(1, 5), (2, nvml.NOT_AVAILABLE_BYTES), (3, 9), (4, None)]})]
    )
    assert gpus(fake, way)[0].processes == (
        ProcessMemory(3, 9, "process 3"),
        ProcessMemory(1, 5, "process 1"),
        ProcessMemory(2, None, "process 2"),
        ProcessMemory(4, None, "process 4"),
    )


def test_process_listed_under_two_kinds_counts_once():
    # The last one grows between the two questions.
    kinds = {
        "compute": [(1, 5), (2, None), (4, 3)],
        "graphics": [(1, 5), (2, 7), (4, 6)],
        "mps": [(3, 1)],
    }
    told = gpus(FakeNvml([FakeGpu(processes=kinds)]))[0].processes
    assert [(each.pid, each.used_bytes) for each in told] == [(2, 7), (4, 6), (1, 5), (3, 1)]


# ------------------------------------------------------------------------------------------- MIG


@every_way
def test_mig_instances_follow_their_gpu(way):
    whole, split, first, second, unified, lost = gpus(mig_machine(), way)
    assert [gpu.index for gpu in (whole, split, unified, lost)] == [0, 1, 2, 3]
    assert (first.kind, first.index, first.uuid) == ("mig", 1, "MIG-aaaaaaaa")
    assert (second.kind, second.index, second.uuid) == ("mig", 3, "MIG-bbbbbbbb")
    assert first.parent == second.parent == split.uuid
    assert first.parent_index == second.parent_index == 1
    assert (first.total_bytes, first.used_bytes) == (40 * GIB, GIB)
    assert first.processes == ()
    assert first.problem == second.problem == ""
    assert split.processes is None
    assert (split.total_bytes, split.free_bytes, split.used_bytes) == (None, None, None)
    assert split.problem.startswith("memory: this user may not ask")
    assert whole.problem == ""


def test_mig_without_instances_suggests_nvidia_smi():
    (gpu,) = gpus(FakeNvml([FakeGpu(slots=[None, None])]))
    assert "nvidia-smi mig -cgi" in gpu.problem
    assert gpu.total_bytes == 80 * GIB


def test_unreadable_mig_instances_are_named_together():
    slots: list[FakeGpu | None] = [FakeGpu(uuid="MIG-a"), None, FakeGpu(), FakeGpu()]
    refusals = {f"mig_device:{slot}": Status.NO_PERMISSION for slot in (2, 3)}
    gpu, seen = gpus(FakeNvml([FakeGpu(slots=slots, refusals=refusals)]))
    assert seen.uuid == "MIG-a"
    assert gpu.problem.startswith("MIG instance 2, MIG instance 3: this user may not ask")


# --------------------------------------------------------------------------- what cannot be asked


@every_way
@pytest.mark.parametrize("status", Status)
@pytest.mark.parametrize("question", [*QUESTIONS, "*"])
def test_failing_gpu_query_hides_no_gpu(way, question, status):
    refused = FakeGpu(name="broken", refusals={question: status}, slots=[None])
    first, broken, last = gpus(FakeNvml([FakeGpu(), refused, FakeGpu(uuid="GPU-last")]), way)
    assert first.problem == last.problem == ""
    assert (first.total_bytes, last.uuid) == (80 * GIB, "GPU-last")
    assert (broken.kind, broken.index) == ("gpu", 1)
    is_from_before_mig = question == "is_mig_on" and status in (3, 13)
    assert bool(broken.problem) != is_from_before_mig
    for field, ask in (("name", "name"), ("uuid", "uuid"), ("total_bytes", "memory")):
        assert (getattr(broken, field) is None) == (question in {ask, "device", "*"})


def test_lost_gpu_is_reported_once():
    (gpu,) = gpus(FakeNvml([FakeGpu(refusals={"*": Status.GPU_IS_LOST})]))
    assert gpu.problem.startswith("name, UUID, memory, MIG, processes: the GPU is lost")
    assert gpu.problem.count("lost") == 1
    assert gpu.processes is None


def test_integrated_gpu_reports_shared_memory():
    refusals = {"memory": Status.NOT_SUPPORTED, "is_mig_on": Status.NOT_SUPPORTED}
    (gpu,) = gpus(FakeNvml([FakeGpu(refusals=refusals)]))
    assert gpu.name == "NVIDIA Fake 80GB"
    assert (gpu.total_bytes, gpu.used_bytes, gpu.free_bytes) == (None, None, None)
    assert gpu.problem.startswith("memory: ")
    assert "shares the host's memory" in gpu.problem
    assert "MIG" not in gpu.problem


@pytest.mark.parametrize("kind", ["graphics", "mps"])
def test_gpu_without_graphics_or_mps_has_no_problem(kind):
    refusals = {f"processes:{kind}": Status.NOT_SUPPORTED}
    (gpu,) = gpus(FakeNvml([FakeGpu(processes={"compute": [(1, 5)]}, refusals=refusals)]))
    assert gpu.problem == ""
    assert len(gpu.processes) == 1


def test_unsupported_process_query_is_reported():
    (gpu,) = gpus(FakeNvml([FakeGpu(refusals={"processes:compute": Status.NOT_SUPPORTED})]))
    assert gpu.processes is None
    assert gpu.problem == "processes: NVML cannot tell for this GPU"


@every_way
@pytest.mark.parametrize(
    ("status", "words"),
    [
        (Status.LIBRARY_NOT_FOUND, "install the NVIDIA driver"),
        (Status.DRIVER_NOT_LOADED, "modprobe nvidia"),
        (Status.LIB_RM_VERSION_MISMATCH, "restart the machine"),
        (Status.NO_PERMISSION, "as root"),
        (77, "error 77"),
    ],
)
def test_nvml_is_not_stopped_after_failed_start(way, status, words):
    fake = FakeNvml([FakeGpu()], {"start": status})
    found, problem = list_gpus(way(fake), name_of)
    assert found == ()
    assert words in problem
    assert (fake.starts, fake.stops) == (0, 0)


@every_way
def test_failed_gpu_count_stops_nvml(way):
    fake = FakeNvml([FakeGpu()], {"count": Status.UNKNOWN})
    found, problem = list_gpus(way(fake), name_of)
    assert found == ()
    assert problem.startswith("GPUs cannot be counted: ")
    assert (fake.starts, fake.stops) == (1, 1)


@every_way
def test_failed_stop_and_unknown_version_are_ignored(way):
    fake = FakeNvml([FakeGpu()], {"stop": Status.GPU_IS_LOST, "version": Status.UNKNOWN})
    (gpu,) = gpus(fake, way)
    assert gpu.total_bytes == 80 * GIB
    assert gpu.driver_version is None
    assert gpu.problem == ""


def test_nvml_is_stopped_after_an_exception():
    fake = FakeNvml([FakeGpu(processes={"compute": [(1, 5)]})])

    def broken(_: int) -> str:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        list_gpus(fake, broken)
    assert (fake.starts, fake.stops) == (1, 1)


# ------------------------------------------------------------------------------------ the package

COMPUTE = "nvmlDeviceGetComputeRunningProcesses_v3"


def asked(library: ModuleType) -> DeviceFacts:
    ((gpu,), problem) = list_gpus(Nvml(library), name_of)
    assert problem == ""
    return gpu


def test_package_without_a_function_is_reported():
    library = pynvml_module(FakeNvml([FakeGpu()]))
    delattr(library, COMPUTE)
    gpu = asked(library)
    assert gpu.problem.startswith("processes: the NVIDIA driver is too old to tell; update it")
    assert gpu.total_bytes == 80 * GIB


def test_unexpected_package_exception_is_reported():
    library = pynvml_module(FakeNvml([FakeGpu()]))

    def odd(_: object) -> None:
        raise UnicodeError("odd bytes")

    setattr(library, COMPUTE, odd)
    gpu = asked(library)
    assert "odd bytes" in gpu.problem
    assert gpu.total_bytes == 80 * GIB


@pytest.mark.parametrize("times", [1, 2])
def test_process_count_race_is_retried_once(times):
    library = pynvml_module(FakeNvml([FakeGpu(processes={"compute": [(1, 5)]})]))
    real, left = getattr(library, COMPUTE), [times]

    def races(device: object) -> object:
        left[0] -= 1
        if left[0] >= 0:
            raise library.NVMLError(Status.INSUFFICIENT_SIZE)
        return real(device)

    setattr(library, COMPUTE, races)
    gpu = asked(library)
    if times == 1:
        assert [each.pid for each in gpu.processes] == [1]
    else:
        assert "INSUFFICIENT_SIZE" in gpu.problem


def test_missing_nvml_package_lists_only_the_host(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", pynvml_module(FakeNvml([FakeGpu()])))
    assert len(machine.list_devices(None).devices) == 2
    monkeypatch.setitem(sys.modules, "pynvml", None)  # makes its import fail
    assert nvml.find() is None
    found = machine.list_devices(None)
    assert [device.kind for device in found.devices] == ["host"]
    assert "pip install 'kvelastic[cuda]'" in found.gpu_problem


def test_nvml_error_keeps_status_and_code():
    error = nvml_error(Status.NOT_FOUND)
    assert (error.status, error.code) == (6, "NVML")
    assert str(error) == "NVML answered with error 6 (NOT_FOUND)"


# ------------------------------------------------------------------------------------ the host


MEMINFO = "MemTotal:       1000 kB\nMemFree:  1 kB\nMemAvailable:    400 kB\nHugePages_Total:  0\n"


def test_host_memory_comes_from_meminfo():
    assert host_facts(MEMINFO, 77) == DeviceFacts(
        kind="host",
        name="host",
        total_bytes=1000 << 10,
        used_bytes=600 << 10,
        free_bytes=400 << 10,
        capacity_bytes=77,
    )


@pytest.mark.parametrize("meminfo", ["", "MemTotal: 5 kB\n", "MemTotal: x kB\nMemAvailable: 5\n"])
def test_invalid_meminfo_is_reported(meminfo):
    host = host_facts(meminfo, None, "first")
    assert (host.used_bytes, host.free_bytes) == (None, None)
    assert host.problem == "first; /proc/meminfo does not say how much there is"


def test_host_facts_of_this_machine(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    (host,) = machine.list_devices(5 << 30).devices
    assert host.capacity_bytes == 5 << 30
    assert host.total_bytes == os.sysconf("SC_PHYS_PAGES") * page_bytes
    assert 0 < host.free_bytes < host.total_bytes
    assert host.problem == ""


def test_process_names_need_the_host_pid_namespace(tmp_path, monkeypatch):
    (tmp_path / "self/ns").mkdir(parents=True)
    (tmp_path / "self/ns/pid").touch()
    (tmp_path / "41").mkdir()
    (tmp_path / "41/comm").write_bytes(b"vllm \xff\n")
    assert machine.process_name(41, tmp_path) is None  # in a container: 41 is somebody else
    inode = (tmp_path / "self/ns/pid").stat().st_ino
    monkeypatch.setattr(machine, "_FIRST_PID_NAMESPACE", inode)
    assert machine.process_name(41, tmp_path) == "vllm \ufffd"
    assert machine.process_name(42, tmp_path) is None


def test_spellings_of_one_device_share_a_key():
    digits = "ABCDEF00-1111-2222-3333-444444444444"
    assert device_key(f"GPU-{digits}") == device_key(f"MIG-{digits.lower()}") == digits.lower()
    assert DeviceFacts("mig", None, uuid=f"MIG-{digits}").key == device_key(f"GPU-{digits}")
    assert DeviceFacts("host", "host").key == device_key("host")
    assert DeviceFacts("gpu", None).key != device_key("host")
