"""SGLang on kvelastic beside what stock SGLang answers: servers that this folder's tests share.

They start slowly. The fixtures `sglang_pairs` and `pair` (conftest.py) hand them out.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from open_memfds import held_bytes
from sglang_server import PAGE_TOKENS, Answer, SglangServer
from transformers_process import make_prompts

from kvelastic.shared import segment

PROGRAMS = Path(__file__).parents[1] / "programs"
MIB = 1 << 20
LAYERS, KV_HEADS, HEAD_DIM = 2, 2, 128
BLOCK_BYTES = 2 * LAYERS * PAGE_TOKENS * KV_HEADS * HEAD_DIM * 4
PROMPTS = make_prompts(16, seed=11, shortest=120, longest=250, shared_tokens=3 * PAGE_TOKENS)
"""Each fits a page, of 15 blocks or 63; the burst needs 130: nine pages of one layout, three of the
other."""
NEW_TOKENS = 24
PAGE_BYTES = {"true": 2 * MIB, "false": 2 * LAYERS * 2 * MIB}
"""By KVELASTIC_CONTIGUOUS_LAYOUT: without it each buffer has a page of its own."""
PAGED = "true"
SLEEPS_ON_IDLE = "false"
"""The layout whose server has `--sleep-on-idle`."""


@dataclass
class Pair:
    """An elastic server, what stock answers, and the elastic one's name."""

    server: SglangServer
    expected: list[list[int]]
    name: str
    page_bytes: int
    held_after_start_bytes: int = 0

    def limit(self, pages: int | None, wait_s: float = 10) -> segment.Ack:
        limit_bytes = self.page_bytes * (1000 if pages is None else pages)
        return segment.request(self.name, limit_bytes=limit_bytes, wait_s=wait_s)

    def usage(self) -> dict[str, int]:
        return segment.inspect(self.name).usage

    def resident_bytes(self) -> int:
        """What the kernel says."""
        return held_bytes(self.server.scheduler().pid)

    def burst(self) -> list[list[int]]:
        return tokens_of(self.server.generate_all(PROMPTS, NEW_TOKENS))

    def waiting(self) -> int:
        """Requests that SGLang has and does not run."""
        return self.server.load("num_waiting_reqs")

    def running(self) -> int:
        return self.server.load("num_running_reqs")

    def end(self) -> None:
        """As an operator ends it; nothing is left, and it has met no error in all its time."""
        assert self.server.process.poll() is None, self.server.tail()
        self.server.stop()
        check_log(self.server)
        assert self.name not in {info.name for info in segment.list_segments()}


def check_log(server: SglangServer, *, was_killed: bool = False) -> None:
    """No exception, but of one that was killed, and no leak that SGLang has found."""
    exceptions = () if was_killed else ("hit an exception",)
    for word in (*exceptions, "memory leak", "IntegrityError", "sanity check failed"):
        assert word not in server.text(), f"{word!r} in {server.log}: {server.tail()}"


def tokens_of(answers: list[Answer]) -> list[list[int]]:
    return [answer.tokens for answer in answers]


def make_model(folder: Path) -> Path:
    """Blocks of 128 KiB, of which 15 fit a page of 2 MiB."""
    shape = map(str, (LAYERS, KV_HEADS, HEAD_DIM))
    subprocess.run([sys.executable, PROGRAMS / "tiny_model.py", folder, *shape], check=True)
    return folder


class Pairs:
    """Servers by KVELASTIC_CONTIGUOUS_LAYOUT, each started when it is first asked for."""

    def __init__(self, model: Path, logs: Path) -> None:
        self._model = model
        self._logs = logs
        self._made: dict[str, Pair] = {}
        self._expected: list[list[int]] = []
        self._ends = contextlib.ExitStack()

    def __getitem__(self, contiguous: str) -> Pair:
        if contiguous not in self._made:
            with contextlib.ExitStack() as unfinished:
                self._made[contiguous] = self._start(contiguous, unfinished)
                self._ends.push(unfinished.pop_all())
        return self._made[contiguous]

    def all(self) -> list[Pair]:
        return [self[contiguous] for contiguous in PAGE_BYTES]

    def end(self) -> None:
        """End them all. Safe to call again."""
        pairs = list(self._made.values())
        self._made.clear()
        with self._ends, ThreadPoolExecutor(len(PAGE_BYTES)) as threads:
            # SGLang takes its time to end.
            for ended in [threads.submit(pair.end) for pair in pairs]:
                ended.result()

    def _start(self, contiguous: str, ends: contextlib.ExitStack) -> Pair:
        name = f"kvsgl_{contiguous}_{os.getpid()}"
        environment = {
            "ENABLE_KVELASTIC": "true",
            "KVELASTIC_IPC_NAME": name,
            "KVELASTIC_CONTIGUOUS_LAYOUT": contiguous,
            "KVELASTIC_SANITY_CHECK": "true",
            "KVELASTIC_IDLE_TRIM_SECONDS": "0.5",
        }
        arguments = ("--sleep-on-idle",) if contiguous == SLEEPS_ON_IDLE else ()
        log = self._logs / f"elastic_{contiguous}.log"
        server = ends.enter_context(SglangServer(self._model, log, environment, arguments))
        if not self._expected:  # the first one starts beside stock
            self._expected = self._tokens_of_stock()
        server.wait_until_ready()
        pair = Pair(server, self._expected, name, PAGE_BYTES[contiguous])
        pair.held_after_start_bytes = pair.usage()["mapped_bytes"]
        return pair

    def _tokens_of_stock(self) -> list[list[int]]:
        page_size = ("--page-size", str(PAGE_TOKENS))
        with SglangServer(self._model, self._logs / "stock.log", {}, page_size) as stock:
            return tokens_of(stock.wait_until_ready().generate_all(PROMPTS, NEW_TOKENS))
