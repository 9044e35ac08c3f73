"""vLLM, SGLang and transformers on one device: who is busy gets what the idle ones cache.

Each in its turn fills the device with what it caches, and each gets memory of the one before it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import needs
import pytest
from engine_server import Request
from sglang_server import SglangServer
from transformers_process import TransformersEngine, make_prompts
from vllm_server import VllmServer

from kvelastic.shared import ledger, segment

pytestmark = [needs.sglang, pytest.mark.timeout(600)]

PROGRAMS = Path(__file__).parents[1] / "programs"
MIB = 1 << 20
DEVICE_BYTES = 48 * MIB
NEW_TOKENS = 8
SEEDS = 40
ENGINES = ("vllm", "sglang", "transformers")
PROMPTS = make_prompts(8, seed=5, shortest=100, longest=200)
"""What each is asked before all others, and again in every turn."""

Tokens = list[list[int]]


@dataclass
class Engine:
    """One of the three."""

    name: str
    burst: Callable[[Tokens], Tokens]
    """Prompts, and the tokens that each is answered with."""

    @property
    def mapped_bytes(self) -> int:
        return segment.inspect(self.name).usage["mapped_bytes"]


@pytest.fixture(scope="module")
def engines(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Engine]]:
    logs = tmp_path_factory.mktemp("three_engines")
    model = logs / "model"
    subprocess.run([sys.executable, PROGRAMS / "tiny_model.py", model, "2", "2", "128"], check=True)
    names = {engine: f"kvthree_{engine}_{os.getpid()}" for engine in ENGINES}

    def environment(engine: str) -> dict[str, str]:
        return {
            "ENABLE_KVELASTIC": "true",
            "KVELASTIC_IPC_NAME": names[engine],
            "KVELASTIC_LEDGER": f"kvthree-{os.getpid()}",
            "KVELASTIC_HOST_MEMORY": f"{DEVICE_BYTES}",
            "KVELASTIC_RESERVE": "0",  # of a tiny model this would be the engines' own code
            "KVELASTIC_MAX_CACHED_TOKENS": "-1",
            "KVELASTIC_RECLAIM_WAIT": "5",  # a busy machine gives later
            "KVELASTIC_SANITY_CHECK": "true",
        }

    def of_vllm(prompts: Tokens) -> Tokens:
        tokens: Tokens = vllm.complete_all([Request(prompt, NEW_TOKENS) for prompt in prompts])
        return tokens

    def of_sglang(prompts: Tokens) -> Tokens:
        return [answer.tokens for answer in sglang.generate_all(prompts, NEW_TOKENS)]

    def of_transformers(prompts: Tokens) -> Tokens:
        return transformers.burst(prompts, NEW_TOKENS)

    with ExitStack() as stack:
        vllm = stack.enter_context(
            VllmServer(
                tiny_model,
                logs / "vllm.log",
                environment("vllm"),
                ["--kv-cache-memory-bytes", str(DEVICE_BYTES)],
            )
        )
        sglang = stack.enter_context(
            SglangServer(model, logs / "sglang.log", environment("sglang"))
        )
        transformers = stack.enter_context(
            TransformersEngine(
                needs.NEWEST_TRANSFORMERS,
                logs / "transformers.log",
                ["--num-blocks", "4096", "--layers", "8", "--head-dim", "128"],
                environment("transformers"),
            )
        )
        for engine in (transformers, vllm, sglang):
            engine.wait_until_ready()
        yield [
            Engine(names["vllm"], of_vllm),
            Engine(names["sglang"], of_sglang),
            Engine(names["transformers"], of_transformers),
        ]
        for engine in (transformers, vllm, sglang):
            assert engine.process.poll() is None, engine.tail()
            engine.stop()
        assert "hit an exception" not in sglang.text(), sglang.tail()
    left = {info.name for info in segment.list_segments()} & set(names.values())
    assert not left
    ledger.reap()


def test_busy_engine_takes_memory_cached_by_idle_engines(engines: list[Engine]) -> None:
    expected = [engine.burst(PROMPTS) for engine in engines]
    page_bytes = 2 * MIB
    for turn in range(2):
        for engine, tokens in zip(engines, expected, strict=True):
            others = [each for each in engines if each is not engine]
            before = sum(each.mapped_bytes for each in others)
            for seed in range(SEEDS):
                if engine.mapped_bytes > DEVICE_BYTES // 2:
                    break
                engine.burst(make_prompts(8, seed=1000 * turn + seed, shortest=400, longest=700))
            else:
                raise AssertionError(f"{engine.name} got {engine.mapped_bytes} bytes only")
            held = sum(each.mapped_bytes for each in engines)
            assert held <= DEVICE_BYTES, "a page without a grant"
            if before > DEVICE_BYTES // 2 + page_bytes:
                assert sum(each.mapped_bytes for each in others) < before, "nobody has given"
            assert engine.burst(PROMPTS) == tokens
    assert [engine.burst(PROMPTS) for engine in engines] == expected
