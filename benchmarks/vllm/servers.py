"""The two servers of a comparison; only one of them is asked anything at a time.

    with Servers(model, load, folder, control=False) as servers:
        starts = servers.start(ORDER)
        servers["stock"].port

Leaving the block ends both, whatever has happened, and removes what they left in shared memory.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import psutil
import shared_files
from vllm_server import VllmServer

from benchmarks.vllm.models import Model
from benchmarks.vllm.workload import Load
from kvelastic.shared import ledger, segment

STOCK, ELASTIC = ORDER = ("stock", "kvelastic")
ROLES = ("api", "core", "worker")
_INSTANCE = f"bench_vllm_{os.getpid()}"


@dataclass(frozen=True)
class Start:
    """How long a server took until /health said 200, and the CPU time that went into it."""

    server: str
    total_s: float
    cpu_s: float


def environment(folder: Path, server: str, *, control: bool) -> dict[str, str]:
    """Of one server. As a `control` both are stock vLLM."""
    own_sockets = {"VLLM_RPC_BASE_PATH": str(folder)}  # they go with the folder
    if server == STOCK or control:
        return own_sockets
    return own_sockets | {
        "ENABLE_KVELASTIC": "true",
        "KVELASTIC_IPC_NAME": _INSTANCE,
        "KVELASTIC_LEDGER": f"bench-vllm-{os.getpid()}",
        "KVELASTIC_MAX_CACHED_TOKENS": "-1",  # stock vLLM's prefix cache has no bound either
    }


def mapped_bytes() -> int:
    """Memory behind the elastic cache just now; 0 where there is no such instance."""
    with contextlib.suppress(Exception):
        return int(segment.inspect(_INSTANCE).usage["mapped_bytes"])
    return 0


def keep_apart(processes: dict[str, psutil.Process]) -> None:
    """Leave the worker the cores that vLLM bound it to, and give all else the others.

    All else is the server's other processes and the clients here. Without this the kernel puts now
    one and now the other of them before the model, for seconds where there are two cores, and a
    turn's throughput says which.
    """
    others = _every_core() - set(processes["worker"].cpu_affinity())
    if not others:
        return
    all_else = [processes[role] for role in processes if role != "worker"]
    for process in (psutil.Process(), *all_else):
        for thread in process.threads():
            with contextlib.suppress(ProcessLookupError):  # it may have ended
                os.sched_setaffinity(thread.id, others)


def _every_core() -> set[int]:
    return set(range(psutil.cpu_count()))


class Servers:
    def __init__(self, model: Model, load: Load, folder: Path, *, control: bool) -> None:
        self._model = model
        self._load = load
        self._folder = folder
        self._control = control
        self._running: dict[str, VllmServer] = {}
        self._processes: dict[str, dict[str, psutil.Process]] = {}
        self._files: set[Path] = set()

    def __getitem__(self, name: str) -> VllmServer:
        return self._running[name]

    def __enter__(self) -> Servers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        before = {
            number: signal.signal(number, signal.SIG_IGN)  # a second one must not leave the half
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        }
        if isinstance(error, Exception):
            print(self._log_ends(), flush=True)
        for server in self._running.values():
            self._remember_files(server)
            with contextlib.suppress(Exception):
                server.stop()
            server.kill()
        shared_files.remove(self._files | {shared_files.SHM / _INSTANCE})
        ledger.reap()
        for number, handler in before.items():
            signal.signal(number, handler)

    def start(self, order: Sequence[str]) -> list[Start]:
        """One after the other, each until /health says 200."""
        os.sched_setaffinity(0, _every_core())  # which the servers inherit
        starts = []
        for name in order:
            begin_s = time.perf_counter()
            self._running[name] = VllmServer(
                self._model.folder,
                self._folder / f"{self._load.name}_{name}.log",
                environment(self._folder, name, control=self._control),
                [
                    "--max-num-seqs", str(self._load.at_once),
                    "--kv-cache-memory-bytes", str(self._load.kv_blocks * self._model.block_bytes),
                ],
            )  # fmt: skip
            self._running[name].wait_until_ready()
            total_s = time.perf_counter() - begin_s
            self._processes[name] = self._running[name].processes()
            starts.append(Start(name, total_s, sum(self.cpu_s(name).values())))
            self._remember_files(self._running[name])
        for processes in self._processes.values():
            keep_apart(processes)
        return starts

    def cpu_s(self, name: str) -> dict[str, float]:
        """CPU time that the server's processes have used so far, by role."""
        used = {}
        for role in ROLES:
            times = self._processes[name][role].cpu_times()
            used[role] = times.user + times.system
        return used

    def _remember_files(self, server: VllmServer) -> None:
        with contextlib.suppress(psutil.Error):  # it may have ended
            pids = [process.pid for process in server.processes().values()]
            self._files |= shared_files.in_use_by(pids)

    def _log_ends(self) -> str:
        return "\n".join(
            f"--- {name}:\n{server.tail(3000)}" for name, server in self._running.items()
        )
