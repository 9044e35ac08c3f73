"""Two models of which one fits, by start and stop: real vLLM, SmolLM2, and disk tiers."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import needs
import pytest
from ports import free_port
from running import FAKES, Controller
from under_tiers import disk_tier
from vllm_server import BLOCK_TOKENS, VLLM, engine_environment
from waiting import wait_until

from kvelastic.shared import segment

pytestmark = [pytest.mark.engine, needs.vllm]

ROOT = Path(__file__).parents[2]
LEDGER = f"swap-{os.getpid()}"
PROMPT = [random.Random(21).randrange(1000, 40_000) for _ in range(16 * BLOCK_TOKENS + 5)]
"""Ordinary tokens; sixteen whole blocks of them."""
ANSWER_TOKENS = 8


@pytest.fixture(scope="module")
def smollm2() -> Path:
    script = [str(ROOT / "scripts" / "model"), "--print-folder"]
    return Path(
        subprocess.run(script, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    )


def model(name: str, kind: str, command: list[str], folder: Path) -> dict[str, Any]:
    """Guaranteed 160 of 256 MiB, and started by a request."""
    (folder / name).mkdir(mode=0o700)
    return {
        "name": name,
        "engine": kind,
        "instance": f"kvelastic_{LEDGER}_{name}",
        "memory": {"min": "160M"},
        "launch": {
            "on_demand": True,
            "port": free_port(),
            "command": command,
            "env": {
                **disk_tier(folder / name),
                "KVELASTIC_MIN": "160M",
            },
            "ready_timeout": "10m",
            "stop_timeout": "60s",
            "log_file": str(folder / f"{name}.log"),
        },
    }


def vllm(name: str, weights: Path, folder: Path) -> dict[str, Any]:
    """A real one."""
    command = [
        str(VLLM), "serve", str(weights), "--served-model-name", name, "--dtype", "float32",
        "--host", "127.0.0.1", "--port", "{port}", "--enforce-eager",
        "--max-model-len", "1024", "--max-num-seqs", "4",
        "--block-size", str(BLOCK_TOKENS), "--kv-cache-memory-bytes", str(192 << 20),
    ]  # fmt: skip
    return model(name, "vllm", command, folder)


def other(name: str, folder: Path) -> dict[str, Any]:
    """A fake one with real memory, which starts in a second."""
    command = [sys.executable, str(FAKES / "engine.py"), "--kind=openai", f"--model={name}"]
    return model(name, "openai", [*command, "--port={port}", "--instance"], folder)


def ask(front: Controller, name: str) -> list[int] | None:
    """The answer's tokens; None of the fake engine's."""
    answer = front.client.post(
        "/v1/completions",
        json={
            "model": name,
            "prompt": PROMPT,
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        },
        timeout=600,
    )
    assert answer.status_code == 200, (answer.text, list(front.lines)[-20:])
    tokens: list[int] | None = answer.json()["choices"][0].get("token_ids")
    return tokens


def counted(front: Controller, name: str, metric: str) -> float:
    """A counter of the engine, asked for through the controller."""
    lines = front.get(f"/upstream/{name}/metrics").text.splitlines()
    return sum(float(x.rsplit(" ", 1)[1]) for x in lines if x.startswith(f"vllm:{metric}{{"))


@pytest.mark.parametrize("neighbour", ["fake", pytest.param("vllm", marks=pytest.mark.soak)])
def test_restarted_vllm_reuses_kv_cache_from_tiers(
    smollm2: Path, tmp_path: Path, neighbour: str
) -> None:
    environ = engine_environment(KVELASTIC_LEDGER=LEDGER, KVELASTIC_HOST_MEMORY="256M")
    second = other("b", tmp_path) if neighbour == "fake" else vllm("b", smollm2, tmp_path)
    config = {
        "models": [vllm("a", smollm2, tmp_path), second],
        "swap": {"min_awake": 0},
        "sleep": {"queue_timeout": "10m", "wake_timeout": "10m"},
    }
    with Controller(config, environment=environ) as front:
        first = ask(front, "a")
        assert first
        assert counted(front, "a", "external_prefix_cache_hits_total") == 0
        pid = front.get("/admin/models/a/logs").json()["pid"]
        # It has the same weights, and tiers of its own.
        assert ask(front, "b") == (first if neighbour == "vllm" else None)
        assert (front.state("a"), front.state("b")) == ("asleep", "awake")
        again = ask(front, "a")
        assert again == first
        assert front.get("/admin/models/a/logs").json()["pid"] != pid
        computed = len(PROMPT) - counted(front, "a", "external_prefix_cache_hits_total")
        assert computed <= BLOCK_TOKENS
        assert counted(front, "a", "prefix_cache_hits_total") == 0
        assert (front.state("a"), front.state("b")) == ("awake", "asleep")
        models = front.get("/models").json()["models"].values()
        assert [each["last_problem"] for each in models] == [None, None]
        assert front.end() == 0
    wait_until(lambda: not [each for each in segment.list_segments() if LEDGER in each.name])
