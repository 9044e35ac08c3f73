"""A real `vllm serve` in a process group of its own, and what tests ask of it.

with VllmServer(model, log_folder, {"ENABLE_KVELASTIC": "true"}) as server:
    server.wait_until_ready()
    tokens = server.complete_all([Request([5, 6, 7], 20)])
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from killed_engines import LeftBehind

VLLM = Path(sys.executable).with_name("vllm")
START_DEADLINE_S = 420.0
"""20 s where the machine has what vLLM imports in memory; minutes where it has to read it."""
STOP_DEADLINE_S = 60.0
REQUEST_DEADLINE_S = 300.0
BLOCK_TOKENS = 32
MAX_MODEL_TOKENS = 1024
PAGE_BYTES = 2 << 20
DECIDED = 1e-4
"""Of log probabilities: the tiny model's logits are known to a millionth or so."""
KV_BYTES = 64 << 20
"""1024 blocks of 64 KiB, in pages of 2 MiB."""


class Request(NamedTuple):
    prompt: list[int]
    max_tokens: int


def make_requests(count: int, seed: int, *, shortest: int = 8, longest: int = 300) -> list[Request]:
    """Random prompts; every second one begins with the same 96 tokens (three blocks)."""
    pick = random.Random(seed)
    shared = [pick.randrange(3, 512) for _ in range(3 * BLOCK_TOKENS)]
    requests = []
    for index in range(count):
        own = [pick.randrange(3, 512) for _ in range(pick.randrange(shortest, longest))]
        requests.append(Request((shared if index % 2 else []) + own, pick.randrange(16, 100)))
    return requests


def own_environment() -> dict[str, str]:
    """The tests' own environment without kvelastic's variables."""
    return {
        name: value
        for name, value in os.environ.items()
        if name == "KVELASTIC_LEDGER"  # the run's own
        or not name.startswith(("KVELASTIC_", "KVCACHED_", "ENABLE_KV"))
    }


def engine_environment(**extra: str) -> dict[str, str]:
    """The same, and what vLLM needs offline."""
    offline = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_CI_ENV": "1"}
    return {**own_environment(), **offline, **extra}


class VllmServer:
    def __init__(
        self,
        model: Path,
        log: Path,
        environment: dict[str, str] | None = None,
        arguments: Sequence[str] = (),
        under: Sequence[str] = (),
    ) -> None:
        """`under` is the command of a program that runs the server's."""
        self.log = log
        self.port = free_port()
        command = [
            *under,
            str(VLLM), "serve", str(model), "--served-model-name", "m", "--dtype", "float32",
            "--host", "127.0.0.1", "--port", str(self.port), "--enforce-eager",
            "--max-model-len", str(MAX_MODEL_TOKENS), "--max-num-seqs", "16",
            "--block-size", str(BLOCK_TOKENS), "--kv-cache-memory-bytes", str(KV_BYTES),
            *arguments,
        ]  # fmt: skip
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                env=engine_environment(**(environment or {})),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._seen: dict[int, psutil.Process] = {}
        self._refusals: list[tuple[int, int]] = []
        self._left = LeftBehind()

    def __enter__(self) -> VllmServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    # --- life ---------------------------------------------------------------------------------

    def wait_until_ready(self) -> VllmServer:
        deadline = time.monotonic() + START_DEADLINE_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise AssertionError(f"vllm ended with {self.process.returncode}: {self.tail()}")
            with contextlib.suppress(OSError, http.client.HTTPException):
                if self.request("/health")[0] == 200:
                    self.processes()
                    return self
            time.sleep(0.1)
        raise AssertionError(f"vllm was not ready in {START_DEADLINE_S} s: {self.tail()}")

    def processes(self) -> dict[str, psutil.Process]:
        """`api`, `core`, `worker` (with several: `worker0`, `worker1`, too, by rank).

        Also remembers them, and what memory they share, to see later that they are gone.
        """
        api, *children = self._left.note(self.process.pid)
        found = {"api": api}
        for child in children:
            self._seen[child.pid] = child
            with contextlib.suppress(psutil.Error):
                line = " ".join(child.cmdline())
                if "EngineCore" in line:
                    found["core"] = child
                elif "Worker" in line:
                    found["worker"] = child
                    if rank := re.search(r"Worker_TP(\d+)", line):
                        found[f"worker{rank[1]}"] = child
        return found

    def stop(self) -> int:
        """SIGTERM to the server, as an operator does it; answers its exit status."""
        self.processes()
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(STOP_DEADLINE_S)
        self.wait_until_gone()
        return self.process.returncode

    def wait_until_gone(self) -> None:
        """Return once the server and every process that `processes` saw has ended."""
        self.process.wait(STOP_DEADLINE_S)
        _, alive = psutil.wait_procs(list(self._seen.values()), timeout=STOP_DEADLINE_S)
        assert not alive, f"still there: {alive}; {self.tail()}"

    def kill(self) -> None:
        """SIGKILL to every process of the server. Safe at any time."""
        if self.process.poll() is None:
            self.processes()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        for child in self._seen.values():
            with contextlib.suppress(psutil.Error):
                child.kill()
        self.process.wait(STOP_DEADLINE_S)
        psutil.wait_procs(list(self._seen.values()), timeout=STOP_DEADLINE_S)
        self._left.remove()

    def tail(self, characters: int = 6000) -> str:
        return self.log.read_text(errors="replace")[-characters:]

    @contextlib.contextmanager
    def refusing(self) -> Iterator[None]:
        """What is asked for in the body is refused: vLLM logs that with where it was raised."""
        start = len(self.log.read_text(errors="replace"))
        yield
        self._refusals.append((start, len(self.log.read_text(errors="replace"))))

    def log_but_for_refusals(self) -> str:
        """The log without what was logged under `refusing`."""
        text = self.log.read_text(errors="replace")
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

    def decided(self, request: Request) -> Request:
        """The same request, ended before the first token that rounding decides.

        Its best two tokens are so close that the order of a sum settles which it is, and that
        depends on what is computed beside it.
        """
        (choice,) = self._choices(request.prompt, request.max_tokens, logprobs=2)
        for count, best in enumerate(choice["logprobs"]["top_logprobs"]):
            second, first = sorted(best.values())[-2:]
            if first - second < DECIDED:
                return request._replace(max_tokens=count)
        return request

    def _complete(self, prompt: list[int] | list[list[int]], max_tokens: int) -> list[list[int]]:
        return [choice["token_ids"] for choice in self._choices(prompt, max_tokens)]

    def _choices(
        self, prompt: list[int] | list[list[int]], max_tokens: int, **further: Any
    ) -> list[dict[str, Any]]:
        body = json.dumps(
            {
                "model": "m",
                "prompt": prompt,
                "max_tokens": max_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "return_token_ids": True,
                **further,
            }
        )
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=REQUEST_DEADLINE_S)
        try:
            connection.request(
                "POST", "/v1/completions", body, {"Content-Type": "application/json"}
            )
            response = connection.getresponse()
            text = response.read()
        finally:
            connection.close()
        assert response.status == 200, text
        return sorted(json.loads(text)["choices"], key=lambda choice: int(choice["index"]))

    def complete_all(self, requests: Sequence[Request], at_once: int = 16) -> list[list[int]]:
        with ThreadPoolExecutor(at_once) as threads:
            return list(threads.map(self.complete, requests))

    def metrics(self) -> dict[str, float]:
        """vLLM's own figures by name, without labels."""
        text = self.request("/metrics")[1].decode()
        found = re.findall(r"^vllm:(\w+)\{[^}]*\} (\S+)$", text, re.MULTILINE)
        return {name: float(value) for name, value in found}

    def post(self, path: str) -> bytes:
        """Ask for something that has no body, `/sleep?level=1` say; the answer must be 200."""
        status, text = self.request(path, "POST", REQUEST_DEADLINE_S)
        assert status == 200, text
        return text

    def connections(self) -> int:
        """How many clients are connected."""
        found = psutil.Process(self.process.pid).net_connections("tcp")
        return sum(one.laddr.port == self.port and one.status == "ESTABLISHED" for one in found)

    def is_sleeping(self) -> bool:
        """What vLLM itself says."""
        sleeping: bool = json.loads(self.request("/is_sleeping")[1])["is_sleeping"]
        return sleeping

    def request(self, path: str, method: str = "GET", timeout_s: float = 10) -> tuple[int, bytes]:
        """Ask without a body; the status and what was answered."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        try:
            connection.request(method, path)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()


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


def free_port() -> int:
    """A port that nobody has, and that the system gives to nobody: vLLM takes it a minute later."""
    first_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.randrange(first_given // 2, first_given)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
