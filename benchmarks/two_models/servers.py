"""The servers of a run: two models in each of several ways to share the memory.

with Servers(model_folder, work_folder, two_models_in_turn(workload)) as servers:
    servers.start()
    servers["shared", "a"].port

All of them run from the beginning to the end, so that the ways can take turns burst by burst; who
is not asked has nothing to do. Leaving the block ends all of them, whatever has happened.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import psutil
import shared_files
from vllm_server import VllmServer

from benchmarks.harness import half_of_the_cores
from benchmarks.two_models.workload import BLOCK_TOKENS, MODELS, Workload
from kvelastic.shared import ledger, segment

HALVES, SHARED = WAYS = ("halves", "shared")
MOST_REQUESTS_AT_ONCE = 32
MOST_TOKENS = 512
LOG_LINES = 30
MOST_CONVERSATION_TOKENS = 2048
"""Of conversations that go on for several turns."""
_MOST_TOKENS_A_STEP = 256
"""A step of vLLM's default, 2,048 tokens, would take seconds here, and the burst with it."""


@dataclass(frozen=True)
class Launch:
    """How one server is started, beyond what all have in common."""

    arguments: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    instance: str | None = None
    """Its name as kvctl shows it; None: it runs without kvelastic."""
    ledger: str | None = None
    """The group that it shares a budget with."""


def instance_name(way: str, model: str) -> str:
    """As kvctl shows it."""
    return f"two_models_{os.getpid()}_{way}_{model}"


def ledger_name(of: str = "") -> str:
    """Of this run; `of` says whose, where there is more than one."""
    return f"two-models-{os.getpid()}" + (f"-{of}" if of else "")


def two_models_in_turn(
    workload: Workload, ways: Sequence[str] = WAYS
) -> dict[tuple[str, str], Launch]:
    """Two that share one ledger, and the same two with half of the budget each."""
    return {(way, model): _launch(workload, way, model) for way in ways for model in MODELS}


def _launch(workload: Workload, way: str, model: str) -> Launch:
    size = workload.budget_bytes if way == SHARED else workload.half_bytes
    name = instance_name(way, model)
    group = ledger_name() if way == SHARED else ledger_name(model)
    environment = {
        "ENABLE_KVELASTIC": "true",
        "KVELASTIC_IPC_NAME": name,
        "KVELASTIC_LEDGER": group,
        "KVELASTIC_HOST_MEMORY": str(size),
        "VLLM_SERVER_DEV_MODE": "1",  # /sleep and /wake_up
    }
    if way == HALVES:
        environment["KVELASTIC_LIMIT"] = str(size)
    arguments = [
        "--max-model-len", str(MOST_TOKENS), "--max-num-seqs", str(MOST_REQUESTS_AT_ONCE),
        "--block-size", str(BLOCK_TOKENS), "--kv-cache-memory-bytes", str(size),
    ]  # fmt: skip
    return Launch(arguments, environment, name, group)


def stock_launch(model: str, kv_bytes: int, *, prefix_cache: bool) -> Launch:
    """vLLM as it is, for conversations."""
    return Launch(stock_arguments(kv_bytes, prefix_cache=prefix_cache), cores_of(model))


def stock_arguments(kv_bytes: int, *, prefix_cache: bool) -> list[str]:
    """For conversations, in whatever way."""
    return [
        "--max-model-len", str(MOST_CONVERSATION_TOKENS),
        "--max-num-seqs", str(MOST_REQUESTS_AT_ONCE),
        "--max-num-batched-tokens", str(_MOST_TOKENS_A_STEP),
        "--block-size", str(BLOCK_TOKENS), "--kv-cache-memory-bytes", str(kv_bytes),
        "--enable-prefix-caching" if prefix_cache else "--no-enable-prefix-caching",
    ]  # fmt: skip


def cores_of(model: str) -> dict[str, str]:
    """Half of the cores for each model's worker: left alone, vLLM binds both to the same one."""
    return {"VLLM_CPU_OMP_THREADS_BIND": half_of_the_cores(second=model != MODELS[0])}


class Servers:
    def __init__(
        self, model: Path, folder: Path, launches: Mapping[tuple[str, str], Launch]
    ) -> None:
        """`launches` by way and model."""
        self._model = model
        self._folder = folder
        self._launches = launches
        self._running: dict[tuple[str, str], VllmServer] = {}
        self._files: set[Path] = set()

    def __getitem__(self, key: tuple[str, str]) -> VllmServer:
        return self._running[key]

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
        self._remember_files()
        for server in self._running.values():
            server.kill()
        instances = {launch.instance for launch in self._launches.values()} - {None}
        shared_files.remove(self._files | {shared_files.SHM / str(name) for name in instances})
        ledger.reap()
        for number, handler in before.items():
            signal.signal(number, handler)

    def start(self) -> float:
        """All at once; answers after how many seconds the last one was ready."""
        begin_s = time.monotonic()
        for (way, model), launch in self._launches.items():
            self._running[way, model] = VllmServer(
                self._model,
                self._folder / f"{way}_{model}.log",
                # Its sockets go with the folder.
                {**launch.environment, "VLLM_RPC_BASE_PATH": str(self._folder)},
                launch.arguments,
            )
        for server in self._running.values():
            server.wait_until_ready()
        self._remember_files()
        return time.monotonic() - begin_s

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
        groups = {launch.ledger for launch in self._launches.values()} - {None}
        paths = {ledger.ledger_path(str(group), "host") for group in groups}
        left |= {path for path in paths if path.exists()}
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
