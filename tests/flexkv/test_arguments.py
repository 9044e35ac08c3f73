"""Arguments that cannot be: each is an error of its call, with a server and without one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvelastic.errors import InvalidArgumentError, UnsupportedError
from kvelastic.flexkv.common.config import CacheConfig, ModelConfig
from kvelastic.flexkv.common.request import KVResponseStatus
from kvelastic.flexkv.kvtask import KVTaskEngine
from kvelastic.flexkv.server.client import KVDPClient
from kvelastic.flexkv.server.server import KVServer

MODEL = ModelConfig(num_layers=1, num_kv_heads=1, head_size=4, dtype="float16")
CACHE = CacheConfig(tokens_per_block=4, num_cpu_blocks=16)
PROMPT = np.arange(8)
MOST_TOKENS, MOST_TASKS = 1 << 20, 4096
Tasks = KVTaskEngine | KVDPClient


@pytest.fixture(scope="module", params=["in process", "served"])
def tasks(request: Any, tmp_path_factory: Any) -> Iterator[Tasks]:
    with ExitStack() as ends:
        if request.param == "in process":
            engine = KVTaskEngine(MODEL, CACHE)
            engine.start()
            ends.callback(engine.shutdown)
            yield engine
            return
        folder: Path = tmp_path_factory.mktemp("server")
        server = KVServer(MODEL, CACHE, server_recv_port=f"ipc://{folder}/s")
        ends.callback(server.close)
        client = KVDPClient(server.server_recv_port, MODEL)
        ends.callback(client.unregister)
        client.start()
        yield client


BAD: dict[str, Callable[[Any], object]] = {
    "tokens of two axes": lambda t: t.get_match(np.zeros((2, 2), int)),
    "tokens of floats": lambda t: t.put_match(np.zeros(4)),
    "one token too many": lambda t: t.get_match(np.zeros(MOST_TOKENS + 1, int)),
    "one token too many to prefetch": lambda t: t.prefetch_async(np.zeros(MOST_TOKENS + 1, int)),
    "a mask of as many bytes": lambda t: t.get_match(PROMPT, np.ones(7, bool)),
    "a mask of integers": lambda t: t.get_match(PROMPT, np.ones(8, int)),
    "a namespace that is a text": lambda t: t.get_match(PROMPT, namespace="lora"),
    "a namespace of numbers": lambda t: t.put_match(PROMPT, namespace=[1]),
    "65 names": lambda t: t.get_match(PROMPT, namespace=["x"] * 65),
    "a name that is too long": lambda t: t.prefetch_async(PROMPT, namespace=["x" * 4097]),
    "a name with NUL": lambda t: t.get_match(PROMPT, namespace=["a\0b"]),
    "a name that is no text": lambda t: t.get_match(PROMPT, namespace=["\udcff"]),
    "a client that is a text": lambda t: t.get_match(PROMPT, dp_id="0"),
    "another client": lambda t: t.put_match(PROMPT, dp_id=1),
    "layers that are a text": lambda t: t.get_match(PROMPT, None, "all"),
    "more layers than a message holds": lambda t: t.get_match(PROMPT, None, 1 << 70),
    "no slots": lambda t: t.get_async(PROMPT, None),
    "slots that are a text": lambda t: t.put_async(PROMPT, "slots"),
    "a launch of a text": lambda t: t.launch("1", [PROMPT]),
    "a launch of two with slots for one": lambda t: t.launch([1, 2], [PROMPT]),
    "a launch of one task twice": lambda t: t.launch([1, 1], [PROMPT, PROMPT]),
    "a launch of what is not known": lambda t: t.launch(99, PROMPT),
    "a task that is a float": lambda t: t.wait(1.5),
    "a task that no number is for": lambda t: t.try_wait([1 << 70]),
    "too many tasks": lambda t: t.cancel(range(MOST_TASKS + 1)),
    "a wait of a text": lambda t: t.wait(1, "20"),
    "a wait of no number": lambda t: t.wait(1, float("nan")),
}


@pytest.mark.parametrize("call", BAD.values(), ids=list(BAD))
def test_invalid_argument_raises_and_keeps_the_connection(
    tasks: Tasks, call: Callable[[Any], object]
) -> None:
    task, _ = tasks.put_match(PROMPT)
    with pytest.raises((InvalidArgumentError, UnsupportedError)):
        call(tasks)
    # The connection and what it holds are still there.
    assert tasks.try_wait(task)[task].status is KVResponseStatus.UNREADY
    tasks.cancel(task)


def test_arguments_at_the_bounds_are_accepted(tasks: Tasks) -> None:
    flag: Any = np.True_
    found = [
        tasks.get_match(np.full(MOST_TOKENS, 1 << 40), np.ones(MOST_TOKENS, bool))[0],
        tasks.get_match(PROMPT, namespace=["x" * 4096] * 64, cpu_only=flag)[0],
        tasks.prefetch_async(tuple(range(8)), namespace=("lora",)),
    ]
    assert tasks.wait(found, float("inf"), completely=flag).keys() == set(found)
    assert tasks.wait(np.int64(found[0]), -1).keys() == {found[0]}
    assert tasks.wait(range(1000, 1000 + MOST_TASKS), np.float64(0)).keys() >= {1000}
