"""Engine cores that have lost their server: the scheduler's process of a server that was killed.

An engine core of vLLM ends after its server (`integration/vllm/with_starter.py`). One that is
stopped, or that an earlier version started, stays: it keeps its memory and its name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

_TITLE: Final = b"EngineCore"
"""In the command line of vLLM's, which names its processes."""


def has_lost_its_server(pid: int, proc: Path = Path("/proc")) -> bool:
    """Return whether `pid` is an engine core that has outlived the process that started it.

    Its parent is init or another reaper then, which runs another program than it. False where that
    cannot be seen: a process of another user or namespace, a reaper that is a Python program, too.
    """
    try:
        if _TITLE not in (proc / str(pid) / "cmdline").read_bytes():
            return False
        # The second field is the name and may hold blanks and brackets: count after its last one.
        parent = (proc / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()[1].decode()
        return (proc / parent / "exe").readlink() != (proc / str(pid) / "exe").readlink()
    except (OSError, IndexError):
        return False
