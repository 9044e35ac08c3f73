"""Every cache shape that vLLM runs on a CPU: the same tokens on kvelastic as on stock vLLM."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_architectures import ARCHITECTURES
from vllm_server import engine_environment

HERE = Path(__file__).parent
DEADLINE_S = 1500.0

pytestmark = pytest.mark.timeout(2 * DEADLINE_S)

NAMES = (
    "gqa_odd_blocks",
    "mla",
    "full_and_sliding",
    "head_sizes_in_one_group",
    "mamba2_and_attention",
    "eagle",
)
"""One of each layout and way to the blocks; the others run with `--soak`."""
LAST = "ngram"  # after it vLLM finds no other drafts in that process
OTHERS = (*(name for name in ARCHITECTURES if name not in (*NAMES, LAST)), LAST)


def run_both(folder: Path, names: tuple[str, ...]) -> tuple[dict, dict]:
    """Stock vLLM and vLLM with kvelastic, side by side."""
    elastic = {
        "ENABLE_KVELASTIC": "true",
        "KVELASTIC_IPC_NAME": f"kvelastic_arch_{os.getpid()}",
        "KVELASTIC_MAX_CACHED_TOKENS": "-1",
    }
    running = []
    for kind, extra in (("stock", {}), ("elastic", elastic)):
        program, out = HERE / "architectures_engine.py", folder / f"{kind}.json"
        command = [sys.executable, program, out, *names]
        environment = engine_environment(VLLM_ENABLE_V1_MULTIPROCESSING="0", **extra)
        with (folder / f"{kind}.log").open("wb") as log:
            running.append(
                subprocess.Popen(
                    command,
                    env=environment,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
    try:
        for process in running:
            assert process.wait(DEADLINE_S) == 0, (folder / "elastic.log").read_text()[-4000:]
    finally:
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    stock, with_kvelastic = (
        json.loads((folder / f"{kind}.json").read_text()) for kind in ("stock", "elastic")
    )
    return stock, with_kvelastic


def check(folder: Path, names: tuple[str, ...]) -> None:
    stock, elastic = run_both(folder, names)
    wrong = {}
    for name in names:
        assert not isinstance(stock[name], str), f"stock vLLM does not run {name}: {stock[name]}"
        if isinstance(elastic[name], str):
            wrong[name] = elastic[name]
        elif elastic[name] != stock[name]:
            differ = [ours != its for ours, its in zip(elastic[name], stock[name], strict=True)]
            wrong[name] = f"tokens differ in the rounds {differ}"
    assert not wrong


def test_one_of_each_kind_of_cache(tmp_path: Path) -> None:
    check(tmp_path, NAMES)


@pytest.mark.soak
def test_all_others(tmp_path: Path) -> None:
    check(tmp_path, OTHERS)
