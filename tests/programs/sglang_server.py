"""A real SGLang server in a process group of its own, and what tests ask of it.

with SglangServer(model, log, {"ENABLE_KVELASTIC": "true"}) as server:
    server.wait_until_ready()
    answers = server.generate_all([[5, 6, 7]], 20)
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import needs
import psutil
from engine_server import (
    DECIDED,
    START_DEADLINE_S,
    EngineServer,
    Request,
    own_environment,
)
from ports import free_port

PAGE_TOKENS = 32
MAX_TOTAL_TOKENS = 16384
IN_CHUNKS = (
    "--enable-mixed-chunk", "--chunked-prefill-size", str(4 * PAGE_TOKENS),
    "--prefill-decode-interval", "3",
)  # fmt: skip
"""Steps that compute a part of one prompt, and a token of each request that runs; some in between
compute none, also where nothing runs."""


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


def run_in_sglang(program: str, lines: int) -> list[str]:
    """The last lines that a Python program prints in SGLang's environment; it ends without error.

    What SGLang prints while it is imported stands above them.
    """
    done = subprocess.run(
        [needs.SGLANG_PYTHON, "-c", program],
        env=sglang_environment(),
        capture_output=True,
        text=True,
        timeout=START_DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-lines:]


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


class SglangServer(EngineServer):
    ENGINE = "SGLang"

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
        command = [*under, *command_of(model, port, arguments)]
        super().__init__(command, sglang_environment(**(environment or {})), log, port)

    def scheduler(self) -> psutil.Process:
        """The process that schedules, and holds the KV cache."""
        for child in self.family():
            with contextlib.suppress(psutil.Error):
                if "sglang::scheduler" in " ".join(child.cmdline()):
                    return child
        raise AssertionError(f"there is no scheduler: {self.tail()}")

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
        tokens: list[int] = self._generate(request.prompt, request.max_tokens)["output_ids"]
        return tokens

    def decided(self, request: Request) -> Request:
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
        return json.loads(self.post("/generate", **body))

    def generate_all(self, prompts: Sequence[list[int]], new_tokens: int) -> list[Answer]:
        with ThreadPoolExecutor(len(prompts)) as threads:
            return list(threads.map(lambda prompt: self.generate(prompt, new_tokens), prompts))
