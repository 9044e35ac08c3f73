"""vLLM: the time to the first token of a prompt that was answered before and evicted since.

Each round has prompts of its own: one is answered cold, then again from vLLM's own prefix cache,
after a limit of one page, after a sleep, and after another model has taken the memory. The ratios
are to the cold answer of the same prompt. A control is another cold prompt. Tokens are compared
with the cold answer's, and all but a last block has to be found: else the part ends with an error.

A disk that takes a second a record is to cost next to nothing: a tier that is slower than computing
is not used.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from slow_disk import SlowDisk
from vllm_server import BLOCK_TOKENS

from benchmarks.harness import Figure
from benchmarks.ledger.instance import BLOCKS_PER_PAGE, Instance
from benchmarks.tiers.served import CACHE_BYTES, PROMPT_TOKENS, First, Served, prompt
from benchmarks.vllm.models import prepare

ROUNDS = 5
KILLS = 3
SLOW_ROUNDS = 6
SLOW_S = 1.0
TAKER_PAGE_MIB = 16
DEADLINE_S = 60.0
SETTLED_S = 3.0
"""Longer than `KVELASTIC_TIER_IDLE_SECONDS` plus the half second of the status file."""
WAYS = ("own prefix cache", "limit and back", "sleep and wake", "reclaim")


def figures() -> list[Figure]:
    """Milliseconds to the first token, beside those of computing the prompt."""
    with TemporaryDirectory(prefix="kvelastic-bench-tiers-", dir="/var/tmp") as folder:
        model = prepare("smollm2", Path(folder)).folder
        return [*_evicted(model, Path(folder)), *_slow_disk(model, Path(folder))]


def _figure(name: str, bar: str = "") -> Figure:
    return Figure(f"first token: {name}", "ms", [], bar, floor_name="cold")


def _evicted(model: Path, folder: Path) -> list[Figure]:
    rows = {way: _figure(way, "ratio <= 0.15") for way in WAYS}
    rows[WAYS[0]].bar = ""
    control = _figure("control: cold beside cold")
    with Served(model, folder) as served:
        ways: dict[str, Callable[[], None]] = {
            "own prefix cache": lambda: None,
            "limit and back": served.evict,
            "sleep and wake": served.sleep_and_wake,
        }
        served.ask(prompt("warms up"))
        for number in range(ROUNDS):
            tokens = prompt(f"round {number}")
            cold = served.ask(tokens)
            for way, evict in ways.items():
                evict()
                again = served.ask(tokens)
                again.check(cold)
                _note(rows[way], again, cold)
            _note(control, served.ask(prompt(f"control {number}")), cold)
            tokens = prompt(f"reclaim {number}")
            cold = _answer_and_rest(served, tokens)
            _take_all(served)
            again = served.ask(tokens)
            again.check(cold)
            _note(rows["reclaim"], again, cold)
        return [*rows.values(), control, _killed(served)]


def _killed(served: Served) -> Figure:
    """SIGKILL with all blocks clean, as idleness makes them, and another start over the folder."""
    row = _figure("SIGKILL and restart", "ratio <= 0.25")
    for number in range(KILLS):
        tokens = prompt(f"kill {number}")
        cold = _answer_and_rest(served, tokens)
        served.kill()
        served.start()
        served.ask(prompt(f"warms up {number}", tokens=PROMPT_TOKENS // 4))
        again = served.ask(tokens)
        again.check(cold)
        _note(row, again, cold)
    found = again.loaded // BLOCK_TOKENS
    row.note = f"{found} of {PROMPT_TOKENS // BLOCK_TOKENS} blocks found (bar: 99 %)"
    return row


def _answer_and_rest(served: Served, tokens: list[int]) -> First:
    """A cold answer, and then no work until all that is cached has been copied."""
    cold = served.ask(tokens)
    end_s = time.monotonic() + DEADLINE_S
    stored, since_s = _stored(served), time.monotonic()
    while time.monotonic() < since_s + SETTLED_S:
        if time.monotonic() > end_s:
            raise AssertionError(f"idle, and never done: {served.status_file()}")
        time.sleep(0.1)
        if (now := _stored(served)) != stored:
            stored, since_s = now, time.monotonic()
    return cold


def _stored(served: Served) -> int:
    return sum(tier.puts for tier in served.status_file().tiers)


def _take_all(served: Served) -> None:
    """Another model needs all there is, and gives it back."""
    pages = CACHE_BYTES // (TAKER_PAGE_MIB << 20)
    environ = {
        "KVELASTIC_DEVICE": "host",
        "KVELASTIC_LEDGER": served.group,
        "KVELASTIC_HOST_MEMORY": str(CACHE_BYTES),
        "KVELASTIC_MAX_CACHED_TOKENS": "-1",
        "KVELASTIC_PAGE_PREALLOC_ENABLED": "false",
    }
    with Instance(pages, TAKER_PAGE_MIB, **environ) as taker:
        taker.read()
        # All but what its null block and the giver's hold.
        blocks = (pages - 1) * BLOCKS_PER_PAGE - 2 * BLOCKS_PER_PAGE
        got = taker.ask("alloc_until", blocks, DEADLINE_S)["result"]
        if got["ids"] is None:
            raise AssertionError(f"the taker got nothing: {got}")
        taker.ask("free", got["ids"])


def _slow_disk(model: Path, folder: Path) -> list[Figure]:
    """Prompts that lie on the disk only, which takes a second for each record from then on."""
    work_folder = folder / "slow"
    work_folder.mkdir()
    row = _figure("a disk of 1 s a record", "ratio <= 1.1")
    control = _figure("control: cold beside cold, disk as it is")
    slow = SlowDisk(work_folder, work_folder / "disk")
    with Served(model, work_folder, slow.environment, under=slow.under) as served:
        served.ask(prompt("warms up"))
        known = [(name, served.ask(prompt(name))) for name in map(str, range(SLOW_ROUNDS))]
        served.evict()
        slow.delay(SLOW_S)
        for name, cold in known:
            again = served.ask(prompt(name))
            again.check(cold, most_computed=PROMPT_TOKENS)
            # Beside a prompt that no tier has, of the same minute.
            fresh = served.ask(prompt(f"{name}, fresh"))
            _note(row, again, fresh)
            _note(control, cold, fresh)
        slow.delay(0)
    row.note = f"each: {', '.join(f'{ratio:.2f}' for ratio in _ratios(row))}"
    return [row, control]


def _ratios(row: Figure) -> list[float]:
    return [mine / other for mine, other in zip(row.samples, row.floor_samples, strict=True)]


def _note(row: Figure, one: First, floor: First) -> None:
    row.samples.append(one.first_token_ms)
    row.floor_samples.append(floor.first_token_ms)
