"""What continuous batching does that an elastic cache must not fall for, with a real engine."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import needs
import pytest
from ledger_instance import BLOCKS_PER_PAGE, PAGE_BYTES, Instance
from transformers_process import TransformersEngine, make_prompts
from waiting import DEADLINE_S, wait_until

from kvelastic.device.process_memory import anonymous_bytes
from kvelastic.shared import ledger, segment
from kvelastic.shared.segment_listing import SegmentInfo, list_segments

pytestmark = [needs.transformers, pytest.mark.timeout(600)]

MIB = 1 << 20
PROMPTS = make_prompts(16, seed=21)
NAME = f"kvtrap_{os.getpid()}"


@contextmanager
def elastic(
    folder: Path,
    arguments: Sequence[str],
    series: str = needs.NEWEST_TRANSFORMERS,
    **environment: str,
) -> Iterator[TransformersEngine]:
    variables = {
        "ENABLE_KVELASTIC": "true",
        "KVELASTIC_IPC_NAME": NAME,
        "KVELASTIC_SANITY_CHECK": "true",
        **environment,
    }
    with TransformersEngine(series, folder / "elastic", arguments, variables) as engine:
        yield engine


def find_name(name: str) -> SegmentInfo | None:
    return next((info for info in list_segments() if info.name == name), None)


def is_idle(group: str) -> bool | None:
    """Whether the elastic engine has reported that no request is unfinished."""
    (info,) = [info for info in ledger.list_ledgers() if info.group == group]
    return next(member.is_idle for member in info.members if member.name == NAME)


def limit(size_bytes: int) -> Any:
    return segment.request(NAME, limit_bytes=size_bytes, wait_s=10)


@contextmanager
def both(
    folder: Path, arguments: Sequence[str], series: str = needs.NEWEST_TRANSFORMERS
) -> Iterator[tuple[TransformersEngine, TransformersEngine]]:
    """Stock and elastic, started together."""
    with (
        TransformersEngine(series, folder / "stock", arguments) as stock,
        elastic(folder, arguments, series) as engine,
    ):
        stock.wait_until_ready()
        engine.wait_until_ready()
        yield stock, engine
        assert engine.counters()["fatal_error"] is None
        assert engine.stop() == stock.stop() == 0


@pytest.mark.parametrize("series", ["5.17", needs.NEWEST_TRANSFORMERS])
def test_padding_child_sequences_and_second_session_match_stock(
    series: str, tmp_path: Path
) -> None:
    with both(tmp_path, ["--num-blocks", "127"], series) as (stock, engine):
        expected = stock.burst(PROMPTS, 24)
        assert engine.burst(PROMPTS, 24) == expected
        # Children share their parent's blocks, or copy them; and a second cache has its own name.
        children, wanted = [
            one.wait(one.submit(PROMPTS[4:12], 24, sequences=3)) for one in (engine, stock)
        ]
        assert children == wanted
        assert len(children) == 24
        found, batch_of_stock = [
            one.ask("generate_batch", prompts=PROMPTS[:4], max_new_tokens=24, sequences=3)
            for one in (engine, stock)
        ]
        assert found == batch_of_stock
        assert find_name(f"{NAME}_2") is None, "its memory has gone with its session"
        log = engine.log.read_text()
        assert log.count("besides the KV cache are reserved") == 2
        assert log.count(" 0 B of host besides the KV cache") == 1, "weights are counted once"

        # What a session leaves in the cache, the next one finds.
        engine.ask("restart")
        before = engine.counters()["prefix_tokens"]
        assert engine.burst(PROMPTS, 24) == expected
        assert engine.counters()["prefix_tokens"] > before

        # Under a low limit the little that is cached is kept: what is free is judged by the limit.
        assert limit(2 * MIB).state == "applied"
        engine.burst(PROMPTS[:2], 24)
        before = engine.counters()["prefix_tokens"]
        assert engine.burst(PROMPTS[:2], 24) == expected[:2]
        assert engine.counters()["prefix_tokens"] > before
        limit(1024 * MIB)

        # Padding reads the trash sector, whose page is a new one after sleep, and writes to it.
        engine.ask("pad")
        assert engine.burst(PROMPTS, 24) == expected
        for asleep in (True, False):
            assert segment.request(NAME, asleep=asleep, wait_s=DEADLINE_S).state == "applied"
        assert engine.burst(PROMPTS, 24) == expected


@pytest.mark.parametrize(
    ("model", "series"),
    [
        ("gemma", "5.17"),
        ("mistral", needs.NEWEST_TRANSFORMERS),
        ("gemma", needs.NEWEST_TRANSFORMERS),
    ],
)
def test_sliding_windows(model: str, series: str, tmp_path: Path) -> None:
    """Several kinds of attention divide sectors; blocks of windows are used in a ring."""
    arguments = ["--num-blocks", "127", "--model", model]
    if model == "gemma":  # it has no SDPA as of 5.24
        arguments += ["--attention", "eager"]
    with both(tmp_path, arguments, series) as (stock, engine):
        expected = stock.burst(PROMPTS, 32)
        assert engine.burst(PROMPTS, 32) == expected
        ids = engine.submit(PROMPTS, 32)
        limit(2 * MIB)
        assert engine.wait(ids) == expected
        wait_until(lambda: segment.inspect(NAME).usage["blocks_in_use"] == 0)


def test_cache_bound_keeps_the_head_of_a_prefix(tmp_path: Path) -> None:
    # A block is 4 MiB (256 tokens, 8 layers, 4 heads of 64), more than the smallest page.
    shape = ["--block-tokens", "256", "--num-blocks", "20", "--layers", "8"]
    shape += ["--kv-heads", "4", "--head-dim", "64"]
    prompt = [3 + index % 500 for index in range(1280)]
    with elastic(tmp_path, shape, KVELASTIC_MAX_CACHED_TOKENS="512") as engine:
        engine.wait_until_ready()
        first = engine.burst([prompt], 4)
        # Two of its five blocks stay, and they are of use only if they are the first two.
        assert segment.inspect(NAME).usage["cached_bytes"] == 8 * MIB
        assert engine.burst([prompt], 4) == first
        assert engine.counters()["prefix_tokens"] == 512


@pytest.mark.parametrize("series", ["5.17", needs.NEWEST_TRANSFORMERS])
def test_limit_applies_before_long_requests_end(series: str, tmp_path: Path) -> None:
    """A request has one block for all of its tokens, and needs no other: it would keep its page.

    Among short requests there are three long ones, as far from each other as a page has blocks.
    """
    shape = ["--block-tokens", "2048", "--num-blocks", "31", "--layers", "1"]
    shape += ["--kv-heads", "1", "--head-dim", "32"]
    with elastic(tmp_path, shape, series) as engine:
        engine.wait_until_ready()
        page_bytes = segment.inspect(NAME).usage["page_bytes"]
        a_page = page_bytes // (MIB // 2)
        lengths = [8 if place % a_page else 1500 for place in range(2 * a_page + 1)]
        prompts = make_prompts(len(lengths), seed=23)
        expected = engine.burst(prompts, 8)
        ids = engine.submit(prompts, lengths)
        long = [name for name, length in zip(ids, lengths, strict=True) if length > 8]
        short = [name for name in ids if name not in long]
        assert engine.wait(short) == [expected[ids.index(name)] for name in short]
        assert segment.inspect(NAME).usage["blocks_in_use"] == 3
        limit(page_bytes)
        wait_until(lambda: segment.inspect(NAME).usage["mapped_bytes"] <= page_bytes, "it holds")
        assert engine.ask("wait", ids=long, timeout_s=0.0)["unfinished"] == long
        for name in long:
            engine.cancel(name)
        assert engine.burst(prompts, 8) == expected
        assert engine.counters()["fatal_error"] is None
        assert engine.stop() == 0


@pytest.mark.parametrize("series", ["5.17", needs.NEWEST_TRANSFORMERS])
def test_large_address_range_costs_no_memory(series: str, tmp_path: Path) -> None:
    """Stock fills its masks and indices for all that could ever be read, at the start."""
    with (
        TransformersEngine(series, tmp_path / "stock", ["--num-blocks", "1024"]) as stock,
        elastic(tmp_path, ["--num-blocks", str(1 << 16)], series) as engine,
    ):
        stock.wait_until_ready()
        engine.wait_until_ready()
        expected = stock.burst(PROMPTS[:2], 8)
        assert engine.burst(PROMPTS[:2], 8) == expected
        more_bytes = anonymous_bytes(engine.pid) - anonymous_bytes(stock.pid)
        assert more_bytes < 50 * MIB, f"{more_bytes / MIB:.1f} MiB more than stock"


def test_different_engines_exchange_memory(tmp_path: Path) -> None:
    shared = {
        "KVELASTIC_LEDGER": f"test-{os.getpid()}-kinds",
        "KVELASTIC_HOST_MEMORY": str(6 * PAGE_BYTES),
        "KVELASTIC_PAGE_PREALLOC_ENABLED": "false",
        "KVELASTIC_MAX_CACHED_TOKENS": "-1",
        "KVELASTIC_RECLAIM_WAIT": "30",
    }
    prompts = make_prompts(16, seed=22, shortest=100, longest=200)
    with (
        Instance(**shared) as other,
        elastic(tmp_path, ["--block-tokens", "64", "--num-blocks", "80"], **shared) as engine,
    ):
        engine.wait_until_ready()
        expected = engine.burst(prompts, 24)
        assert segment.inspect(NAME).usage["mapped_bytes"] > PAGE_BYTES
        wait_until(lambda: is_idle(shared["KVELASTIC_LEDGER"]) is True, "no request is left")
        taken = other.alloc(5 * BLOCKS_PER_PAGE - 1)
        assert taken is not None, "what was cached is given up"
        assert segment.inspect(NAME).usage["mapped_bytes"] <= PAGE_BYTES
        other.free(taken)

        def takes_back() -> bool:
            """A burst fits into a page, too, and on a fast machine ends before the other gives."""
            assert engine.burst(prompts, 24) == expected
            return segment.inspect(NAME).usage["mapped_bytes"] > PAGE_BYTES

        wait_until(takes_back, "what the other one does not use comes back")

        engine.process.kill()
        engine.process.wait()
        assert other.alloc(6 * BLOCKS_PER_PAGE - 1) is not None, "all that the dead one held"
        segment.reap()
        assert find_name(NAME) is None
    ledger.reap()


def test_async_batching_is_refused(tmp_path: Path) -> None:
    with elastic(tmp_path, ["--set", "use_async_batching=true"]) as engine:
        answer = engine.first_answer()
    assert answer["error"] == "UnsupportedEngineError"
    assert "use_async_batching=True" in answer["message"]
    assert "Leave it unset" in answer["message"]
