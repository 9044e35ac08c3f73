"""A limit lowered on an idle engine: transformers beside vLLM, the same model and the same prompts.

Both have one instance of kvelastic. A round fills both prefix caches and lets both fall idle; then
one after the other is told to give 128 MiB back.
"""

from __future__ import annotations

import importlib.util
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import tiny_model
from engine_server import Request
from open_memfds import held_bytes
from transformers_process import TransformersEngine
from vllm_server import VllmServer

from benchmarks.harness import Figure
from benchmarks.pages import Table
from benchmarks.transformers.comparison import ELASTIC
from benchmarks.transformers.engines import BLOCK_TOKENS, INSTANCE, environment, started
from benchmarks.transformers.workload import AT_ONCE
from kvelastic.shared import segment

ROUNDS, QUICK_ROUNDS = 20, 2
GIVEN_BACK_BYTES = 128 << 20
HIGH_BYTES = 1 << 30
CAPACITY_BYTES = 512 << 20
PROMPT_TOKENS = 900
"""16 prompts of 900 tokens: what the default lets a prefix cache keep, nearly."""
LAYERS, KV_HEADS, HEAD_DIM = 8, 4, 64
TOKEN_BYTES = LAYERS * 2 * KV_HEADS * HEAD_DIM * 4
FALL_IDLE_S = 1.5
"""vLLM's worker looks for work without pause for a second after its last step."""
ANSWER_DEADLINE_S = 10.0
_VLLM = "vLLM"


@dataclass
class Limited:
    """An engine whose limit is lowered."""

    instance: str
    fill: Callable[[], object]
    pid: Callable[[], int]
    """Of the process that holds the cache."""
    acknowledged_ms: list[float] = field(default_factory=list)
    given_back_ms: list[float] = field(default_factory=list)
    given_back_mib: list[float] = field(default_factory=list)

    def lower(self) -> None:
        """One sample of each."""
        before = held_bytes(self.pid())
        with segment.open_writable(self.instance) as instance, instance.writing() as control_block:
            begin_ns = time.perf_counter_ns()
            revision = control_block.write_request(limit_bytes=before - GIVEN_BACK_BYTES)
            assert control_block.wait_ack(revision, ANSWER_DEADLINE_S), "no answer to the limit"
            self.acknowledged_ms.append((time.perf_counter_ns() - begin_ns) / 1e6)
            assert control_block.wait_ack(revision, ANSWER_DEADLINE_S, settled=True), (
                "still above it"
            )
            self.given_back_ms.append((time.perf_counter_ns() - begin_ns) / 1e6)
            given_back = before - held_bytes(self.pid())
            assert given_back >= GIVEN_BACK_BYTES, f"only {given_back} bytes came back"
            self.given_back_mib.append(given_back / (1 << 20))
            revision = control_block.write_request(limit_bytes=HIGH_BYTES)
            assert control_block.wait_ack(revision, ANSWER_DEADLINE_S, settled=True)


def measure(folder: Path, *, quick: bool) -> Table:
    """Raises `AssertionError` for an engine that does not start or does not answer."""
    pick = random.Random(1)
    prompts = [[pick.randrange(3, 512) for _ in range(PROMPT_TOKENS)] for _ in range(AT_ONCE)]
    model = folder / "limit_model"
    shape = map(str, (LAYERS, KV_HEADS, HEAD_DIM))
    subprocess.run(
        [sys.executable, tiny_model.__file__, model, *shape],
        check=True,
        env=os.environ | {"TQDM_DISABLE": "1"},
    )
    notes = []
    with ExitStack() as stack:
        limited = {ELASTIC: stack.enter_context(_transformers(model, prompts, folder))}
        if importlib.util.find_spec("vllm") is None:
            notes.append("vLLM is not installed: there is nothing to compare with.")
        else:
            limited[_VLLM] = stack.enter_context(_vllm(model, prompts, folder))
        for _ in range(QUICK_ROUNDS if quick else ROUNDS):
            for each in limited.values():
                each.fill()
            time.sleep(FALL_IDLE_S)
            for each in limited.values():
                each.lower()
    own, other = limited[ELASTIC], limited.get(_VLLM, Limited("", int, int))
    name = _VLLM if _VLLM in limited else ""
    return Table.of_figures(
        [
            Figure("acknowledged", "ms", own.acknowledged_ms, "<= vLLM", name,
                   other.acknowledged_ms),
            Figure("128 MiB are back at the system", "ms", own.given_back_ms, "<= vLLM", name,
                   other.given_back_ms),
            Figure("memory that came back", "MiB", own.given_back_mib, ">= 128", name,
                   other.given_back_mib),
        ],
        notes,
    )  # fmt: skip


@contextmanager
def _transformers(model: Path, prompts: list[list[int]], folder: Path) -> Iterator[Limited]:
    blocks = CAPACITY_BYTES // (BLOCK_TOKENS * TOKEN_BYTES)
    arguments = ["--folder", str(model), "--num-blocks", str(blocks)]
    arguments += ["--block-tokens", str(BLOCK_TOKENS)]
    with started(folder, {ELASTIC: arguments}) as engines:
        engine: TransformersEngine = engines[ELASTIC]
        yield Limited(INSTANCE, lambda: engine.burst(prompts, 1), lambda: engine.pid)


@contextmanager
def _vllm(model: Path, prompts: list[list[int]], folder: Path) -> Iterator[Limited]:
    name = f"{INSTANCE}_vllm"
    variables = environment(ELASTIC) | {
        "KVELASTIC_IPC_NAME": name,
        "VLLM_RPC_BASE_PATH": str(folder),  # its sockets go with the folder
    }
    arguments = ["--kv-cache-memory-bytes", str(CAPACITY_BYTES)]
    requests = [Request(prompt, 1) for prompt in prompts]
    with VllmServer(model, folder / "vllm.log", variables, arguments) as server:
        server.wait_until_ready()
        worker = server.processes()["worker"]
        yield Limited(name, lambda: server.complete_all(requests), lambda: worker.pid)
        server.stop()
