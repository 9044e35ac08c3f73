"""`scripts/bench swap`: the first token after a swap, beside the engine's own start.

Two real vLLM of which one fits. A round asks for the one that does not run, through the controller:
the other one gives its KV cache to its disk tier and ends, this one starts and answers. Then the
same command is started by hand and asked as soon as its health route answers. Both are timed until
the first token: from the request, and from the start of the process.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ports import free_port
from vllm_server import BLOCK_TOKENS, VLLM, engine_environment

from benchmarks.harness import Figure
from benchmarks.pages import Table, arguments, run
from benchmarks.vllm.models import prepare

LEDGER = f"bench-swap-{os.getpid()}"
BAR = "ratio <= 1.2"
PROMPT = [1000 + each for each in range(48)]
DEADLINE_S = 600.0
ROUNDS = 5


def command(weights: Path, name: str, port: str) -> list[str]:
    """A vLLM whose guarantee is more than half of the device."""
    return [
        str(VLLM), "serve", str(weights), "--served-model-name", name, "--dtype", "float32",
        "--host", "127.0.0.1", "--port", port, "--enforce-eager", "--max-model-len", "1024",
        "--max-num-seqs", "4", "--block-size", str(BLOCK_TOKENS),
        "--kv-cache-memory-bytes", str(192 << 20),
    ]  # fmt: skip


def environment(folder: Path, name: str) -> dict[str, str]:
    """Of that vLLM, whoever starts it."""
    return {
        "ENABLE_KVELASTIC": "true",
        "KVELASTIC_IPC_NAME": f"{LEDGER}-{name}",
        "KVELASTIC_MIN": "160M",
        "KVELASTIC_TIERS": f"disk:{folder / name}:256M",
    }


def first_token_s(port: int, name: str, began_s: float) -> float:
    """From then until the first token of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)
    body = {"model": name, "prompt": PROMPT, "max_tokens": 2, "stream": True, "temperature": 0}
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), _JSON)
        response = connection.getresponse()
        if response.status != 200:
            raise SystemExit(f"status {response.status}: {response.read()[:2000]!r}")
        response.readline()
        return time.monotonic() - began_s
    finally:
        connection.close()


_JSON = {"Content-Type": "application/json"}


def own_start_s(weights: Path, folder: Path) -> float:
    """The same engine, started by hand."""
    port = free_port()
    environ = engine_environment(**_MEMORY, **environment(folder, "own"))
    began_s = time.monotonic()
    with (folder / "own.log").open("ab") as log:
        process = subprocess.Popen(
            command(weights, "own", str(port)),
            env=environ, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    try:
        _wait_for(port, "/health", process)
        return first_token_s(port, "own", began_s)
    finally:
        _end(process)


_MEMORY = {"KVELASTIC_LEDGER": LEDGER, "KVELASTIC_HOST_MEMORY": "256M"}


@contextmanager
def controller(weights: Path, folder: Path) -> Iterator[int]:
    """Its port; it serves a and b."""
    port = free_port()
    models = [
        {
            "name": name,
            "engine": "vllm",
            "instance": f"{LEDGER}-{name}",
            "memory": {"min": "160M"},
            "launch": {
                "on_demand": True,
                "port": free_port(),
                "command": command(weights, name, "{port}"),
                "env": environment(folder, name),
                "ready_timeout": DEADLINE_S,
                "stop_timeout": 60,
                "log_file": str(folder / f"{name}.log"),
            },
        }
        for name in "ab"
    ]
    waits = {"queue_timeout": DEADLINE_S, "wake_timeout": DEADLINE_S}
    config: dict[str, Any] = {"server": {"port": port}, "sleep": waits, "models": models}
    path = folder / "controller.yaml"
    path.write_text(json.dumps(config | {"swap": {"min_awake": 0}}))
    with (folder / "controller.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "kvelastic.controller", "--config", str(path)],
            env=engine_environment(**_MEMORY), stdout=log, stderr=log,
        )  # fmt: skip
    try:
        _wait_for(port, "/health", process)
        yield port
    finally:
        _end(process)


def measure(rounds: int) -> list[Figure]:
    """Each round: a swap, and an own start."""
    figure = Figure("first token after a swap", "s", [], BAR, "the engine's own start")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="kvelastic-bench-swap-")))
        for name in ("a", "b", "own"):
            (folder / name).mkdir(mode=0o700)
        weights = prepare("smollm2", folder).folder
        own_start_s(weights, folder)  # what vLLM imports is in memory from here on
        for number in range(rounds):
            with controller(weights, folder) as port:
                first, second = "ab" if number % 2 else "ba"
                first_token_s(port, first, time.monotonic())
                figure.samples.append(first_token_s(port, second, time.monotonic()))
            figure.floor_samples.append(own_start_s(weights, folder))
    return [figure]


def _wait_for(port: int, path: str, process: subprocess.Popen[bytes]) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < end_s:
        if process.poll() is not None:
            raise SystemExit(f"{process.args!r} ended with {process.returncode}")
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        with suppress(OSError, http.client.HTTPException):
            connection.request("GET", path)
            if connection.getresponse().status == 200:
                return
        connection.close()
        time.sleep(0.05)
    raise SystemExit(f"port {port} was not ready in {DEADLINE_S:.0f} s")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(120)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


PARTS = {
    "swap": (
        "The first token after a swap",
        lambda quick: Table.of_figures(measure(1 if quick else ROUNDS)),
    )
}

if __name__ == "__main__":
    sys.exit(run("swap", "Swap benchmark", arguments("swap", __doc__, PARTS), PARTS))
