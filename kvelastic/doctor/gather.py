"""Gathers facts: reads /proc and /sys, creates one page and temporary files, queries the GPUs.

Leaves nothing behind and never raises; the facts include read errors.
"""

from __future__ import annotations

import os
import platform
import resource
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryFile
from typing import TYPE_CHECKING, Final

from kvelastic.doctor.children import ask_engine, ask_gpus, ask_startup
from kvelastic.doctor.facts import (
    Facts,
    LimitFacts,
    MemoryFacts,
    PackageFacts,
    ProbeFact,
    ShmFacts,
    StartupFacts,
    SystemFacts,
)
from kvelastic.doctor.gather_config import gather_config, gather_tier_folders
from kvelastic.engines import ENGINES
from kvelastic.errors import KvelasticError
from kvelastic.units import KIB_BYTES, MIB_BYTES

if TYPE_CHECKING:
    from kvelastic.instance.status import InstanceStatus
    from kvelastic.shared.ledger_facts import LedgerInfo
    from kvelastic.shared.segment_listing import SegmentInfo

# Inode of the initial pid namespace (the kernel's PROC_PID_INIT_INO).
_FIRST_PID_NAMESPACE: Final = 0xEFFFFFFC
_OUR_PREFIX: Final = "kvelastic_"
_LEDGER_PREFIX: Final = ".kvelastic_ledger_"


def gather(
    root: Path = Path("/"), environ: Mapping[str, str] = os.environ, *, probe: bool = False
) -> Facts:
    """Gather the facts for the checks; takes a fraction of a second without a GPU.

    `root` is the folder that contains `proc`, `sys` and `dev`. With `probe`, loads kvelastic into
    every installed engine, which takes as long as importing the engines.
    """
    packages = gather_packages()
    has_native = not packages.native_error  # else python.native reports it
    config = gather_config(environ)
    is_loaded_at_start = any(e.loaded_by and packages.version(e.name) for e in ENGINES)
    return Facts(
        gpus=ask_gpus(root, environ),
        shm=gather_shm(root),
        segments=gather_segments(root / "dev/shm") if has_native else (),
        ledgers=gather_ledgers() if has_native else (),
        instances=gather_instances() if has_native else (),
        memory=gather_memory(root),
        limits=gather_limits(root),
        system=gather_system(root),
        config=config,
        tier_folders=gather_tier_folders(config.tiers),
        packages=packages,
        startup=ask_startup(environ) if is_loaded_at_start else StartupFacts(),
        probes=gather_probes(packages, environ) if probe else None,
    )


def gather_probes(packages: PackageFacts, environ: Mapping[str, str]) -> tuple[ProbeFact, ...]:
    """Probe every installed engine, one after the other."""
    installed = ((engine, packages.version(engine.name)) for engine in ENGINES if engine.tried)
    return tuple(ask_engine(engine, version, environ) for engine, version in installed if version)


def gather_shm(root: Path) -> ShmFacts:
    """Return the state of /dev/shm: file system, whether files can be created, and free space."""
    path = root / "dev/shm"
    size_bytes = free_bytes = 0
    try:
        state = os.statvfs(path)
        size_bytes, free_bytes = state.f_blocks * state.f_frsize, state.f_bavail * state.f_frsize
        # The file has no name if the file system supports that; else it has one for a moment.
        with TemporaryFile(dir=path):
            error = ""
    except OSError as failure:
        error = failure.strerror or str(failure)
    return ShmFacts(
        filesystem=_mount(root, "/dev/shm")[0],
        write_error=error,
        size_bytes=size_bytes,
        free_bytes=free_bytes,
        needed_bytes=_segment_bytes(),
        has_liveness_locks=not error and _has_liveness_locks(path),
        pids_with_another=_pids_with_another_shm(root),
    )


def _has_liveness_locks(shm: Path) -> bool:
    """Return whether liveness locks work: hold one and query it."""
    try:
        from kvelastic import _vmm
    except ImportError:
        return True  # python.native reports a missing native module
    with NamedTemporaryFile(prefix=".kvelastic_doctor_", dir=shm) as file:
        try:
            held = _vmm.LivenessLock.hold(file.name, file.fileno(), 0)
            return held is not None and _vmm.liveness_of(file.fileno(), 0) == "alive"
        except KvelasticError:
            return False


def _pids_with_another_shm(root: Path) -> tuple[int, ...]:
    """Return the visible processes that have mapped a ledger of another /dev/shm.

    Containers with separate /dev/shm have separate ledgers for one device.
    """
    try:
        device = (root / "dev/shm").stat().st_dev
        names = [entry.name for entry in (root / "proc").iterdir()]
    except OSError:
        return ()
    ours = f"{os.major(device):02x}:{os.minor(device):02x}"

    def has_another(pid: int) -> bool:
        # address perms offset device inode path
        lines = (line.split(maxsplit=5) for line in _text(root / f"proc/{pid}/maps").splitlines())
        return any(
            len(fields) == 6
            and fields[5].rpartition("/")[2].startswith(_LEDGER_PREFIX)
            and fields[3] != ours
            for fields in lines
        )

    pids = sorted(int(name) for name in names if name.isdecimal())
    return tuple(pid for pid in pids if has_another(pid))


def gather_segments(shm: Path) -> tuple[SegmentInfo, ...]:
    """Return segments that are dead, orphaned or not readable. Removes none."""
    from kvelastic.shared.engine_cores import has_lost_its_server
    from kvelastic.shared.segment_listing import SegmentInfo, list_segments

    found = []
    for info in list_segments():
        if info.status in {"dead", "unreadable", "unknown"}:
            found.append(info)
        elif info.status == "alive" and has_lost_its_server(info.header["pid"]):
            found.append(replace(info, status="orphaned"))
    hidden = [SegmentInfo(name, "hidden", is_ours=False) for name in _closed_to_us(shm)]
    return (*found, *hidden)


def gather_instances() -> tuple[InstanceStatus, ...]:
    """Return the running instances. Changes nothing."""
    from kvelastic.instance.reading import look_at_all

    return tuple(status for status in look_at_all() if status.is_alive)


def gather_ledgers() -> tuple[LedgerInfo, ...]:
    """Return ledgers of other users, of other versions, or damaged ones. Changes nothing."""
    from kvelastic.shared.ledger import list_ledgers

    return tuple(info for info in list_ledgers() if info.status != "readable")


def gather_memory(root: Path) -> MemoryFacts:
    """Return host memory and huge page settings; creates and frees one 2 MiB page."""
    from kvelastic.device.host_memory import machine_memory_bytes

    error, is_huge = "", True
    try:
        from kvelastic import _vmm

        driver = _vmm.HostDriver()
        handle = driver.create(2 * MIB_BYTES)
        is_huge = driver.stats()["small_pages"] == 0
        driver.destroy(handle, 2 * MIB_BYTES)
    except Exception as failure:
        error = str(failure)
    thp = root / "sys/kernel/mm/transparent_hugepage"
    return MemoryFacts(
        machine_bytes=machine_memory_bytes(root),
        page_error=error,
        page_is_huge=is_huge,
        thp_enabled=_chosen(thp / "enabled"),
        thp_shmem=_chosen(thp / "shmem_enabled"),
    )


def gather_limits(
    root: Path, getrlimit: Callable[[int], tuple[int, int]] = resource.getrlimit
) -> LimitFacts:
    """Return the limits of the kernel and of this process (soft limits, which apply)."""

    def soft(which: int) -> int | None:
        value = getrlimit(which)[0]
        return None if value == resource.RLIM_INFINITY else value

    meminfo = _meminfo_bytes(root)
    return LimitFacts(
        max_map_count=_number(root / "proc/sys/vm/max_map_count"),
        open_files=soft(resource.RLIMIT_NOFILE),
        address_space_bytes=soft(resource.RLIMIT_AS),
        overcommit_mode=_number(root / "proc/sys/vm/overcommit_memory"),
        commit_limit_bytes=meminfo.get("CommitLimit"),
        committed_bytes=meminfo.get("Committed_AS"),
    )


def gather_system(root: Path) -> SystemFacts:
    """Return the kernel, the mount of /proc, and whether this is a container's pid namespace."""
    options = _mount(root, "/proc")[1].split(",")
    hidepid = [option.partition("=")[2] for option in options if option.startswith("hidepid=")]
    try:
        # A link to a name, not to a file: "pid:[4026531836]".
        namespace = (root / "proc/self/ns/pid").readlink().name
        is_own = namespace != f"pid:[{_FIRST_PID_NAMESPACE}]"
    except OSError:
        namespace, is_own = "", False
    return SystemFacts(
        system=platform.system(),
        kernel=platform.release(),
        hidepid=hidepid[-1] if hidepid else "0",
        has_pid_namespace=bool(namespace),
        is_own_pid_namespace=is_own,
    )


def _segment_bytes() -> int:
    try:
        from kvelastic import _vmm
    except ImportError:
        return 0
    return _vmm.SEGMENT_BYTES


def _closed_to_us(shm: Path) -> list[str]:
    """Return unreadable files of other users with a segment's default name prefix.

    Segments with other names cannot be recognized.
    """
    try:
        with os.scandir(shm) as entries:
            return sorted(
                entry.name
                for entry in entries
                if entry.name.startswith(_OUR_PREFIX)
                and entry.is_file(follow_symlinks=False)
                and entry.stat(follow_symlinks=False).st_uid != os.geteuid()
                and not os.access(entry.path, os.R_OK)
            )
    except OSError:
        return []


def _mount(root: Path, where: str) -> tuple[str, str]:
    """Return file system and options of a mount point; the last mount hides earlier ones."""
    found = ("", "")
    for line in _text(root / "proc/self/mounts").splitlines():
        fields = line.split()
        if len(fields) >= 4 and fields[1] == where:
            found = (fields[2], fields[3])
    return found


def _meminfo_bytes(root: Path) -> dict[str, int]:
    sizes = {}
    for line in _text(root / "proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        fields = rest.split()
        if len(fields) == 2 and fields[0].isdecimal():
            sizes[name] = int(fields[0]) * KIB_BYTES
    return sizes


def _chosen(path: Path) -> str | None:
    """Return the selected word, e.g. `madvise` of `always [madvise] never`."""
    return next((w[1:-1] for w in _text(path).split() if w[0] == "[" and w[-1] == "]"), None)


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdecimal() else None


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


# Distribution, and the name of its module.
_WANTED: Final = {
    **{engine.name: engine.name for engine in ENGINES},
    "torch": "torch",
    "kvcached": "kvcached",
    "nvidia-ml-py": "pynvml",
}


def gather_packages() -> PackageFacts:
    """Return package versions from metadata, and the plugins that engines find here."""
    try:
        from kvelastic import _vmm  # noqa: F401  (whether it can be imported is the question)

        native_error = ""
    except ImportError as error:
        native_error = str(error)
    hooked = [engine for engine in ENGINES if engine.tried]
    versions = {name: _version(name, module) for name, module in _WANTED.items()}
    return PackageFacts(
        python=(sys.version_info.major, sys.version_info.minor, sys.version_info.micro),
        native_error=native_error,
        versions=tuple(versions.items()),
        plugins=tuple(
            (engine.name, _plugins(engine.plugin_group)) for engine in hooked if engine.plugin_group
        ),
        # This reads the integration's table, which imports the native module, but neither the
        # engine nor torch.
        hooks=()
        if native_error
        else tuple((engine.name, engine.hooks(versions[engine.name] or "")) for engine in hooked),
    )


def _plugins(group: str) -> tuple[str, ...]:
    return tuple(sorted({point.name for point in metadata.entry_points(group=group)}))


def _version(distribution: str, module: str) -> str | None:
    try:
        # version() returns None for a broken installation (metadata folder without its file).
        return metadata.version(distribution) or "unknown"
    except metadata.PackageNotFoundError:
        return "unknown" if _is_importable(module) else None


def _is_importable(module: str) -> bool:
    """Return whether such a top-level module exists; a folder without code does not count."""
    try:
        spec = find_spec(module)
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.origin is not None
