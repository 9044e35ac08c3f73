"""The end of an engine, and the removal of what it leaves when it is killed.

vLLM's processes share memory (`psm_*`, `sem.mp-*`) that they remove in the ordinary way only. It is
looked up while they live: who is dead says nothing.

    left = LeftBehind(); left.note(process.pid)   # whenever it may have made more of it
    kill_group(process)                           # notes, kills, waits and removes
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess

import psutil
from run_end import SHM, note_files_of, semaphores_of
from waiting import DEADLINE_S


class LeftBehind:
    """Files of shared memory that the processes of an engine use."""

    def __init__(self) -> None:
        self._names: set[str] = set()

    def note(self, pid: int) -> list[psutil.Process]:
        """Look at a process and at all under it; answers those."""
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            family = [process, *process.children(recursive=True)]
            # A segment and a ledger are kvelastic's own to remove, which is what is tested.
            self._names |= {name for name in note_files_of(family) if "kvelastic_" not in name}
            self._names |= semaphores_of(family)
            return family
        return []

    def remove(self) -> None:
        """Pre: the processes have ended."""
        from kvelastic.shared import ledger, segment

        for name in self._names:
            (SHM / name).unlink(missing_ok=True)
        self._names.clear()
        segment.reap()
        ledger.reap()


def kill_group(engine: subprocess.Popen[bytes]) -> None:
    """SIGKILL to the process group that `engine` leads, if any of it is left; nothing stays."""
    left = LeftBehind()
    family = left.note(engine.pid)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(engine.pid, signal.SIGKILL)
    engine.wait(DEADLINE_S)
    psutil.wait_procs(family, timeout=DEADLINE_S)
    left.remove()
