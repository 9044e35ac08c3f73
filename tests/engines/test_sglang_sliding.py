"""Layers with sliding windows beside full ones, in one full cache as SGLang makes it on a CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import needs
import pytest
from sglang_pair import check_log, tokens_of
from sglang_server import PAGE_TOKENS, SglangServer
from transformers_process import make_prompts
from vllm_server import zero_worker_memory

from kvelastic.shared import segment

pytestmark = [needs.sglang, pytest.mark.soak, pytest.mark.timeout(600)]

PROGRAM = Path(__file__).parents[1] / "programs" / "tiny_architectures.py"
PAGE_BYTES = 2 << 20
PROMPTS = make_prompts(12, seed=3, shortest=100, longest=400, shared_tokens=2 * PAGE_TOKENS)
NEW_TOKENS = 24


def test_same_tokens_as_stock(tmp_path: Path) -> None:
    model, name = tmp_path / "model", f"kvsgl_sliding_{os.getpid()}"
    subprocess.run([sys.executable, PROGRAM, "loud_mostly_sliding", model], check=True)
    environment = {
        "ENABLE_KVELASTIC": "true",
        "KVELASTIC_IPC_NAME": name,
        "KVELASTIC_SANITY_CHECK": "true",
    }
    page_size = ("--page-size", str(PAGE_TOKENS))
    with (
        SglangServer(model, tmp_path / "stock.log", {}, page_size) as stock,
        SglangServer(model, tmp_path / "elastic.log", environment) as elastic,
    ):
        expected = tokens_of(stock.wait_until_ready().generate_all(PROMPTS, NEW_TOKENS))
        elastic.wait_until_ready()
        for _ in ("cold", "cached"):
            assert tokens_of(elastic.generate_all(PROMPTS, NEW_TOKENS)) == expected
        segment.request(name, limit_bytes=2 * PAGE_BYTES, wait_s=30)
        assert tokens_of(elastic.generate_all(PROMPTS, NEW_TOKENS)) == expected
        segment.request(name, limit_bytes=1 << 30, wait_s=10)
        elastic.generate_all(PROMPTS, NEW_TOKENS)
        # The control: the comparison does see bad KV.
        assert zero_worker_memory(elastic.scheduler()) > 0
        assert tokens_of(elastic.generate_all(PROMPTS, NEW_TOKENS)) != expected
        elastic.stop()
        check_log(elastic)
