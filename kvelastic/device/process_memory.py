"""Memory of a process, as counted by the kernel."""

from __future__ import annotations

from pathlib import Path


def anonymous_bytes(pid: int) -> int:
    """Return the process's anonymous resident memory: weights and buffers, without KV cache.

    Excludes file-backed and shared memory. Reads one file of /proc; 0 if it cannot be read.
    """
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    for line in status.splitlines():
        name, _, value = line.partition(":")
        if name == "RssAnon":
            return int(value.split()[0]) * 1024
    return 0
