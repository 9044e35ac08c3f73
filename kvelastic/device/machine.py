"""Memory of this machine: the host's and each GPU's, queried without a CUDA context.

    found = list_devices(capacity_bytes)        # never raises; problems are reported as text
    for device in found.devices:
        print(device.name, device.free_bytes, device.problem)
    print(found.gpu_problem)                    # why no GPU could be queried; empty if none failed

A broken GPU does not hide the others. Its unknown values are None and its `problem` gives the
reason.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal, TypeVar

from kvelastic.device import nvml
from kvelastic.device.nvml import Nvml, Status
from kvelastic.errors import NvmlError
from kvelastic.units import KIB_BYTES

HOST: Final = "host"

# The inode of the initial pid namespace, in which NVML numbers processes.
_FIRST_PID_NAMESPACE: Final = 0xEFFFFFFC

_Answer = TypeVar("_Answer")


@dataclass(frozen=True)
class ProcessMemory:
    """A process and the GPU memory that it uses."""

    pid: int
    """Pid in the host's namespace; in a container it may differ from the local pid."""
    used_bytes: int | None
    """None if NVML does not know."""
    name: str | None
    """The kernel's short name of the process; None if this user or container may not see it."""


@dataclass(frozen=True)
class DeviceFacts:
    """One device: the host, a GPU, or a MIG instance of a GPU. Unknown values are None."""

    kind: Literal["host", "gpu", "mig"]
    name: str | None
    """`host`, or the product name."""
    index: int | None = None
    """GPU: index in NVML's order, which may differ from CUDA's. MIG instance: index within its GPU.
"""
    uuid: str | None = None
    """`GPU-...` or `MIG-...`; None for the host."""
    parent: str | None = None
    """UUID of the GPU that contains this MIG instance."""
    parent_index: int | None = None
    """Index of that GPU."""
    total_bytes: int | None = None
    used_bytes: int | None = None
    """Total minus free: memory used by programs and the driver."""
    free_bytes: int | None = None
    """Host: memory available without swapping, including reclaimable caches."""
    capacity_bytes: int | None = None
    """Host: capacity that a first instance would set for all instances (`KVELASTIC_HOST_MEMORY`).
"""
    driver_version: str | None = None
    """Version of the NVIDIA driver; None for the host."""
    processes: tuple[ProcessMemory, ...] | None = None
    """Sorted by memory, largest first. None if unknown, or if MIG is on: see the MIG instances."""
    problem: str = ""
    """Faults of the device, failed queries, and what to do; empty if there is no problem."""

    @property
    def key(self) -> str:
        """Normalized name, to compare with the device that an instance names; see `device_key`."""
        return HOST if self.kind == "host" else device_key(self.uuid or "")


@dataclass(frozen=True)
class Devices:
    """The result of `list_devices`."""

    devices: tuple[DeviceFacts, ...]
    """The host, then the GPUs in NVML's order, each followed by its MIG instances."""
    gpu_problem: str = ""
    """Why no GPU could be queried, and what to do; empty if there is no problem."""


def device_key(name: str) -> str:
    """Normalize a device name: `host`, or the UUID in lower case without its prefix.

    CUDA uses one form of UUID for GPUs and MIG instances; NVML adds the prefix `GPU-` or `MIG-`.
    """
    for prefix in ("GPU-", "MIG-"):
        name = name.removeprefix(prefix)
    return name.lower()


def list_devices(host_capacity_bytes: int | None, host_problem: str = "") -> Devices:
    """Query the machine's devices. The arguments are the host's `capacity_bytes` and `problem`.

    Never raises: the devices' `problem` and `gpu_problem` describe failures. Takes a few
    milliseconds, or longer if the driver has to wake a GPU.
    """
    host = _host(host_capacity_bytes, host_problem)
    library = nvml.find()
    if library is None:
        return Devices(
            (host,),
            "no package is installed that reaches NVML, so GPUs are not looked at; if this machine"
            f" has one, run: {nvml.INSTALL}",
        )
    gpus, problem = list_gpus(library, process_name)
    return Devices((host, *gpus), problem)


def list_gpus(
    library: Nvml, name_of: Callable[[int], str | None]
) -> tuple[tuple[DeviceFacts, ...], str]:
    """Query every GPU from NVML; return the GPUs and why they could not be queried, or "".

    `name_of` returns the name of a pid. Starts NVML first and stops it afterwards. Never raises
    `NvmlError`.
    """
    try:
        library.start()
    except NvmlError as error:
        return (), str(error)
    try:
        version = _driver_version(library)
        found: list[DeviceFacts] = []
        for index in range(library.count()):
            found += _gpu(library, index, version, name_of)
        return tuple(found), ""
    except NvmlError as error:
        return (), f"GPUs cannot be counted: {error}"
    finally:
        # The result is valid even if NVML fails to stop.
        with contextlib.suppress(NvmlError):
            library.stop()


def host_facts(meminfo: str, capacity_bytes: int | None, problem: str = "") -> DeviceFacts:
    """Return the host's memory, parsed from the text of `/proc/meminfo`."""
    sizes: dict[str, int] = {}
    for line in meminfo.splitlines():
        field, _, value = line.partition(":")
        number, _, unit = value.strip().partition(" ")
        if number.isdecimal() and unit == "kB":
            sizes[field] = int(number) * KIB_BYTES
    total_bytes, free_bytes = sizes.get("MemTotal"), sizes.get("MemAvailable")
    if total_bytes is None or free_bytes is None:
        problem = "; ".join(filter(None, (problem, "/proc/meminfo does not say how much there is")))
    return DeviceFacts(
        kind="host",
        name=HOST,
        total_bytes=total_bytes,
        used_bytes=_used_bytes(total_bytes, free_bytes),
        free_bytes=free_bytes,
        capacity_bytes=capacity_bytes,
        problem=problem,
    )


def process_name(pid: int, proc: Path = Path("/proc")) -> str | None:
    """Return the kernel's short name of a process by its NVML pid; None if it cannot be seen.

    In a container, an NVML pid may match an unrelated local process, so the result is None there.
    """
    try:
        if (proc / "self/ns/pid").stat().st_ino != _FIRST_PID_NAMESPACE:
            return None
        return (proc / str(pid) / "comm").read_text(errors="replace").strip() or None
    except OSError:
        return None


# -------------------------------------------------------------------------- queries of one device


def _host(capacity_bytes: int | None, problem: str) -> DeviceFacts:
    try:
        meminfo = Path("/proc/meminfo").read_text()
    except OSError:
        meminfo = ""
    return host_facts(meminfo, capacity_bytes, problem)


class _Questions:
    """Queries one device and collects the queries that fail."""

    def __init__(self, library: Nvml, index: int, name_of: Callable[[int], str | None]) -> None:
        self.library = library
        self.index = index
        self.name_of = name_of
        self._unanswered: dict[str, list[str]] = {}

    @property
    def problem(self) -> str:
        """All problems as one text. Queries that failed with the same error are grouped."""
        return "; ".join(
            f"{', '.join(dict.fromkeys(subjects))}: {words}"
            for words, subjects in self._unanswered.items()
        )

    def ask(
        self,
        subject: str,
        question: Callable[..., _Answer],
        *arguments: object,
        silent: tuple[Status, ...] = (),
    ) -> _Answer | None:
        """Return the result of `question`, or None if NVML refuses.

        The refusal is noted as a problem unless its status is in `silent`.
        """
        try:
            return question(*arguments)
        except NvmlError as error:
            if error.status not in silent:
                self.note(subject, str(error))
            return None

    def note(self, subject: str, words: str) -> None:
        """Add a problem of `subject`."""
        self._unanswered.setdefault(words, []).append(subject)

    def facts(
        self, device: object, kind: Literal["gpu", "mig"], driver_version: str | None
    ) -> DeviceFacts:
        """Return the values that GPUs and MIG instances share: all but processes and `problem`."""
        name = self.ask("name", self.library.name, device)
        uuid = self.ask("UUID", self.library.uuid, device)
        total_bytes, free_bytes = self.memory(device)
        return DeviceFacts(
            kind=kind,
            name=name,
            index=self.index,
            uuid=uuid,
            total_bytes=total_bytes,
            used_bytes=_used_bytes(total_bytes, free_bytes),
            free_bytes=free_bytes,
            driver_version=driver_version,
        )

    def memory(self, device: object) -> tuple[int | None, int | None]:
        """Return total and free bytes; None if NVML does not know."""
        try:
            return self.library.memory(device)
        except NvmlError as error:
            words = str(error)
            if error.status == Status.NOT_SUPPORTED:
                words += "; an integrated GPU shares the host's memory"
            self.note("memory", words)
            return None, None

    def processes(self, device: object) -> tuple[ProcessMemory, ...] | None:
        """Return the processes of every kind without duplicates, largest first; None if unknown."""
        held: dict[int, int | None] = {}
        is_known = True
        for kind in nvml.PROCESS_KINDS:
            # Not every GPU supports graphics or MPS processes; a missing list is no problem.
            silent = () if kind == "compute" else (Status.NOT_SUPPORTED, Status.FUNCTION_NOT_FOUND)
            answer = self.ask("processes", self.library.processes, device, kind, silent=silent)
            if kind == "compute":
                is_known = answer is not None
            for pid, used_bytes in answer or ():
                # NVML lists a process of two kinds twice, each time with its total memory.
                known = (held.get(pid), _known_bytes(used_bytes))
                held[pid] = max((each for each in known if each is not None), default=None)
        if not is_known and not held:
            return None
        most_first = sorted(held.items(), key=lambda item: (-(item[1] or 0), item[0]))
        return tuple(ProcessMemory(pid, used, self.name_of(pid)) for pid, used in most_first)


def _gpu(
    library: Nvml, index: int, driver_version: str | None, name_of: Callable[[int], str | None]
) -> list[DeviceFacts]:
    """Return the GPU, followed by its MIG instances."""
    try:
        device = library.device(index)
    except NvmlError as error:
        unseen = DeviceFacts("gpu", None, index, driver_version=driver_version, problem=str(error))
        return [unseen]
    asks = _Questions(library, index, name_of)
    facts = asks.facts(device, "gpu", driver_version)
    # A GPU or driver without MIG support returns either status.
    not_split = (Status.NOT_SUPPORTED, Status.FUNCTION_NOT_FOUND)
    if not asks.ask("MIG", library.is_mig_on, device, silent=not_split):
        processes = asks.processes(device)
        return [replace(facts, processes=processes, problem=asks.problem)]
    # The MIG instances list their processes. The GPU would list them again, or require root.
    instances = _mig_instances(asks, device, facts)
    if not instances:
        asks.note(
            "MIG",
            "it is on without an instance, so no program can use the GPU; run"
            " `nvidia-smi mig -cgi <profile> -C` to make one, or `nvidia-smi -mig 0`",
        )
    return [replace(facts, problem=asks.problem), *instances]


def _mig_instances(asks: _Questions, device: object, gpu: DeviceFacts) -> list[DeviceFacts]:
    library, found = asks.library, []
    for slot in range(asks.ask("MIG", library.mig_slots, device) or 0):
        # Slots may be empty. Drivers report that with one of two statuses.
        empty = (Status.NOT_FOUND, Status.INVALID_ARGUMENT)
        instance = asks.ask(f"MIG instance {slot}", library.mig_device, device, slot, silent=empty)
        if instance is None:
            continue
        of_it = _Questions(library, slot, asks.name_of)
        facts = of_it.facts(instance, "mig", gpu.driver_version)
        processes = of_it.processes(instance)
        found.append(
            replace(
                facts,
                parent=gpu.uuid,
                parent_index=gpu.index,
                processes=processes,
                problem=of_it.problem,
            )
        )
    return found


def _driver_version(library: Nvml) -> str | None:
    try:
        return library.driver_version()
    except NvmlError:
        return None


def _known_bytes(used_bytes: int | None) -> int | None:
    return None if used_bytes == nvml.NOT_AVAILABLE_BYTES else used_bytes


def _used_bytes(total_bytes: int | None, free_bytes: int | None) -> int | None:
    if total_bytes is None or free_bytes is None:
        return None
    return max(total_bytes - free_bytes, 0)
