"""What is recorded of requests and remembered of tasks: traces that replay, rings, descriptions."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import numpy as np
import pytest
from waiting import DEADLINE_S

from kvelastic.errors import InvalidArgumentError
from kvelastic.flexkv.common.config import CacheConfig, ModelConfig
from kvelastic.flexkv.common.debug import describe
from kvelastic.flexkv.common.storage import KVCacheLayout, KVCacheLayoutType
from kvelastic.flexkv.kvmanager import KVManager
from tools.flexkv_replay import read, replay

TOKENS, BLOCKS = 4, 16
MODEL = ModelConfig(num_layers=2, num_kv_heads=2, head_size=8, dtype="float16")
LAYOUT = KVCacheLayout(KVCacheLayoutType.LAYERFIRST, 2, BLOCKS, TOKENS, 2, 8)


def opened(path: Path | None = None) -> KVManager:
    cache = CacheConfig(tokens_per_block=TOKENS, num_cpu_blocks=64)
    cache.trace_path = None if path is None else str(path)
    manager = KVManager(MODEL, cache)
    manager.start()
    manager.register_kv_caches([np.zeros(LAYOUT.kv_shape, "float16")], LAYOUT)
    return manager


def serve(manager: KVManager) -> list[int]:
    """Some prompts with common beginnings; how many tokens each match has found."""
    pick = np.random.default_rng(2)
    found = []
    for _ in range(40):
        tokens = np.arange(int(pick.integers(1, 40))) + 1000 * int(pick.integers(3))
        match = manager.put_match if pick.random() < 0.5 else manager.get_match
        task, mask = match(tokens, namespace=["a"] if pick.random() < 0.3 else None)
        found.append(int(mask.sum()))
        if pick.random() < 0.2:
            manager.cancel(task)
        else:
            manager.launch(task, np.arange(found[-1]))
            manager.wait(task, DEADLINE_S, completely=True)
    return found


def test_trace_replays_with_the_same_hits(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    with opened(path) as manager:
        found = serve(manager)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with opened() as another:
        steps = list(replay(path, another))
    assert [step.recorded[1] for step in steps] == found
    assert sum(found) > 0
    assert all(step.found == step.recorded for step in steps)


def test_truncated_trace_ends_and_invalid_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    with opened(path) as manager:
        serve(manager)
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    assert len(list(read(path))) == whole.count(b"\n") - 1
    first, second, *_ = whole.splitlines(keepends=True)
    for bad, why in (
        (b"{}\n", "version"),
        (first + b"[]\n", "line 2"),
        (first + b"{nonsense\n", "line 2"),
        (first + json.dumps({"call": "get", "task": 1}).encode() + b"\n", "line 2"),
    ):
        path.write_bytes(bad)
        with opened() as manager, pytest.raises(InvalidArgumentError, match=why):
            list(replay(path, manager))
    assert second


def test_describe_shows_tiers_and_tasks() -> None:
    with opened() as manager:
        task, _ = manager.put_match(np.arange(8))
        text = describe(manager.task_engine)
        assert "CPU: " in text
        assert f"  {task} put unready, 8 tokens" in text
        manager.launch(task, np.arange(8))
        manager.wait(task, DEADLINE_S, completely=True)
        text = describe(manager.task_engine)
        assert "open tasks: 0" in text
        assert f"  {task} put completed, 8 tokens" in text
