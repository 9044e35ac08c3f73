"""One machine, several processes: who holds what, and what becomes of it."""

from __future__ import annotations

import array
import ctypes
import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from processes import PROGRAMS, run_python
from simdriver import HERE, MIB, PAGE, POSIX_FD, Driver, library, run, start

OUT_OF_MEMORY = "CUDA_ERROR_OUT_OF_MEMORY"


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment of a machine of 16 pages that the test's processes share."""
    name = f"kvsim-test-{os.getpid()}-{tmp_path.name}"
    path = Path("/dev/shm") / name
    yield {"KVSIM_MACHINE": str(path), "KVSIM_MEMORY": "32M"}
    path.unlink(missing_ok=True)


def hold(pages: int) -> Callable[[socket.socket], int]:
    """A body that maps `pages` pages, says so, and waits to be told to go on."""

    def body(channel: socket.socket) -> int:
        gpu = Driver().start()
        gpu.mapped(pages)
        channel.send(b"held")
        channel.recv(1)
        return gpu.free_bytes()

    return body


def free_bytes() -> int:
    return Driver().start().free_bytes()


def test_processes_compete_for_the_same_bytes(machine: dict[str, str]) -> None:
    holder = start(hold(10), **machine)
    assert holder.channel.recv(16) == b"held"

    def body() -> list[object]:
        gpu = Driver().start()
        seen = gpu.free_bytes()
        handles = [gpu.create() for _ in range(6)]
        try:
            gpu.create()
        except Exception as error:
            answer = str(error)
        return [
            seen,
            len(handles),
            gpu.free_bytes(),
            answer,
            gpu.lib.kvsim_process_bytes(0, holder.pid),
            gpu.lib.kvsim_process_bytes(0, os.getpid()),
        ]

    assert run(body, **machine) == [
        6 * PAGE,
        6,
        0,
        f"cuMemCreate: {OUT_OF_MEMORY}",
        10 * PAGE,
        6 * PAGE,
    ]
    holder.channel.send(b".")
    assert holder.result() == 6 * PAGE  # the other has ended, and its bytes came back


def test_killed_process_releases_everything(machine: dict[str, str]) -> None:
    holder = start(hold(16), **machine)
    assert holder.channel.recv(16) == b"held"

    def body(channel: socket.socket) -> str:
        gpu = Driver().start()
        channel.send(str(gpu.free_bytes()).encode())
        channel.recv(1)
        address, _ = gpu.mapped(16)  # without asking how much there is: create() looks by itself
        return ctypes.string_at(address, 2).hex()

    heir = start(body, **machine)
    assert heir.channel.recv(16) == b"0"
    holder.kill()
    heir.channel.send(b".")
    assert heir.result() == "0000"


def test_zombie_holds_no_memory(machine: dict[str, str]) -> None:
    holder = start(hold(16), **machine)
    assert holder.channel.recv(16) == b"held"
    os.kill(holder.pid, signal.SIGKILL)
    os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)  # dead, and not waited for
    assert run(free_bytes, **machine) == 32 * MIB
    holder.killed_by()


def test_exec_releases_the_memory(machine: dict[str, str]) -> None:
    script = (
        "import os, sys; sys.path.insert(0, sys.argv[1]); from simdriver import *\n"
        "gpu = Driver(Path(sys.argv[2])).start()\n"
        "print(gpu.free_bytes(), flush=True)\n"
        "gpu.mapped(4)\n"
        "if len(sys.argv) == 3: os.execv(sys.executable, [sys.executable, '-c', os.environ['S'],"
        " *sys.argv[1:], 'again'])\n"
    )
    environment = machine | {"S": script, "PYTHONPATH": str(PROGRAMS)}
    done = run_python("-c", script, HERE, library(), environment=environment)
    assert done.stdout.split() == [str(32 * MIB), str(32 * MIB)]


@pytest.mark.slow
@pytest.mark.parametrize("victims", [12])
def test_death_inside_the_lock_keeps_the_machine_consistent(
    machine: dict[str, str], victims: int
) -> None:
    def churn(channel: socket.socket) -> None:
        gpu = Driver().start()
        channel.send(b"on")
        while True:
            gpu.call("cuMemRelease", gpu.create(4 * PAGE))

    watcher_done = 0
    for _ in range(victims):
        victim = start(churn, **machine)
        victim.channel.recv(16)
        # No sleep: the victim is somewhere in its loop, most of which is inside the lock.
        run(free_bytes, **machine)
        victim.kill()
        watcher_done += run(free_bytes, **machine) == 32 * MIB
    assert watcher_done == victims

    def body() -> str:
        gpu = Driver().start()
        address, _ = gpu.mapped(16)
        return ctypes.string_at(address + 16 * PAGE - 1, 1).hex()

    assert run(body, **machine) == "00"


@pytest.mark.slow
def test_concurrent_processes_create_one_machine(machine: dict[str, str]) -> None:
    children = [start(hold(2), **machine) for _ in range(8)]
    for child in children:
        assert child.channel.recv(16) == b"held"
    assert run(free_bytes, **machine) == 0
    for child in children:
        child.channel.send(b".")
    for child in children:
        child.result()
    assert run(free_bytes, **machine) == 32 * MIB


def test_existing_machine_determines_the_configuration(machine: dict[str, str]) -> None:
    run(free_bytes, **machine)
    later = machine | {"KVSIM_MEMORY": "4G", "KVSIM_GRANULARITY": "4M", "KVSIM_DEVICES": "4"}

    def body() -> list[int]:
        gpu = Driver().start()
        return [gpu.memory_info()[1], gpu.get("cuDeviceGetCount", kind=ctypes.c_int)]

    assert run(body, **later) == [32 * MIB, 1]


def test_foreign_file_is_left_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_bytes(b"precious data")

    def body() -> str:
        return Driver().ask("cuInit", 0)

    assert run(body, KVSIM_MACHINE=str(path)) == "CUDA_ERROR_SYSTEM_NOT_READY"
    assert path.read_bytes() == b"precious data"


def test_devices_have_separate_memory(machine: dict[str, str]) -> None:
    def body() -> list[object]:
        gpu = Driver().start(1)
        gpu.create(8 * PAGE, device=1)
        on_1 = gpu.free_bytes()
        gpu.call("cuCtxSetCurrent", gpu.get("cuDevicePrimaryCtxRetain", 0))
        return [on_1, gpu.free_bytes(), gpu.uuid(0) != gpu.uuid(1)]

    assert run(body, **machine, KVSIM_DEVICES="2") == [16 * MIB, 32 * MIB, True]


def test_visible_devices_are_renumbered(machine: dict[str, str]) -> None:
    def uuids() -> list[str]:
        gpu = Driver()
        gpu.call("cuInit", 0)
        count = gpu.get("cuDeviceGetCount", kind=ctypes.c_int)
        return [gpu.uuid(device) for device in range(count)]

    environment = machine | {"KVSIM_DEVICES": "3"}
    first, second, third = run(uuids, **environment)
    assert run(uuids, **environment, CUDA_VISIBLE_DEVICES="2,0") == [third, first]
    assert run(uuids, **environment, CUDA_VISIBLE_DEVICES="1,7,0") == [second]

    def init() -> str:
        return Driver().ask("cuInit", 0)

    assert run(init, **environment, CUDA_VISIBLE_DEVICES="") == "CUDA_ERROR_NO_DEVICE"
    assert run(init, **environment, CUDA_VISIBLE_DEVICES="1,1") == "CUDA_ERROR_NO_DEVICE"


def test_visible_devices_use_the_machines_memory(machine: dict[str, str]) -> None:
    environment = machine | {"KVSIM_DEVICES": "2"}

    def holder(channel: socket.socket) -> None:
        Driver().start().create(4 * PAGE)
        channel.send(b"held")
        channel.recv(1)

    child = start(holder, **environment, CUDA_VISIBLE_DEVICES="1")
    child.channel.recv(16)

    def both() -> list[int]:
        gpu = Driver()
        return [gpu.start(0).free_bytes(), gpu.start(1).free_bytes()]

    assert run(both, **environment) == [32 * MIB, 24 * MIB]
    child.channel.send(b".")
    child.result()


# --- descriptors between processes


def send_descriptor(channel: socket.socket, descriptor: int) -> None:
    socket.send_fds(channel, [b"fd"], [descriptor])


def receive_descriptor(channel: socket.socket) -> int:
    _, descriptors, _, _ = socket.recv_fds(channel, 16, 1)
    return int(descriptors[0])


def export(gpu: Driver, handle: int) -> int:
    return int(gpu.get("cuMemExportToShareableHandle", handle, POSIX_FD, 0, kind=ctypes.c_int))


def importing(channel: socket.socket) -> str:
    """Imports, maps, answers with the first byte, and writes the second."""
    gpu = Driver().start()
    descriptor = receive_descriptor(channel)
    handle = gpu.get("cuMemImportFromShareableHandle", descriptor, POSIX_FD)
    os.close(descriptor)
    address = gpu.reserve(2 * PAGE)
    gpu.map(address, handle, 2 * PAGE)
    gpu.set_access(address, 2 * PAGE)
    ctypes.memset(address + 1, 0x22, 1)
    channel.send(ctypes.string_at(address + PAGE, 1))
    channel.recv(1)
    free = gpu.free_bytes()
    gpu.call("cuMemUnmap", address, 2 * PAGE)
    gpu.call("cuMemRelease", handle)
    return json.dumps([free, gpu.free_bytes()])


def test_exported_page_is_shared_with_the_importer(machine: dict[str, str]) -> None:
    importer = start(importing, **machine)

    def exporting(channel: socket.socket) -> str:
        gpu = Driver().start()
        handle = gpu.create(2 * PAGE, exportable=True)
        address = gpu.reserve(2 * PAGE)
        gpu.map(address, handle, 2 * PAGE)
        gpu.set_access(address, 2 * PAGE)
        ctypes.memset(address + PAGE, 0x11, 1)
        descriptor = export(gpu, handle)
        send_descriptor(channel, descriptor)
        os.close(descriptor)
        channel.recv(1)
        assert gpu.free_bytes() == 28 * MIB  # counted once, held twice
        return ctypes.string_at(address + 1, 1).hex()

    exporter = start(exporting, **machine)
    descriptor = receive_descriptor(exporter.channel)
    send_descriptor(importer.channel, descriptor)
    os.close(descriptor)
    assert importer.channel.recv(1) == b"\x11"
    exporter.channel.send(b".")
    assert exporter.result() == "22"
    importer.channel.send(b".")  # the exporter is gone: the memory is the importer's alone
    assert json.loads(importer.result()) == [28 * MIB, 32 * MIB]


def test_open_descriptor_keeps_the_memory_alive(
    machine: dict[str, str],
) -> None:
    def exporting(channel: socket.socket) -> None:
        gpu = Driver().start()
        send_descriptor(channel, export(gpu, gpu.create(2 * PAGE, exportable=True)))
        channel.recv(1)

    importer = start(importing, **machine)  # first: a fork would inherit the descriptor
    exporter = start(exporting, **machine)
    descriptor = receive_descriptor(exporter.channel)
    exporter.kill()
    assert run(free_bytes, **machine) == 28 * MIB
    send_descriptor(importer.channel, descriptor)
    assert importer.channel.recv(1) == b"\0"
    os.close(descriptor)
    importer.channel.send(b".")
    assert json.loads(importer.result()) == [28 * MIB, 32 * MIB]


def test_closed_descriptor_holds_nothing(machine: dict[str, str]) -> None:
    def body() -> list[int]:
        gpu = Driver().start()
        handle = gpu.create(2 * PAGE, exportable=True)
        descriptor = export(gpu, handle)
        gpu.call("cuMemRelease", handle)
        held = gpu.free_bytes()
        os.close(descriptor)
        return [held, gpu.free_bytes()]

    assert run(body, **machine) == [28 * MIB, 32 * MIB]


def test_import_in_the_same_process_adds_a_reference(machine: dict[str, str]) -> None:
    def body() -> list[object]:
        gpu = Driver().start()
        handle = gpu.create(exportable=True)
        descriptor = export(gpu, handle)
        again = gpu.get("cuMemImportFromShareableHandle", descriptor, POSIX_FD)
        os.close(descriptor)
        gpu.call("cuMemRelease", handle)
        held = gpu.free_bytes()
        gpu.call("cuMemRelease", again)
        return [held, gpu.free_bytes()]

    assert run(body, **machine) == [30 * MIB, 32 * MIB]


def test_descriptor_of_another_machine_is_rejected(machine: dict[str, str]) -> None:
    def exporting(channel: socket.socket) -> None:
        gpu = Driver().start()
        send_descriptor(channel, export(gpu, gpu.create(exportable=True)))
        channel.recv(1)

    exporter = start(exporting, **machine)
    descriptor = receive_descriptor(exporter.channel)

    def body() -> str:
        gpu = Driver().start()
        place = array.array("Q", [0])
        pointer = ctypes.c_void_p(place.buffer_info()[0])
        return gpu.ask("cuMemImportFromShareableHandle", pointer, descriptor, POSIX_FD)

    assert run(body) == "CUDA_ERROR_INVALID_VALUE"
    os.close(descriptor)
    exporter.channel.send(b".")
    exporter.result()


def test_forked_child_is_not_initialized() -> None:
    def body() -> str:
        gpu = Driver().start()
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            answers = [gpu.ask("cuInit", 0), gpu.ask("cuMemRelease", 1)]
            os.write(writing, " ".join(answers).encode())
            os._exit(0)
        os.waitpid(child, 0)
        gpu.create()  # the parent is as it was
        return os.read(reading, 200).decode()

    assert run(body) == "CUDA_ERROR_NOT_INITIALIZED CUDA_ERROR_NOT_INITIALIZED"


def test_context_uses_the_configured_memory(machine: dict[str, str]) -> None:
    def body() -> list[int]:
        gpu = Driver()
        gpu.call("cuInit", 0)
        before = gpu.lib.kvsim_used_bytes(0)
        with_context = gpu.start().free_bytes()
        gpu.call("cuDevicePrimaryCtxRelease_v2", 0)
        return [before, with_context, gpu.lib.kvsim_used_bytes(0)]

    assert run(body, **machine, KVSIM_CONTEXT_BYTES="5M") == [0, 26 * MIB, 0]


def test_context_grows_with_streams_and_first_kernel(machine: dict[str, str]) -> None:
    def body() -> list[int]:
        gpu = Driver().start()
        used = [gpu.lib.kvsim_used_bytes(0)]
        address, _ = gpu.mapped()
        for _ in range(2):
            gpu.call("cuMemsetD8_v2", address, 1, 1)
            used.append(gpu.lib.kvsim_used_bytes(0))
        made = gpu.get("cuStreamCreate", 0)
        used.append(gpu.lib.kvsim_used_bytes(0))
        gpu.call("cuStreamDestroy_v2", made)
        gpu.call("cuDevicePrimaryCtxReset_v2", 0)
        return [*used, gpu.lib.kvsim_used_bytes(0)]

    used = run(body, **machine, KVSIM_CONTEXT_GROWTH="3M")
    assert used == [0, PAGE + 4 * MIB, PAGE + 4 * MIB, PAGE + 8 * MIB, PAGE]


def test_context_growth_fails_on_a_full_device(machine: dict[str, str]) -> None:
    def body() -> list[str]:
        gpu = Driver().start()
        address, handles = gpu.mapped(16)
        made = ctypes.byref(ctypes.c_uint64())
        asked = [gpu.ask("cuStreamCreate", made, 0), gpu.ask("cuMemsetD8_v2", address, 1, 1)]
        gpu.call("cuMemUnmap", address, PAGE)
        gpu.call("cuMemRelease", handles[0])
        return [*asked, gpu.ask("cuMemsetD8_v2", address + PAGE, 1, 1)]

    asked = run(body, **machine, KVSIM_CONTEXT_GROWTH="2M")
    assert asked == [OUT_OF_MEMORY, OUT_OF_MEMORY, "CUDA_SUCCESS"]


def test_memory_of_a_dead_process_may_linger(machine: dict[str, str], tmp_path: Path) -> None:
    linger = tmp_path / "linger"
    linger.touch()
    machine |= {"KVSIM_LINGER": str(linger)}
    holder = start(hold(16), **machine)
    assert holder.channel.recv(16) == b"held"
    holder.kill()
    assert run(free_bytes, **machine) == 0
    linger.unlink()
    assert run(free_bytes, **machine) == 16 * PAGE


def test_memory_may_be_released_before_process_end(machine: dict[str, str]) -> None:
    def body(channel: socket.socket) -> None:
        gpu = Driver().start()
        gpu.mapped(16)
        gpu.lib.kvsim_drop_memory()
        channel.send(b"dropped")
        channel.recv(1)

    dying = start(body, **machine)
    assert dying.channel.recv(16) == b"dropped"
    assert run(free_bytes, **machine) == 16 * PAGE
    dying.kill()
    assert run(free_bytes, **machine) == 16 * PAGE
