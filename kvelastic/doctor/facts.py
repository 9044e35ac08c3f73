"""What was seen of a machine: plain values, no judgement. `gather` fills them, `judge` reads them.

Sizes are bytes. An empty text means that there is nothing to say, None that it could not be read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvelastic import gpu_table
from kvelastic.host_capacity import default_host_capacity_bytes

if TYPE_CHECKING:
    from kvelastic.instance.status import InstanceStatus
    from kvelastic.ledger_facts import LedgerInfo


@dataclass(frozen=True)
class Gpu:
    """One GPU as kvelastic's own driver found it."""

    ordinal: int
    """The N of `cuda:N`, in the numbering of this process."""
    name: str
    uuid: str = ""
    granularity_bytes: int = 0
    total_bytes: int = 0
    free_bytes: int = 0
    error: str = ""
    """Why kvelastic cannot use it."""


@dataclass(frozen=True)
class GpuFacts:
    """NVIDIA's driver and the GPUs, as a child process saw them."""

    kernel_module: str = ""
    """Version of the kernel's part of the driver; empty if it is not loaded."""
    has_device_files: bool = False
    library_error: str = ""
    """Why libcuda.so.1 cannot be opened."""
    nvml_error: str = ""
    """Why libnvidia-ml.so.1 cannot be opened."""
    cuda_version: int | None = None
    """What cuDriverGetVersion says: 13000 is CUDA 13.0."""
    start_error: str = ""
    """Why cuInit or the count of devices failed."""
    count: int = 0
    gpus: tuple[Gpu, ...] = ()
    child_end: str = ""
    """How the child failed to finish: it died, it hung, or it could not be started."""
    visible_devices: str | None = None
    """CUDA_VISIBLE_DEVICES."""


@dataclass(frozen=True)
class ShmFacts:
    """/dev/shm."""

    filesystem: str = "tmpfs"
    """What is mounted there; empty if nothing is."""
    write_error: str = ""
    """Why a file cannot be made there."""
    size_bytes: int = 0
    free_bytes: int = 0
    needed_bytes: int = 0
    """One instance's segment."""
    has_life_locks: bool = True
    """Whether the locks by which the living are told from the dead work there."""
    pids_with_another: tuple[int, ...] = ()
    """Processes that have joined a ledger in another /dev/shm than this one."""


@dataclass(frozen=True)
class SegmentFact:
    """One segment that is of interest."""

    name: str
    status: str
    """dead, unreadable, unknown; or hidden: another user's, not to be opened by this one; or
    orphaned: of an engine core without a server."""
    is_ours: bool = True
    problem: str = ""
    pid: int = 0
    """Of its process, where it is dead or orphaned."""


@dataclass(frozen=True)
class MemoryFacts:
    """The machine's own memory, and the pages that kvelastic gets of it."""

    machine_bytes: int = 0
    """Physical memory, or the tightest cgroup limit."""
    page_error: str = ""
    """Why kvelastic's host driver could not make one page."""
    page_is_huge: bool = True
    """Whether that page was one huge page."""
    thp_enabled: str | None = None
    """The choice in transparent_hugepage/enabled."""
    thp_shmem: str | None = None
    """The choice in transparent_hugepage/shmem_enabled."""


@dataclass(frozen=True)
class LimitFacts:
    """What the kernel allows a process. None is no limit, or not readable."""

    max_map_count: int | None = None
    open_files: int | None = None
    address_space_bytes: int | None = None
    overcommit_mode: int | None = None
    commit_limit_bytes: int | None = None
    committed_bytes: int | None = None


@dataclass(frozen=True)
class SystemFacts:
    """The kernel, and what this process may see."""

    system: str = "Linux"
    kernel: str = ""
    """As `uname -r` says it."""
    hidepid: str = "0"
    """Option of the mount of /proc: 0 (or off) shows all processes."""
    has_pid_namespace: bool = True
    """Whether /proc says which pid namespace this is."""
    is_own_pid_namespace: bool = False
    """Whether it is another one than the machine's first: a container."""


@dataclass(frozen=True)
class LegacyName:
    """A variable of kvcached that is set."""

    name: str
    successor: str | None
    """kvelastic's name for it; None if there is none."""
    is_overruled: bool = False
    """Whether the successor is set, too, and counts."""


@dataclass(frozen=True)
class ConfigFacts:
    """kvelastic's variables in this environment; what is invalid counts as unset."""

    errors: tuple[tuple[str, str], ...] = ()
    """Variable, and what `kvelastic.config` says of its value."""
    unknown: tuple[tuple[str, str], ...] = ()
    """A name that nobody reads, and the known one nearest to it."""
    legacy: tuple[LegacyName, ...] = ()
    names_set: tuple[str, ...] = ()
    """Known names that are set and valid."""
    enabled: bool | None = None
    """ENABLE_KVELASTIC; None if it is not set."""
    is_strict: bool = True
    device: str = "auto"
    host_memory_bytes: int | None = None
    page_bytes: int = 2 << 20
    allowed_plugins: tuple[tuple[str, str], ...] = ()
    """By engine: the plugins that a variable of its own lets it load, where that is set."""
    is_kvcached_enabled: bool = False
    """ENABLE_KVCACHED or KVCACHED_AUTOPATCH is true."""


@dataclass(frozen=True)
class PackageFacts:
    """What is installed beside kvelastic. A version is None where there is none."""

    python: tuple[int, int, int] = (3, 10, 0)
    native_error: str = ""
    """Why kvelastic's native module cannot be imported."""
    versions: tuple[tuple[str, str | None], ...] = ()
    """Distribution and version; `unknown` for one that can be imported and has no metadata."""
    plugins: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """By engine that loads plugins: the names of the entry points that it will find."""
    hooks: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """By such engine: what kvelastic wraps in the installed version; none in one not served."""

    def version(self, name: str) -> str | None:
        """The version of a distribution that was asked for; None if it is not installed."""
        return dict(self.versions).get(name)


@dataclass(frozen=True)
class StartupFacts:
    """What a new Python does at its start with ENABLE_KVELASTIC=true. Empty if none was asked."""

    armed: tuple[str, ...] = ()
    """Modules whose import will load kvelastic into the process."""
    failure: str = ""
    """What kvelastic, or the child, says went wrong."""
    start_files: tuple[str, ...] = ()
    """The kvelastic.pth and kvelastic.start that this Python reads."""
    site_folders: tuple[str, ...] = ()
    """Where it looks for them."""


@dataclass(frozen=True)
class ProbeFact:
    """What loading kvelastic into one engine came to."""

    engine: str
    hooked: int = 0
    """Functions that were wrapped."""
    broken: tuple[str, ...] = ()
    """Messages of probes: the engine is built differently."""
    missed: tuple[str, ...] = ()
    """Modules of the engine that cannot be imported here, and why."""
    failure: str = ""
    """How the child ended, if it said nothing."""


@dataclass(frozen=True)
class Facts:
    """All of it."""

    gpus: GpuFacts = GpuFacts()
    shm: ShmFacts = ShmFacts()
    segments: tuple[SegmentFact, ...] = ()
    ledgers: tuple[LedgerInfo, ...] = ()
    """Those that cannot be used as they are."""
    instances: tuple[InstanceStatus, ...] = ()
    """Those that run."""
    memory: MemoryFacts = MemoryFacts()
    limits: LimitFacts = LimitFacts()
    system: SystemFacts = SystemFacts()
    config: ConfigFacts = ConfigFacts()
    packages: PackageFacts = PackageFacts()
    startup: StartupFacts = StartupFacts()
    probes: tuple[ProbeFact, ...] | None = None
    """None: nobody asked for them."""
    gpus_that_ran: tuple[gpu_table.Row, ...] = gpu_table.ROWS

    @property
    def is_host_device(self) -> bool:
        """Whether an instance that starts here would use the machine's own memory."""
        if self.config.device == "auto":
            return all(gpu.error for gpu in self.gpus.gpus)
        return self.config.device == "host"

    @property
    def host_capacity_bytes(self) -> int:
        """What counts as the host device's capacity."""
        set_bytes = self.config.host_memory_bytes
        if set_bytes is not None:
            return set_bytes
        return default_host_capacity_bytes(self.memory.machine_bytes)
