"""What a process holds of the machine's memory, as the kernel counts it."""

from __future__ import annotations

from pathlib import Path


def anonymous_bytes(pid: int) -> int:
    """Resident memory that is neither a file's nor shared: weights and buffers, no KV cache.

    Reads one file of /proc; 0 where that cannot be read.
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
