"""The demo's engines, with the differences between them: how each is started and measured.

    engine = ENGINES["sglang"]
    server = engine.serve(model, log, environment)
    server.wait_until_ready()

All serve the same model in float32 on the CPU, in blocks of 32 tokens.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from subprocess import Popen
from typing import Any, ClassVar, Protocol

import transformers_server
from open_memfds import held_bytes
from sglang_server import MAX_TOTAL_TOKENS, SglangServer, command_of
from transformers_server import TransformersServer
from vllm_server import VLLM, VllmServer

BLOCK_TOKENS = 32
BLOCK_BYTES = BLOCK_TOKENS * 30 * 2 * 3 * 64 * 4
"""Block size of SmolLM2-135M: 30 layers, K and V, 3 heads of 64 numbers."""
SECOND_KV_BYTES = 256 << 20
THREADS = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // 2))}
"""More threads would wait for each other if other programs use the cores. vLLM sets its own."""


class Server(Protocol):
    """A server with its processes in one group."""

    process: Popen[bytes]
    port: int
    log: Path

    def wait_until_ready(self) -> object:
        """Wait until the server is ready. Raises AssertionError if it ends or takes too long."""

    def stop(self) -> int:
        """Send SIGTERM; return the exit status when the server has ended."""

    def kill(self) -> None:
        """Kill all processes of the server. Safe at any time."""


class DemoEngine(ABC):
    """One engine. It must be installed, which `scripts/setup` does."""

    title: str
    kv_bytes: int
    """Maximum size of its cache without a limit."""
    burst_requests: int
    without_tiers: str = ""
    """Why the part about tiers is skipped; empty if it is shown."""
    gives_way: str = "preemptions by vLLM"
    """The events that `preempted` counts, as text."""
    without_sleep: str = ""
    """Text on the controller's behaviour if the engine cannot sleep; empty if it can."""
    kind: ClassVar[dict[str, Any]]
    """Its keys in the controller's configuration."""

    @abstractmethod
    def serve(self, model: Path, log: Path, environment: Mapping[str, str]) -> Any:
        """Start the first server."""

    @abstractmethod
    def launch(self, model: Path, folder: Path) -> dict[str, Any]:
        """Return `command` and `env` with which the controller starts the second server."""

    def model_name(self, model: Path) -> str:
        """Return the model's name for clients."""
        return "m"

    def held_bytes(self, server: Any) -> int:
        """Return the operating system's memory for the first server's KV cache."""
        return held_bytes(server.process.pid)

    def preempted(self, server: Any) -> int | None:
        """Return the number of preempted requests since the start; None if it is unknown."""
        return None


class Vllm(DemoEngine):
    title = "vLLM"
    kv_bytes = 768 << 20
    burst_requests = 40
    kind: ClassVar[dict[str, Any]] = {"engine": "vllm"}

    def serve(self, model: Path, log: Path, environment: Mapping[str, str]) -> VllmServer:
        own = {
            "VLLM_SERVER_DEV_MODE": "1",  # the controller needs /sleep, which vLLM has only then
            "VLLM_RPC_BASE_PATH": str(log.parent),  # its sockets are removed with the folder
        }
        arguments = [
            # float32 is fast on every CPU, bfloat16 only on those with instructions for it.
            "--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", "16",
            "--kv-cache-memory-bytes", str(self.kv_bytes), "--enable-prompt-tokens-details",
        ]  # fmt: skip
        return VllmServer(model, log, {**environment, **own}, arguments)

    def launch(self, model: Path, folder: Path) -> dict[str, Any]:
        command = [
            str(VLLM), "serve", str(model), "--served-model-name", "m", "--dtype", "float32",
            "--host", "127.0.0.1", "--port", "{port}", "--enforce-eager",
            "--max-model-len", "1024", "--max-num-seqs", "16", "--block-size", "32",
            "--kv-cache-memory-bytes", str(SECOND_KV_BYTES),
        ]  # fmt: skip
        env = {
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_RPC_BASE_PATH": str(folder),
            "VLLM_CPU_CI_ENV": "1",
            "VLLM_NO_USAGE_STATS": "1",
        }
        return {"command": command, "env": env}

    def held_bytes(self, server: VllmServer) -> int:
        worker = server.processes().get("worker")
        return 0 if worker is None else held_bytes(worker.pid)

    def preempted(self, server: VllmServer) -> int:
        return int(server.metrics()["num_preemptions_total"])


class Sglang(DemoEngine):
    title = "SGLang"
    kv_bytes = MAX_TOTAL_TOKENS // BLOCK_TOKENS * BLOCK_BYTES
    burst_requests = 16
    gives_way = "retractions by SGLang"
    kind: ClassVar[dict[str, Any]] = {"engine": "sglang"}
    arguments = ("--served-model-name", "m", "--sleep-on-idle", "--enable-cache-report")

    def serve(self, model: Path, log: Path, environment: Mapping[str, str]) -> SglangServer:
        return SglangServer(model, log, {**environment, **THREADS}, self.arguments)

    def launch(self, model: Path, folder: Path) -> dict[str, Any]:
        command = command_of(model, "{port}", self.arguments)
        return {"command": command, "env": {"SGLANG_USE_CPU_ENGINE": "1", **THREADS}}

    def held_bytes(self, server: SglangServer) -> int:
        return held_bytes(server.scheduler().pid)

    def preempted(self, server: SglangServer) -> int:
        return server.retractions


class Transformers(DemoEngine):
    title = "transformers"
    without_tiers = "kvelastic supports no tiers for transformers, so KV does not survive a restart"
    kv_bytes = 512 * BLOCK_BYTES
    burst_requests = 10
    without_sleep = "it cannot sleep: the controller stops it, and a request restarts it"
    kind: ClassVar[dict[str, Any]] = {"engine": "transformers"}

    def serve(self, model: Path, log: Path, environment: Mapping[str, str]) -> TransformersServer:
        blocks = self.kv_bytes // BLOCK_BYTES
        return TransformersServer(model, log, {**environment, **THREADS}, blocks)

    def launch(self, model: Path, folder: Path) -> dict[str, Any]:
        blocks = SECOND_KV_BYTES // BLOCK_BYTES
        command = transformers_server.command_of(model, "{port}", blocks)
        return {"command": command, "env": THREADS, "on_demand": True, "preload": True}

    def model_name(self, model: Path) -> str:
        return str(model)


ENGINES: dict[str, DemoEngine] = {
    "vllm": Vllm(),
    "sglang": Sglang(),
    "transformers": Transformers(),
}
