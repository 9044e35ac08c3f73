"""What memory this machine has: the host's and every GPU's, found without a CUDA context.

found = list_devices()                      # raises nothing: what fails is said in words
for device in found.devices:
    print(device.name, device.free_bytes, device.problem)
print(found.gpu_problem)                    # why no GPU could be asked; empty if all went well

One broken GPU does not hide the others: what it cannot tell is None, and its `problem` says why.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal, TypeVar

from kvelastic import config, nvml
from kvelastic.errors import ConfigError, NvmlError
from kvelastic.nvml import Nvml, Status
from kvelastic.sizes import KIB_BYTES

HOST: Final = "host"

# The inode that the kernel gives to the first pid namespace, the one whose pids NVML speaks of.
_FIRST_PID_NAMESPACE: Final = 0xEFFFFFFC

_Answer = TypeVar("_Answer")


@dataclass(frozen=True)
class ProcessMemory:
    """A process, and what it holds of a GPU."""

    pid: int
    """As the host counts: in a container it may be no pid of this process's own namespace."""
    used_bytes: int | None
    """None where NVML does not know."""
    name: str | None
    """The kernel's short name of it; None where it is not for this user or container to see."""


@dataclass(frozen=True)
class DeviceFacts:
    """One device: the host, a GPU, or a MIG instance of a GPU. What is not known is None."""

    kind: Literal["host", "gpu", "mig"]
    name: str | None
    """`host`, or what the product is called."""
    index: int | None = None
    """Of a GPU in NVML's order, which need not be CUDA's; of a MIG instance within its GPU."""
    uuid: str | None = None
    """`GPU-...` or `MIG-...`; None for the host."""
    parent: str | None = None
    """UUID of the GPU that a MIG instance is a part of."""
    parent_index: int | None = None
    """Its index."""
    total_bytes: int | None = None
    used_bytes: int | None = None
    """Total less free: what programs and the driver hold."""
    free_bytes: int | None = None
    """Of the host: what programs can have without swapping, caches that can go included."""
    capacity_bytes: int | None = None
    """Of the host: what a first instance would let all hold together (`KVELASTIC_HOST_MEMORY`)."""
    driver_version: str | None = None
    """The NVIDIA driver's; None for the host."""
    processes: tuple[ProcessMemory, ...] | None = None
    """Those with most memory first. None: not known, or, where MIG is on, told by instance."""
    problem: str = ""
    """What is wrong with the device or could not be asked, and what to do; else empty."""

    @property
    def key(self) -> str:
        """What it has in common with the device that an instance names; see `device_key`."""
        return HOST if self.kind == "host" else device_key(self.uuid or "")


@dataclass(frozen=True)
class Devices:
    """Everything that was found."""

    devices: tuple[DeviceFacts, ...]
    """The host, then the GPUs in NVML's order, each followed by its MIG instances."""
    gpu_problem: str = ""
    """Why no GPU could be asked, and what to do about it; else empty."""


def device_key(name: str) -> str:
    """What is the same in two names of one device: `host`, or the bare digits of its UUID.

    CUDA has one kind of UUID for GPUs and MIG instances, NVML writes `GPU-` and `MIG-` before it.
    """
    for prefix in ("GPU-", "MIG-"):
        name = name.removeprefix(prefix)
    return name.lower()


def list_devices(settings: config.Config | None = None) -> Devices:
    """Look at the machine now; `settings` are those of the environment unless given.

    Raises nothing: what could not be found out is said in the devices' `problem` and in
    `gpu_problem`. It takes a few milliseconds, more where the driver has to wake a GPU.
    """
    host = _host(settings)
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
    """Ask NVML for every GPU, and say why it could not be asked; `name_of` names a pid.

    NVML is opened for it and closed after it. Raises nothing that NVML answers.
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
        # What was found stands, whatever NVML says of its end.
        with contextlib.suppress(NvmlError):
            library.stop()


def host_facts(meminfo: str, capacity_bytes: int | None, problem: str = "") -> DeviceFacts:
    """The machine's own memory by the text of `/proc/meminfo`."""
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
    """The kernel's short name of a process as NVML numbers it; None if it is not to be seen.

    In a container a number that NVML says may belong to somebody else, and then nothing is said.
    """
    try:
        if (proc / "self/ns/pid").stat().st_ino != _FIRST_PID_NAMESPACE:
            return None
        return (proc / str(pid) / "comm").read_text(errors="replace").strip() or None
    except OSError:
        return None


# ---------------------------------------------------------------------------------- one at a time


def _host(settings: config.Config | None) -> DeviceFacts:
    capacity_bytes, problem = None, ""
    try:
        capacity_bytes = (config.load() if settings is None else settings).host_memory_bytes
    except (ConfigError, OSError) as error:
        problem = str(error)
    try:
        meminfo = Path("/proc/meminfo").read_text()
    except OSError:
        meminfo = ""
    return host_facts(meminfo, capacity_bytes, problem)


class _Questions:
    """Asks one device, and gathers what it does not answer."""

    def __init__(self, library: Nvml, index: int, name_of: Callable[[int], str | None]) -> None:
        self.library = library
        self.index = index
        self.name_of = name_of
        self._unanswered: dict[str, list[str]] = {}

    @property
    def problem(self) -> str:
        """One text: a GPU that is lost fails every question in the same words."""
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
        """The answer, or None; `silent` are the refusals that do not count as a problem."""
        try:
            return question(*arguments)
        except NvmlError as error:
            if error.status not in silent:
                self.note(subject, str(error))
            return None

    def note(self, subject: str, words: str) -> None:
        """Add to the problem."""
        self._unanswered.setdefault(words, []).append(subject)

    def facts(
        self, device: object, kind: Literal["gpu", "mig"], driver_version: str | None
    ) -> DeviceFacts:
        """What a GPU and a MIG instance have in common: all but processes and the problem."""
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
        """Total and free bytes."""
        try:
            return self.library.memory(device)
        except NvmlError as error:
            words = str(error)
            if error.status == Status.NOT_SUPPORTED:
                words += "; an integrated GPU shares the host's memory"
            self.note("memory", words)
            return None, None

    def processes(self, device: object) -> tuple[ProcessMemory, ...] | None:
        """Those of every kind, each once."""
        held: dict[int, int | None] = {}
        is_known = True
        for kind in nvml.PROCESS_KINDS:
            # A GPU need not know graphics or MPS: those tell more, and their lack is no problem.
            silent = () if kind == "compute" else (Status.NOT_SUPPORTED, Status.FUNCTION_NOT_FOUND)
            answer = self.ask("processes", self.library.processes, device, kind, silent=silent)
            if kind == "compute":
                is_known = answer is not None
            for pid, used_bytes in answer or ():
                # A process of two kinds is told twice, each time with all of its memory.
                known = (held.get(pid), _known_bytes(used_bytes))
                held[pid] = max((each for each in known if each is not None), default=None)
        if not is_known and not held:
            return None
        most_first = sorted(held.items(), key=lambda item: (-(item[1] or 0), item[0]))
        return tuple(ProcessMemory(pid, used, self.name_of(pid)) for pid, used in most_first)


def _gpu(
    library: Nvml, index: int, driver_version: str | None, name_of: Callable[[int], str | None]
) -> list[DeviceFacts]:
    """The GPU, and then its MIG instances."""
    try:
        device = library.device(index)
    except NvmlError as error:
        unseen = DeviceFacts("gpu", None, index, driver_version=driver_version, problem=str(error))
        return [unseen]
    asks = _Questions(library, index, name_of)
    facts = asks.facts(device, "gpu", driver_version)
    # A GPU or a driver from before MIG is not split.
    not_split = (Status.NOT_SUPPORTED, Status.FUNCTION_NOT_FOUND)
    if not asks.ask("MIG", library.is_mig_on, device, silent=not_split):
        processes = asks.processes(device)
        return [replace(facts, processes=processes, problem=asks.problem)]
    # Its instances tell of their processes; the GPU would tell the same again, or need root for it.
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
        # Slots are empty here and there; drivers have two words for that.
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
