"""Facts about a machine as plain values. `gather` collects them, `judge` evaluates them.

Sizes are in bytes. An empty string means that there is nothing to report; None means that the value
could not be read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvelastic.device import tested_gpus
from kvelastic.device.host_memory import default_host_capacity_bytes

if TYPE_CHECKING:
    from kvelastic.instance.status import InstanceStatus
    from kvelastic.shared.ledger_facts import LedgerInfo
    from kvelastic.shared.segment_listing import SegmentInfo
    from kvelastic.tier_list import TierSpec


@dataclass(frozen=True)
class Gpu:
    """One GPU, as seen by kvelastic's driver."""

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
    """The NVIDIA driver and the GPUs, as seen by a child process."""

    kernel_module: str = ""
    """Version of the driver's kernel module; empty if it is not loaded."""
    has_device_files: bool = False
    library_error: str = ""
    """Why libcuda.so.1 cannot be opened."""
    nvml_error: str = ""
    """Why libnvidia-ml.so.1 cannot be opened."""
    cuda_version: int | None = None
    """Result of cuDriverGetVersion: 13000 is CUDA 13.0."""
    start_error: str = ""
    """Why cuInit or cuDeviceGetCount failed."""
    count: int = 0
    gpus: tuple[Gpu, ...] = ()
    child_end: str = ""
    """How the child failed to finish: it died, it hung, or it could not be started."""
    visible_devices: str | None = None
    """Value of CUDA_VISIBLE_DEVICES."""


@dataclass(frozen=True)
class ShmFacts:
    """The state of /dev/shm."""

    filesystem: str = "tmpfs"
    """Type of the mounted file system; empty if none is mounted."""
    write_error: str = ""
    """Why a file cannot be created there."""
    size_bytes: int = 0
    free_bytes: int = 0
    needed_bytes: int = 0
    """Size of an instance's segment."""
    has_liveness_locks: bool = True
    """Whether liveness locks work there."""
    pids_with_another: tuple[int, ...] = ()
    """Processes that have joined a ledger in a different /dev/shm."""


@dataclass(frozen=True)
class MemoryFacts:
    """Host memory, and the pages that kvelastic can allocate from it."""

    machine_bytes: int = 0
    """Physical memory, or the tightest cgroup limit."""
    page_error: str = ""
    """Why kvelastic's host driver could not create a page."""
    page_is_huge: bool = True
    """Whether that page was one huge page."""
    thp_enabled: str | None = None
    """The choice in transparent_hugepage/enabled."""
    thp_shmem: str | None = None
    """The choice in transparent_hugepage/shmem_enabled."""


@dataclass(frozen=True)
class LimitFacts:
    """Limits of the kernel. None: no limit, or not readable."""

    max_map_count: int | None = None
    open_files: int | None = None
    address_space_bytes: int | None = None
    overcommit_mode: int | None = None
    commit_limit_bytes: int | None = None
    committed_bytes: int | None = None


@dataclass(frozen=True)
class SystemFacts:
    """The kernel, and what this process can see."""

    system: str = "Linux"
    kernel: str = ""
    """Output of `uname -r`."""
    hidepid: str = "0"
    """Mount option of /proc: 0 (or off) shows all processes."""
    has_pid_namespace: bool = True
    """Whether /proc shows the pid namespace of this process."""
    is_own_pid_namespace: bool = False
    """Whether it differs from the initial namespace: a container."""


@dataclass(frozen=True)
class LegacyName:
    """A kvcached variable that is set."""

    name: str
    successor: str | None
    """Its name in kvelastic; None if there is no equivalent."""
    is_overruled: bool = False
    """Whether the successor is also set, and takes precedence."""


@dataclass(frozen=True)
class ConfigFacts:
    """kvelastic's variables in this environment; invalid values count as unset."""

    errors: tuple[tuple[str, str], ...] = ()
    """Variable, and the error of `kvelastic.config` about its value."""
    unknown: tuple[tuple[str, str], ...] = ()
    """An unknown name, and the most similar known one."""
    legacy: tuple[LegacyName, ...] = ()
    names_set: tuple[str, ...] = ()
    """Known names that are set and valid."""
    enabled: bool | None = None
    """ENABLE_KVELASTIC; None if it is not set."""
    strict: bool | None = None
    """KVELASTIC_STRICT; None if it is not set."""
    device: str = "auto"
    host_memory_bytes: int | None = None
    page_bytes: int = 2 << 20
    allowed_plugins: tuple[tuple[str, str], ...] = ()
    """By engine: value of the engine's variable that lists the allowed plugins, if set."""
    is_kvcached_enabled: bool = False
    """ENABLE_KVCACHED or KVCACHED_AUTOPATCH is true."""
    tiers: tuple[TierSpec, ...] = ()
    """The tiers of KVELASTIC_TIERS."""


@dataclass(frozen=True)
class TierFolderFact:
    """A folder that a tier of KVELASTIC_TIERS cannot use."""

    tier: str
    """The tier's kind: disk or folder."""
    problem: str


@dataclass(frozen=True)
class PackageFacts:
    """Packages installed beside kvelastic. A version is None if the package is missing."""

    python: tuple[int, int, int] = (3, 10, 0)
    native_error: str = ""
    """Why kvelastic's native module cannot be imported."""
    versions: tuple[tuple[str, str | None], ...] = ()
    """Distribution and version; `unknown` if it can be imported but has no metadata."""
    plugins: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """By engine with plugins: names of the entry points that it finds."""
    hooks: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """By such engine: functions that kvelastic wraps in the installed version; empty if
    unsupported."""

    def version(self, name: str) -> str | None:
        """Return a distribution's version; None if it is not installed."""
        return dict(self.versions).get(name)


@dataclass(frozen=True)
class StartupFacts:
    """Startup of a new Python with ENABLE_KVELASTIC=true; empty if none was started."""

    armed: tuple[str, ...] = ()
    """Modules whose import will load kvelastic into the process."""
    failure: str = ""
    """The error that kvelastic or the child reported."""
    start_files: tuple[str, ...] = ()
    """The kvelastic.pth and kvelastic.start that this Python reads."""
    site_folders: tuple[str, ...] = ()
    """Folders in which it looks for them."""


@dataclass(frozen=True)
class ProbeFact:
    """Result of loading kvelastic into one engine."""

    engine: str
    hooked: int = 0
    """Number of wrapped functions."""
    broken: tuple[str, ...] = ()
    """Errors of probes: the engine's code is not as kvelastic expects."""
    missed: tuple[str, ...] = ()
    """Modules of the engine that cannot be imported here, and why."""
    failure: str = ""
    """How the child ended, if it printed no result."""


@dataclass(frozen=True)
class Facts:
    """All facts about a machine."""

    gpus: GpuFacts = GpuFacts()
    shm: ShmFacts = ShmFacts()
    segments: tuple[SegmentInfo, ...] = ()
    """Segments that are dead, unreadable or unknown; also `hidden` (another user's, not readable by
    this one) and `orphaned` (of an engine core without a server)."""
    ledgers: tuple[LedgerInfo, ...] = ()
    """Ledgers that cannot be used."""
    instances: tuple[InstanceStatus, ...] = ()
    """Running instances."""
    memory: MemoryFacts = MemoryFacts()
    limits: LimitFacts = LimitFacts()
    system: SystemFacts = SystemFacts()
    config: ConfigFacts = ConfigFacts()
    tier_folders: tuple[TierFolderFact, ...] = ()
    packages: PackageFacts = PackageFacts()
    startup: StartupFacts = StartupFacts()
    probes: tuple[ProbeFact, ...] | None = None
    """None: not requested."""
    gpus_that_ran: tuple[tested_gpus.Row, ...] = tested_gpus.ROWS

    @property
    def is_host_device(self) -> bool:
        """Whether an instance started here would use host memory."""
        if self.config.device == "auto":
            return all(gpu.error for gpu in self.gpus.gpus)
        return self.config.device == "host"

    @property
    def host_capacity_bytes(self) -> int:
        """Capacity of the host device."""
        set_bytes = self.config.host_memory_bytes
        if set_bytes is not None:
            return set_bytes
        return default_host_capacity_bytes(self.memory.machine_bytes)
