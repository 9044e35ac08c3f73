"""The four servers: two models in the shared budget, and the same two with half of it each.

with Servers(model_folder, workload, work_folder) as servers:
    servers.start()
    servers["shared", "a"].port

All four run from the beginning to the end, so that the two ways can take turns burst by burst; who
is not asked has nothing to do. Leaving the block ends all of them, whatever has happened.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import psutil
import shared_files
from vllm_server import VllmServer

from benchmarks.two_models.workload import BLOCK_TOKENS, MODELS, Workload
from kvelastic import ledger, segment

HALVES, SHARED = WAYS = ("halves", "shared")
MOST_REQUESTS_AT_ONCE = 32
MOST_TOKENS = 512
LOG_LINES = 30


class Servers:
    def __init__(
        self, model: Path, workload: Workload, folder: Path, ways: Sequence[str] = WAYS
    ) -> None:
        self._ways = ways
        self._model = model
        self._workload = workload
        self._folder = folder
        self._running: dict[tuple[str, str], VllmServer] = {}
        self._files: set[Path] = set()

    def __getitem__(self, key: tuple[str, str]) -> VllmServer:
        return self._running[key]

    @staticmethod
    def name(way: str, model: str) -> str:
        """Of the instance, as kvctl shows it."""
        return f"two_models_{os.getpid()}_{way}_{model}"

    @staticmethod
    def group(way: str, model: str) -> str:
        """Of the ledger: one for both, or one for each."""
        return f"two-models-{os.getpid()}" + ("" if way == SHARED else f"-{model}")

    def __enter__(self) -> Servers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # a second one must not leave the half of it
        self._remember_files()
        for server in self._running.values():
            server.kill()
        instances = [self.name(way, model) for way in WAYS for model in MODELS]
        shared_files.remove(self._files | {shared_files.SHM / name for name in instances})
        ledger.reap()

    def start(self) -> float:
        """All at once; answers after how many seconds the last one was ready."""
        begin_s = time.monotonic()
        for way in self._ways:
            for model in MODELS:
                self._running[way, model] = self._launch(way, model)
        for server in self._running.values():
            server.wait_until_ready()
        self._remember_files()
        return time.monotonic() - begin_s

    def _launch(self, way: str, model: str) -> VllmServer:
        size = self._workload.budget_bytes if way == SHARED else self._workload.half_bytes
        environment = {
            "ENABLE_KVELASTIC": "true",
            "KVELASTIC_IPC_NAME": self.name(way, model),
            "KVELASTIC_LEDGER": self.group(way, model),
            "KVELASTIC_HOST_MEMORY": str(size),
            "VLLM_SERVER_DEV_MODE": "1",  # /sleep and /wake_up
            "VLLM_RPC_BASE_PATH": str(self._folder),  # its sockets go with the folder
        }
        if way == HALVES:
            environment["KVELASTIC_LIMIT"] = str(size)
        arguments = [
            "--max-model-len", str(MOST_TOKENS), "--max-num-seqs", str(MOST_REQUESTS_AT_ONCE),
            "--block-size", str(BLOCK_TOKENS), "--kv-cache-memory-bytes", str(size),
        ]  # fmt: skip
        return VllmServer(self._model, self._folder / f"{way}_{model}.log", environment, arguments)

    def stop(self) -> list[str]:
        """End all as an operator does; answers what is left in shared memory."""
        self._remember_files()
        for server in self._running.values():
            server.processes()  # remembers them, to see later that they are gone
            server.process.send_signal(signal.SIGTERM)
        for server in self._running.values():
            server.wait_until_gone()
        mine = f"two_models_{os.getpid()}_"
        left = set(shared_files.left(self._files))
        left |= {
            shared_files.SHM / info.name
            for info in segment.list_segments()
            if info.name.startswith(mine)
        }
        # Whoever made a ledger has it mapped under the name that it had before it was whole.
        groups = {self.group(way, model) for way in WAYS for model in MODELS}
        left |= {path for group in groups if (path := ledger.ledger_path(group, "host")).exists()}
        return sorted(map(str, left))

    def log_ends(self) -> str:
        """The last lines of every log, for whoever has to find out why it failed."""
        parts = []
        for way, model in self._running:
            log = self._folder / f"{way}_{model}.log"
            lines = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
            parts.append("\n".join([f"--- {way}, model {model}:", *lines]))
        return "\n".join(parts)

    def _remember_files(self) -> None:
        for server in self._running.values():
            with contextlib.suppress(psutil.Error):  # it may have ended
                api = psutil.Process(server.process.pid)
                pids = [api.pid, *(child.pid for child in api.children(recursive=True))]
                self._files |= shared_files.in_use_by(pids)
