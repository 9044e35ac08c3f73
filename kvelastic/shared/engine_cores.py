"""Engine cores without a server: scheduler processes of a server that was killed.

An engine core of vLLM ends after its server (`integration/vllm/end_with_starter.py`). A core that
is stopped, or that an earlier version started, does not end. It keeps its memory and its name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from kvelastic.shared.liveness import stat_fields

_TITLE: Final = b"EngineCore"
"""Part of the command line of vLLM's cores: vLLM sets the titles of its processes."""


def has_lost_its_server(pid: int, proc: Path = Path("/proc")) -> bool:
    """Return whether `pid` is an engine core that has outlived its parent process.

    Its parent is then init or another reaper, which runs another program. Returns False if that is
    not visible: a process of another user or namespace, or a reaper that is a Python program too.
    """
    try:
        if _TITLE not in (proc / str(pid) / "cmdline").read_bytes():
            return False
        parent = stat_fields(pid, proc)[1].decode()
        return (proc / parent / "exe").readlink() != (proc / str(pid) / "exe").readlink()
    except (OSError, IndexError):
        return False
