"""A real `vllm serve` in a process group of its own, and what tests ask of it.

with VllmServer(model, log_folder, {"ENABLE_KVELASTIC": "true"}) as server:
    server.wait_until_ready()
    tokens = server.complete_all([Request([5, 6, 7], 20)])
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
from engine_server import DECIDED, EngineServer, Request, own_environment
from ports import free_port

VLLM = Path(sys.executable).with_name("vllm")
BLOCK_TOKENS = 32
MAX_MODEL_TOKENS = 1024
PAGE_BYTES = 2 << 20
KV_BYTES = 64 << 20
"""1024 blocks of 64 KiB, in pages of 2 MiB."""


def make_requests(count: int, seed: int, *, shortest: int = 8, longest: int = 300) -> list[Request]:
    """Random prompts; every second one begins with the same 96 tokens (three blocks)."""
    pick = random.Random(seed)
    shared = [pick.randrange(3, 512) for _ in range(3 * BLOCK_TOKENS)]
    requests = []
    for index in range(count):
        own = [pick.randrange(3, 512) for _ in range(pick.randrange(shortest, longest))]
        requests.append(Request((shared if index % 2 else []) + own, pick.randrange(16, 100)))
    return requests


def engine_environment(**extra: str) -> dict[str, str]:
    """The tests' own without kvelastic's variables, and what vLLM needs offline."""
    offline = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_CI_ENV": "1"}
    return {**own_environment(), **offline, **extra}


class VllmServer(EngineServer):
    ENGINE = "vLLM"

    def __init__(
        self,
        model: Path,
        log: Path,
        environment: dict[str, str] | None = None,
        arguments: Sequence[str] = (),
        under: Sequence[str] = (),
    ) -> None:
        """`under` is the command of a program that runs the server's."""
        port = free_port()
        command = [
            *under,
            str(VLLM), "serve", str(model), "--served-model-name", "m", "--dtype", "float32",
            "--host", "127.0.0.1", "--port", str(port), "--enforce-eager",
            "--max-model-len", str(MAX_MODEL_TOKENS), "--max-num-seqs", "16",
            "--block-size", str(BLOCK_TOKENS), "--kv-cache-memory-bytes", str(KV_BYTES),
            *arguments,
        ]  # fmt: skip
        super().__init__(command, engine_environment(**(environment or {})), log, port)
        self._refusals: list[tuple[int, int]] = []

    # --- life ---------------------------------------------------------------------------------

    def processes(self) -> dict[str, psutil.Process]:
        """`api`, `core`, `worker` (with several: `worker0`, `worker1`, too, by rank)."""
        api, *children = self.family()
        found = {"api": api}
        for child in children:
            with contextlib.suppress(psutil.Error):
                line = " ".join(child.cmdline())
                if "EngineCore" in line:
                    found["core"] = child
                elif "Worker" in line:
                    found["worker"] = child
                    if rank := re.search(r"Worker_TP(\d+)", line):
                        found[f"worker{rank[1]}"] = child
        return found

    @contextlib.contextmanager
    def refusing(self) -> Iterator[None]:
        """What is asked for in the body is refused: vLLM logs that with where it was raised."""
        start = len(self.text())
        yield
        self._refusals.append((start, len(self.text())))

    def log_but_for_refusals(self) -> str:
        """The log without what was logged under `refusing`."""
        text = self.text()
        for start, end in reversed(self._refusals):
            text = text[:start] + text[end:]
        return text

    # --- requests -----------------------------------------------------------------------------

    def complete(self, request: Request) -> list[int]:
        (tokens,) = self._complete(request.prompt, request.max_tokens)
        return tokens

    def complete_together(self, requests: Sequence[Request]) -> list[list[int]]:
        """In one HTTP request: the engine hears of all before it has done with the first."""
        (max_tokens,) = {request.max_tokens for request in requests}
        return self._complete([request.prompt for request in requests], max_tokens)

    def decided(self, request: Request, margin: float = DECIDED) -> Request:
        """The request up to the first token whose log probability leads by less than `margin`."""
        (choice,) = self._choices(request.prompt, request.max_tokens, logprobs=2)
        for count, best in enumerate(choice["logprobs"]["top_logprobs"]):
            leading = sorted(best.values())[-2:]  # one if both tokens have the same text
            if len(leading) < 2 or leading[1] - leading[0] < margin:
                return request._replace(max_tokens=count)
        return request

    def _complete(self, prompt: list[int] | list[list[int]], max_tokens: int) -> list[list[int]]:
        return [choice["token_ids"] for choice in self._choices(prompt, max_tokens)]

    def _choices(
        self, prompt: list[int] | list[list[int]], max_tokens: int, **further: Any
    ) -> list[dict[str, Any]]:
        parameters = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
        body = {"model": "m", "prompt": prompt, "max_tokens": max_tokens, **parameters, **further}
        choices = json.loads(self.post("/v1/completions", **body))["choices"]
        return sorted(choices, key=lambda choice: int(choice["index"]))

    def metrics(self) -> dict[str, float]:
        """vLLM's own figures by name, without labels."""
        return metrics_in(self.request("/metrics")[1].decode())

    def connections(self) -> int:
        """How many clients are connected."""
        found = psutil.Process(self.process.pid).net_connections("tcp")
        return sum(one.laddr.port == self.port and one.status == "ESTABLISHED" for one in found)

    def is_sleeping(self) -> bool:
        """What vLLM itself says."""
        sleeping: bool = json.loads(self.request("/is_sleeping")[1])["is_sleeping"]
        return sleeping


def metrics_in(text: str) -> dict[str, float]:
    """vLLM's own figures by name, without labels, from what its `/metrics` returns."""
    found = re.findall(r"^vllm:(\w+)\{[^}]*\} (\S+)$", text, re.MULTILINE)
    return {name: float(value) for name, value in found}


def worker_memory_bytes(worker: psutil.Process) -> int:
    """What the operating system holds for the worker's KV cache: blocks of its memfd."""
    with _arena_file(worker, os.O_RDONLY) as fd:
        return os.fstat(fd).st_blocks * 512


def zero_worker_memory(worker: psutil.Process) -> int:
    """Overwrite the worker's KV cache with zeros from outside; answers how many bytes."""
    zeroed = 0
    with _arena_file(worker, os.O_RDWR) as fd:
        at, end = 0, os.fstat(fd).st_size
        while at < end:
            try:
                start = os.lseek(fd, at, os.SEEK_DATA)
            except OSError:  # no data after this offset
                break
            at = os.lseek(fd, start, os.SEEK_HOLE)
            os.pwrite(fd, bytes(at - start), start)
            zeroed += at - start
    return zeroed


@contextlib.contextmanager
def _arena_file(worker: psutil.Process, flags: int) -> Any:
    folder = Path(f"/proc/{worker.pid}/fd")
    for entry in folder.iterdir():
        with contextlib.suppress(OSError):
            if str(entry.readlink()).startswith("/memfd:kvelastic"):
                fd = os.open(entry, flags)
                break
    else:
        raise AssertionError("the worker has no memfd of kvelastic")
    try:
        yield fd
    finally:
        os.close(fd)
