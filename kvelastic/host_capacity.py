"""How much of this machine's memory there is, and how much of it is for KV caches by default."""

from __future__ import annotations

import os
from pathlib import Path


def default_host_capacity_bytes(machine_bytes: int) -> int:
    """What of the machine's memory is for KV caches where nobody has said.

    Four fifths. The rest is for everything else: an engine's Python and libraries take 0.5 to 1.5
    GiB, weights lie beside the cache, and the kernel needs page cache to read them. How much that
    is nobody knows beforehand, so this is for planning only: what instances may take of each other.
    A page that the machine or a cgroup has no room for is refused when it is created.
    """
    return machine_bytes * 4 // 5


def machine_memory_bytes(root: Path = Path("/")) -> int:
    """Physical memory in bytes, or the tightest cgroup memory limit that this process is under.

    `root` is where `proc` and `sys` are found. What cannot be read sets no limit.
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
        # A limit anywhere above counts too. In a container the path may be the host's and not be
        # there; its top still is.
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
