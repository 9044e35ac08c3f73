"""A real SGLang server in a process group of its own, and what tests ask of it.

with SglangServer(model, log, {"ENABLE_KVELASTIC": "true"}) as server:
    server.wait_until_ready()
    answers = server.generate_all([[5, 6, 7]], 20)
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import needs
import psutil
from killed_engines import LeftBehind
from vllm_server import DECIDED, Request, free_port, own_environment

START_DEADLINE_S = 420.0
"""40 s where the machine has what SGLang imports in memory; minutes where it has to read it."""
STOP_DEADLINE_S = 60.0
REQUEST_DEADLINE_S = 300.0
PAGE_TOKENS = 32
MAX_TOTAL_TOKENS = 16384
IN_CHUNKS = ("--enable-mixed-chunk", "--chunked-prefill-size", str(4 * PAGE_TOKENS))
"""Steps that compute a part of one prompt, and a token of each request that runs."""


class Answer(NamedTuple):
    tokens: list[int]
    cached_tokens: int


def sglang_environment(**extra: str) -> dict[str, str]:
    """The tests' own environment without kvelastic's variables, and what SGLang needs here."""
    here = {
        "HF_HUB_OFFLINE": "1",
        "SGLANG_USE_CPU_ENGINE": "1",
        "OMP_NUM_THREADS": "1",
        # A leak is looked for after every step, and not only while it idles; it ends the server.
        "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    }
    return {**own_environment(), **here, **extra}


def command_of(model: Path, port: int | str, arguments: Sequence[str] = ()) -> list[str]:
    """Starts a server; `port` may be a controller's `{port}`.

    Every attention and sampling kernel is torch's own.
    """
    return [
        str(needs.SGLANG_PYTHON), "-m", "sglang.launch_server", "--model-path", str(model),
        "--host", "127.0.0.1", "--port", str(port), "--device", "cpu", "--dtype", "float32",
        "--attention-backend", "torch_native", "--sampling-backend", "pytorch",
        "--max-total-tokens", str(MAX_TOTAL_TOKENS), "--max-running-requests", "16",
        "--context-length", "2048", "--skip-server-warmup", *arguments,
    ]  # fmt: skip


class SglangServer:
    """Ends with its `with` block, however that ends; what it says is in `log`."""

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
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [*under, *command_of(model, self.port, arguments)],
                env=sglang_environment(**(environment or {})),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._seen: dict[int, psutil.Process] = {}
        self._left = LeftBehind()

    def __enter__(self) -> SglangServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    # --- life ---------------------------------------------------------------------------------

    def wait_until_ready(self) -> SglangServer:
        deadline = time.monotonic() + START_DEADLINE_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise AssertionError(f"SGLang ended with {self.process.returncode}: {self.tail()}")
            with contextlib.suppress(OSError, http.client.HTTPException):
                if self.request("/health")[0] == 200:
                    self.scheduler()
                    return self
            time.sleep(0.1)
        raise AssertionError(f"SGLang was not ready in {START_DEADLINE_S} s: {self.tail()}")

    def scheduler(self) -> psutil.Process:
        """The process that schedules, and holds the KV cache."""
        for child in self._left.note(self.process.pid):
            self._seen[child.pid] = child
            with contextlib.suppress(psutil.Error):
                if "sglang::scheduler" in " ".join(child.cmdline()):
                    return child
        raise AssertionError(f"there is no scheduler: {self.tail()}")

    def stop(self) -> int:
        """SIGTERM to the server, as an operator does it; answers its exit status."""
        self.scheduler()
        self.process.send_signal(signal.SIGTERM)
        self.wait_until_gone()
        return self.process.returncode

    def wait_until_gone(self) -> None:
        """Return once the server and every process of it that was seen has ended."""
        self.process.wait(STOP_DEADLINE_S)
        _, alive = psutil.wait_procs(list(self._seen.values()), timeout=STOP_DEADLINE_S)
        assert not alive, f"still there: {alive}; {self.tail()}"

    def kill(self) -> None:
        """SIGKILL to every process of the server. Safe at any time."""
        with contextlib.suppress(AssertionError):
            self.scheduler()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        for child in self._seen.values():
            with contextlib.suppress(psutil.Error):
                child.kill()
        self.process.wait(STOP_DEADLINE_S)
        psutil.wait_procs(list(self._seen.values()), timeout=STOP_DEADLINE_S)
        self._left.remove()

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def tail(self) -> str:
        return self.text()[-6000:]

    @property
    def retractions(self) -> int:
        """Requests that gave their memory up for others, since the start."""
        return sum(map(int, re.findall(r"#retracted_reqs: (\d+)", self.text())))

    def load(self, figure: str) -> int:
        """`num_waiting_reqs`, `num_running_reqs`, ...: what SGLang says of its own."""
        (load,) = json.loads(self.request("/v1/loads")[1])["loads"]
        return int(load[figure])

    # --- requests -----------------------------------------------------------------------------

    def generate(self, prompt: list[int], new_tokens: int) -> Answer:
        answer = self._generate(prompt, new_tokens)
        return Answer(answer["output_ids"], answer["meta_info"]["cached_tokens"])

    def complete(self, request: Request) -> list[int]:
        """The tokens; fewer than asked for where the request was aborted."""
        tokens: list[int] = self._generate(request.prompt, request.max_tokens)["output_ids"]
        return tokens

    def complete_all(self, requests: Sequence[Request], at_once: int = 16) -> list[list[int]]:
        with ThreadPoolExecutor(at_once) as threads:
            return list(threads.map(self.complete, requests))

    def decided(self, request: Request) -> Request:
        """The same request, ended before the first token that rounding decides (`VllmServer`)."""
        answer = self._generate(
            request.prompt, request.max_tokens, return_logprob=True, top_logprobs_num=2
        )
        for count, best in enumerate(answer["meta_info"]["output_top_logprobs"]):
            first, second = sorted((each[0] for each in best), reverse=True)
            if first - second < DECIDED:
                return request._replace(max_tokens=count)
        return request

    def _generate(self, prompt: list[int], new_tokens: int, **more: Any) -> Any:
        parameters = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": parameters, **more}
        status, text = self.request("/generate", "POST", REQUEST_DEADLINE_S, body)
        assert status == 200, f"{status}: {text!r}\n{self.tail()}"
        return json.loads(text)

    def generate_all(self, prompts: Sequence[list[int]], new_tokens: int) -> list[Answer]:
        with ThreadPoolExecutor(len(prompts)) as threads:
            return list(threads.map(lambda prompt: self.generate(prompt, new_tokens), prompts))

    def post(self, path: str, **body: Any) -> bytes:
        status, text = self.request(path, "POST", REQUEST_DEADLINE_S, body)
        assert status == 200, text
        return text

    def request(
        self, path: str, method: str = "GET", timeout_s: float = 10, body: Any = None
    ) -> tuple[int, bytes]:
        """The status and what was answered."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        try:
            connection.request(
                method,
                path,
                None if body is None else json.dumps(body),
                {"Content-Type": "application/json"},
            )
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()
