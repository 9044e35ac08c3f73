"""Findings about host memory as a device, and the kernel limits that affect it.

Most limits affect host memory only. If the device is a GPU, they are reported as notes.
"""

from __future__ import annotations

import re
from typing import Final

from kvelastic.doctor.facts import Facts
from kvelastic.doctor.finding import Outcome, State, check, note, ok, problem, warning
from kvelastic.units import format_size

_POPULATE_KERNEL: Final = (5, 14)
_COLLAPSE_KERNEL: Final = (6, 1)
# Mappings of an engine with torch besides the KV cache: libraries, heaps, threads.
_ENGINE_MAPPINGS: Final = 8192
_ENGINE_FILES: Final = 1024
_LEAST_FILES: Final = 64


def _if_host(facts: Facts, state: State) -> State:
    return state if facts.is_host_device else "note"


@check("host.kernel")
def _kernel(facts: Facts) -> Outcome:
    system = facts.system
    seen = f"{system.system} {system.kernel}"
    if system.system != "Linux":
        return problem(f"{seen} is not supported", "run kvelastic on Linux")
    version = _kernel_version(system.kernel)
    if version is None:
        return note(
            f"{seen}: the kernel version cannot be parsed", "see host.page, which tests one page"
        )
    if version < _POPULATE_KERNEL:
        # Some distributions backport features to older kernels, so the tested behaviour counts.
        works = not facts.memory.page_error
        return Outcome(
            ("note" if works else _if_host(facts, "problem")),
            (
                f"{seen} is older than 5.14, the first kernel with MADV_POPULATE_WRITE"
                + (", but host memory can be mapped" if works else "")
            ),
            "upgrade the kernel to 6.1 or later; not needed if the device is a GPU",
        )
    if version < _COLLAPSE_KERNEL:
        return Outcome(
            _if_host(facts, "warning"),
            f"{seen} is older than 6.1, the first kernel with MADV_COLLAPSE",
            "upgrade the kernel to 6.1 or later; until then host memory consists of 4 KiB pages,"
            " which take several times longer to allocate",
        )
    return ok(seen)


@check("host.page")
def _page(facts: Facts) -> Outcome:
    memory = facts.memory
    if facts.packages.native_error:
        return note("not tested: the native module cannot be imported", "see python.native")
    if memory.page_error:
        return Outcome(
            _if_host(facts, "problem"),
            f"a page of host memory cannot be allocated: {memory.page_error}",
            "check host.kernel, limits.memory and limits.addresses; in a sandbox (gVisor), allow"
            " madvise and memfd_create",
        )
    if not memory.page_is_huge:
        return Outcome(
            _if_host(facts, "warning"),
            "the kernel uses 4 KiB pages for a 2 MiB page: slower to allocate, map and read",
            "use a kernel of 6.1 or later with transparent huge pages; set shmem_enabled to any"
            " value except deny; free memory if it is fragmented (/proc/buddyinfo)",
        )
    return ok("the kernel uses one huge page for a 2 MiB page")


@check("host.hugepages")
def _settings(facts: Facts) -> Outcome:
    memory = facts.memory
    seen = (
        f"transparent_hugepage: enabled={memory.thp_enabled or 'missing'},"
        f" shmem_enabled={memory.thp_shmem or 'missing'}"
    )
    if memory.thp_enabled is None or memory.thp_shmem is None:
        return Outcome(
            _if_host(facts, "warning"),
            seen,
            "use a kernel with CONFIG_TRANSPARENT_HUGEPAGE; see host.page for the page size in use",
        )
    if memory.thp_shmem == "deny":
        return Outcome(
            _if_host(facts, "warning"),
            seen,
            "run as root: echo never >/sys/kernel/mm/transparent_hugepage/shmem_enabled (never is"
            " enough: kvelastic requests each huge page)",
        )
    return ok(seen)


@check("limits.memory")
def _memory(facts: Facts) -> Outcome:
    set_bytes, machine_bytes = facts.config.host_memory_bytes, facts.memory.machine_bytes
    machine = f"this process can use {format_size(machine_bytes)} (machine or cgroup limit)"
    if set_bytes is None:
        return ok(machine)
    seen = f"KVELASTIC_HOST_MEMORY is {format_size(set_bytes)}; {machine}"
    if set_bytes > machine_bytes:
        return Outcome(
            _if_host(facts, "problem"),
            seen,
            f"set KVELASTIC_HOST_MEMORY below {format_size(machine_bytes)}, or raise the cgroup's"
            " memory.max (docker run --memory); otherwise the kernel kills the engine when the"
            " cache fills",
        )
    return ok(seen)


@check("limits.mappings")
def _mappings(facts: Facts) -> Outcome:
    allowed = facts.limits.max_map_count
    if allowed is None:
        return note("vm.max_map_count cannot be read", "read it outside the sandbox")
    if not facts.is_host_device:
        return ok(f"vm.max_map_count={allowed}; GPU pages do not count towards it")
    pages = -(-facts.host_capacity_bytes // facts.config.page_bytes)
    # In the worst case every other page is mapped. Each gap between mappings is a mapping too.
    needed = 2 * pages + _ENGINE_MAPPINGS
    seen = (
        f"vm.max_map_count={allowed}; {format_size(facts.host_capacity_bytes)} in pages of"
        f" {format_size(facts.config.page_bytes)} need up to {needed}"
    )
    if needed > allowed:
        return warning(
            seen,
            f"run as root: sysctl vm.max_map_count={needed}; or lower KVELASTIC_HOST_MEMORY or"
            " raise KVELASTIC_PAGE_SIZE_MB",
        )
    return ok(seen)


@check("limits.files")
def _files(facts: Facts) -> Outcome:
    allowed = facts.limits.open_files
    if allowed is None or allowed >= _ENGINE_FILES:
        return ok(f"limit of open files: {'unlimited' if allowed is None else allowed}")
    return Outcome(
        ("problem" if allowed < _LEAST_FILES else "warning"),
        f"limit of open files: {allowed}; engines need {_ENGINE_FILES} or more",
        f"run ulimit -n {_ENGINE_FILES} before the engine starts (LimitNOFILE in a systemd unit,"
        " --ulimit nofile in Docker)",
    )


@check("limits.addresses")
def _addresses(facts: Facts) -> Outcome:
    allowed = facts.limits.address_space_bytes
    if allowed is None:
        return ok("limit of address space: unlimited")
    do = "run ulimit -v unlimited before the engine starts; reserved addresses use no memory"
    # The GPU driver reserves address space of many times its memory at startup.
    too_low = not facts.is_host_device or allowed < facts.host_capacity_bytes
    return Outcome(
        ("problem" if too_low else "warning"),
        f"limit of address space: {format_size(allowed)} (RLIMIT_AS); it should be unlimited",
        do,
    )


@check("limits.overcommit")
def _overcommit(facts: Facts) -> Outcome:
    limits = facts.limits
    if limits.overcommit_mode is None:
        return note("vm.overcommit_memory cannot be read", "read it outside the sandbox")
    seen = f"vm.overcommit_memory={limits.overcommit_mode}"
    if limits.overcommit_mode != 2:
        return ok(seen)
    do = (
        "run as root: sysctl vm.overcommit_memory=0, or raise vm.overcommit_ratio; otherwise"
        " allocations fail although memory is free"
    )
    if limits.commit_limit_bytes is None or limits.committed_bytes is None:
        return warning(seen, do)
    left_bytes = max(limits.commit_limit_bytes - limits.committed_bytes, 0)
    seen += f": the kernel can commit {format_size(left_bytes)} more"
    is_short = facts.is_host_device and left_bytes < facts.host_capacity_bytes
    return Outcome(("warning" if is_short else "note"), seen, do)


def _kernel_version(release: str) -> tuple[int, int] | None:
    found = re.match(r"(\d+)\.(\d+)", release)
    return (int(found[1]), int(found[2])) if found else None


CHECKS: Final = (
    *(_kernel, _page, _settings),
    *(_memory, _mappings, _files, _addresses, _overcommit),
)
