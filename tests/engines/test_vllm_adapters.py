"""LoRA adapters that come and go while vLLM runs: the tokens of stock, also under a limit."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tiny_adapter
from engine_server import Request
from vllm_server import VllmServer, make_requests
from waiting import DEADLINE_S

from kvelastic.shared import segment

pytestmark = pytest.mark.timeout(1800)

NAME = f"kvelastic_adapters_{os.getpid()}"
REQUESTS = [one._replace(max_tokens=20) for one in make_requests(8, seed=7, shortest=100)]
ARGUMENTS = ("--enable-lora", "--max-loras", "2", "--max-cpu-loras", "3")
RUNTIME = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "true"}
ELASTIC = {
    "ENABLE_KVELASTIC": "true",
    "KVELASTIC_IPC_NAME": NAME,
    "KVELASTIC_SANITY_CHECK": "true",
}


def ask(server: VllmServer, adapter: str) -> list[list[int]]:
    def tokens_of(request: Request) -> list[int]:
        body = {"model": adapter, "prompt": request.prompt, "max_tokens": request.max_tokens}
        further = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
        answer = json.loads(server.post("/v1/completions", **body, **further))
        tokens: list[int] = answer["choices"][0]["token_ids"]
        return tokens

    with ThreadPoolExecutor(len(REQUESTS)) as threads:
        return list(threads.map(tokens_of, REQUESTS))


def limit(pages: int) -> None:
    limit_bytes = pages * segment.inspect(NAME).usage["page_bytes"]
    assert segment.request(NAME, limit_bytes=limit_bytes, wait_s=DEADLINE_S).state == "applied"


def answers_of(server: VllmServer, folder: Path, *, is_elastic: bool) -> list[list[list[int]]]:
    def load(name: str, seed: int) -> None:
        server.post("/v1/load_lora_adapter", lora_name=name, lora_path=str(folder / str(seed)))

    load("one", 1)
    answers = [ask(server, "one")]
    load("two", 2)
    answers += [ask(server, "two"), ask(server, "one")]
    if is_elastic:
        limit(2)
    answers.append(ask(server, "two"))
    server.post("/v1/unload_lora_adapter", lora_name="one")
    load("one", 3)  # another one by the same name
    answers.append(ask(server, "one"))
    if is_elastic:
        limit(1000)
        for is_asleep in (True, False):
            assert segment.request(NAME, asleep=is_asleep, wait_s=DEADLINE_S).state == "applied"
    answers += [ask(server, "one"), ask(server, "two")]
    server.post("/v1/unload_lora_adapter", lora_name="one")
    with server.refusing():
        body = {"model": "one", "prompt": [5, 6], "max_tokens": 2}
        assert server.request("/v1/completions", "POST", DEADLINE_S, body)[0] == 404
    return answers


def test_loaded_and_unloaded_adapters_match_stock(
    tiny_model: Path, log_folder: Path, tmp_path: Path
) -> None:
    for seed in (1, 2, 3):
        tiny_adapter.write(str(tmp_path / str(seed)), seed)
    with (
        VllmServer(tiny_model, log_folder / "adapters.stock.log", RUNTIME, ARGUMENTS) as stock,
        VllmServer(
            tiny_model, log_folder / "adapters.log", {**RUNTIME, **ELASTIC}, ARGUMENTS
        ) as elastic,
    ):
        stock.wait_until_ready()
        elastic.wait_until_ready()
        expected = answers_of(stock, tmp_path, is_elastic=False)
        assert expected[0] != expected[1]
        assert expected[0] != expected[4]
        assert answers_of(elastic, tmp_path, is_elastic=True) == expected
        # Before the end: vLLM's front end kills its engine core there, and may report it.
        assert "Traceback" not in elastic.log_but_for_refusals()
        assert elastic.stop() == 0
        assert "IntegrityError" not in elastic.text()
