"""Scheduler and worker in one process, and the layout that gives every layer pages of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from vllm_server import engine_environment, make_requests

pytestmark = pytest.mark.timeout(1500)

PROGRAM = Path(__file__).parents[1] / "programs" / "inprocess_engine.py"


def generate(model: Path, folder: Path, run: str, **environment: str) -> list[list[int]]:
    requests, tokens = folder / "requests.json", folder / f"{run}.json"
    requests.write_text(json.dumps(make_requests(24, seed=11)))
    subprocess.run(
        [sys.executable, PROGRAM, model, requests, tokens],
        env=engine_environment(VLLM_ENABLE_V1_MULTIPROCESSING="0", **environment),
        check=True,
        timeout=420,
    )
    found: list[list[int]] = json.loads(tokens.read_text())
    return found


def test_same_tokens_in_one_process_in_both_layouts(tiny_model, tmp_path) -> None:
    name = f"kvelastic_inprocess_{os.getpid()}"
    elastic = {"ENABLE_KVELASTIC": "true", "KVELASTIC_IPC_NAME": name}
    expected = generate(tiny_model, tmp_path, "stock")
    assert generate(tiny_model, tmp_path, "paged", **elastic) == expected
    assert not (Path("/dev/shm") / name).exists()
    layers = generate(
        tiny_model, tmp_path, "layers", **elastic, KVELASTIC_CONTIGUOUS_LAYOUT="false"
    )
    assert layers == expected
    assert not (Path("/dev/shm") / name).exists()
