"""Size of this machine's memory, and the default share for KV caches."""

from __future__ import annotations

import os
from pathlib import Path


def default_host_capacity_bytes(machine_bytes: int) -> int:
    """Return the default share of host memory for KV caches: four fifths.

    The rest is for other uses: an engine's Python and libraries take 0.5 to 1.5 GiB, weights are
    outside the cache, and the kernel needs page cache to read them. These sizes are not known in
    advance, so the capacity only bounds what instances grant each other. If the machine or a cgroup
    has no room for a page, creating the page fails.
    """
    return machine_bytes * 4 // 5


def machine_memory_bytes(root: Path = Path("/")) -> int:
    """Return physical memory in bytes, or the tightest cgroup memory limit of this process.

    `root` is the folder that contains `proc` and `sys`. Unreadable files set no limit.
    """
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for line in _read(root / "proc/self/cgroup").splitlines():
        # "0::/a/b" is cgroup v2; "5:cpu,memory:/a/b" is v1.
        controllers, _, path = line.partition(":")[2].partition(":")
        if not controllers:
            top, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            top, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        # Limits of parent groups apply too. In a container, the path may be the host's and not
        # exist; the top folder still does.
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts) + 1):
            text = _read(top.joinpath(*parts[:depth]) / name).strip()
            if text.isdecimal():
                limits.append(int(text))
    return min(limits)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
