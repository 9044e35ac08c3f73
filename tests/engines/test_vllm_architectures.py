"""Every cache shape that vLLM runs on a CPU: the same tokens on kvelastic as on stock vLLM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import needs
import pytest
from architectures_engine import serve_in_one_of
from killed_engines import kill_group
from tiny_architectures import ARCHITECTURES
from vllm_server import engine_environment

PROGRAM = Path(__file__).parents[1] / "programs" / "architectures_engine.py"
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
WITH_TRITON = "deepseek_v4"  # its process computes all that Triton does in the interpreter
OTHERS = (*(n for n in ARCHITECTURES if n not in (*NAMES, LAST, WITH_TRITON)), LAST)


def run_both(folder: Path, names: tuple[str, ...]) -> tuple[dict, dict]:
    """Stock vLLM and vLLM with kvelastic, side by side."""
    elastic = {
        "ENABLE_KVELASTIC": "true",
        "KVELASTIC_IPC_NAME": f"kvelastic_arch_{os.getpid()}",
        "KVELASTIC_MAX_CACHED_TOKENS": "-1",
    }
    running = []
    for kind, extra in (("stock", {}), ("elastic", elastic)):
        out = folder / f"{kind}.json"
        # Which types a processor has kernels for is what stock vLLM finds out for both.
        stock = ["--types-of", str(folder / "stock.json")] if kind == "elastic" else []
        command = [sys.executable, str(PROGRAM), str(out), *names, *stock]
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
            kill_group(process)
    stock, with_kvelastic = (
        json.loads((folder / f"{kind}.json").read_text()) for kind in ("stock", "elastic")
    )
    return stock, with_kvelastic


def check(folder: Path, names: tuple[str, ...]) -> None:
    stock, elastic = run_both(folder, names)
    wrong = {}
    for name in names:
        ours, its = elastic[name], stock[name]
        assert "error" not in its, f"stock vLLM does not run {name}: {its['error']}"
        if "error" in ours:
            wrong[name] = ours["error"]
        elif ours["rounds"] != its["rounds"]:
            differ = [a != b for a, b in zip(ours["rounds"], its["rounds"], strict=True)]
            wrong[name] = f"tokens differ in the rounds {differ}, in {its['dtype']}"
    assert not wrong


def test_one_model_of_each_cache_kind_matches_stock(tmp_path: Path) -> None:
    check(tmp_path, NAMES)


@pytest.mark.soak
def test_remaining_models_match_stock(tmp_path: Path) -> None:
    check(tmp_path, OTHERS)


@pytest.mark.soak
@needs.triton
def test_deepseek_v4_matches_mended_stock(tmp_path: Path) -> None:
    check(tmp_path, (WITH_TRITON,))


def test_dtype_without_cpu_kernel_is_skipped() -> None:
    """As with MLA in float32 where there is AMX."""
    tried = []

    def serve(dtype: str) -> list[str]:
        tried.append(dtype)
        if dtype == "float32":
            raise RuntimeError("expect weight to be bfloat16")
        return ["tokens"]

    assert serve_in_one_of(["float32", "bfloat16", "float16"], serve) == {
        "dtype": "bfloat16",
        "rounds": ["tokens"],
    }
    assert tried == ["float32", "bfloat16"]
    answer = serve_in_one_of(["float32"], serve)
    assert answer == {"error": "float32: RuntimeError: expect weight to be bfloat16"}
