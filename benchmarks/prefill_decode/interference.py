"""The time between tokens of running streams while long prompts arrive.

streams   4 requests at once, again and again until the last long prompt has its first token
prompts   one each interval, which is 1.5 times the prefill engine's time for a prompt
"""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from engine_server import Request
from prefill_decode_servers import RoleServer
from vllm_server import VllmServer

from benchmarks.harness import number, percentile
from benchmarks.pages import Table
from benchmarks.prefill_decode.engines import Engines, prefilled, prompt, without_hits
from benchmarks.vllm.streams import Answer, stream_all

STREAMS, STREAM_PROMPT_TOKENS, STREAM_TOKENS = 4, 16, 64
PROMPT_TOKENS, NEW_TOKENS = 976, 8
PART_BUSY = 2 / 3
"""Of the prefill engine's time."""
LEAST_PROMPTS, MOST_PROMPTS = 2, 12
ONE, AGAIN, HALF, TWO = (
    "one engine, all cores",
    "the same again",
    "one engine, half of the cores",
    "two engines, half each",
)


@dataclass
class Run:
    """What came back in one run."""

    gaps_s: list[float]
    """Between tokens of the streams, from the first prompt's arrival on."""
    first_s: list[float]
    """Of each long prompt, from its arrival to its first token."""
    answers: list[list[int]]
    """The long prompts' tokens, then each stream's."""


def measure(engines: Engines, run_s: float, rounds: int) -> Table:
    """Run each arrangement once a round, for about `run_s` seconds each."""
    streams = [
        _decided(engines.both, f"stream {index}", STREAM_PROMPT_TOKENS, STREAM_TOKENS)
        for index in range(STREAMS)
    ]
    interval_s = statistics.median(map(_prefill_s, [engines.prefill] * 3, "abc")) / PART_BUSY
    count = max(LEAST_PROMPTS, min(MOST_PROMPTS, int(run_s / interval_s)))
    before = engines.decode.pulled()
    found: dict[str, list[Run]] = {name: [] for name in (ONE, AGAIN, HALF, TWO)}
    differing = compared = 0
    for turn in range(rounds):
        prompts = [
            Request(prompt(f"long {turn} {index}", PROMPT_TOKENS), NEW_TOKENS)
            for index in range(count)
        ]
        for name in list(found)[:: -1 if turn % 2 else 1]:
            engines.forget()
            server, answer = _arrangement(engines, name)
            with without_hits(server):
                found[name].append(_run(server, streams, prompts, interval_s, answer))
        for runs in found.values():
            pairs = list(zip(found[ONE][-1].answers, runs[-1].answers, strict=True))
            differing += sum(one != other for one, other in pairs)
            compared += len(pairs) if runs is not found[ONE] else 0
    blocks = engines.decode.pulled() - before
    notes = [
        f"{rounds} rounds of {count} prompts of {PROMPT_TOKENS} tokens, one each"
        f" {interval_s:.2f} s, beside {STREAMS} streams. Blocks pulled in them: {blocks}.",
        f"Answers that differ from one engine's: {differing} of {compared}.",
    ]
    return _table(found, notes)


def _table(found: dict[str, list[Run]], notes: list[str]) -> Table:
    rows = []
    one_p99_s = percentile([gap for run in found[ONE] for gap in run.gaps_s], 99)
    for name, runs in found.items():
        gaps_s = [gap for run in runs for gap in run.gaps_s]
        p50_s, p99_s, longest_s = percentile(gaps_s, 50), percentile(gaps_s, 99), max(gaps_s)
        cells = [number(1e3 * value) for value in (p50_s, p99_s, longest_s)]
        first_s = statistics.median([value for run in runs for value in run.first_s])
        ratio = f"{p99_s / one_p99_s:.2f}"
        rows.append((name, str(len(gaps_s)), *cells, ratio, number(first_s)))
    between = ("p50 ms between tokens", "p99 ms", "longest ms", "p99 by one engine's")
    samples = {
        name: [{"gaps_s": run.gaps_s, "first_s": run.first_s} for run in runs]
        for name, runs in found.items()
    }
    headings = ("engines", "gaps", *between, "prompts: p50 s to the first token")
    return Table(headings, rows, notes, samples)


def _decided(server: VllmServer, seed: str, tokens: int, new_tokens: int) -> Request:
    """Return a request none of whose tokens is decided by rounding."""
    requests = (
        Request(prompt(f"{seed} {attempt}", tokens), new_tokens) for attempt in itertools.count()
    )
    return next(one for one in requests if server.decided(one) == one)


def _prefill_s(server: RoleServer, seed: str) -> float:
    return prefilled(server, Request(prompt(f"interval {seed}", PROMPT_TOKENS), 1))[1]


def _arrangement(engines: Engines, name: str) -> tuple[VllmServer, Callable[[Request], Answer]]:
    """Return the engine that streams, and how a long prompt is answered."""
    server = engines.both if name in {ONE, AGAIN} else engines.decode

    def answer(request: Request) -> Answer:
        ticket = {"kv_transfer_params": engines.prefill.prefill(request)} if name == TWO else {}
        (answer,) = stream_all(server.port, [request], 1, **ticket)
        return answer

    return server, answer


def _run(
    server: VllmServer,
    streams: Sequence[Request],
    prompts: Sequence[Request],
    interval_s: float,
    answer: Callable[[Request], Answer],
) -> Run:
    is_over = threading.Event()
    streaming = threading.Event()

    def stream() -> list[list[Answer]]:
        found = []
        while not is_over.is_set():
            found.append(stream_all(server.port, streams, len(streams)))
            streaming.set()
        return found

    def arrive(at_s: float, request: Request) -> Answer:
        time.sleep(max(0.0, at_s - time.perf_counter()))
        return answer(request)

    with ThreadPoolExecutor(1 + len(prompts)) as threads:
        streamed = threads.submit(stream)
        try:
            while not streaming.wait(1.0):  # the first streams warm the engine up
                if streamed.done():
                    streamed.result()
            begin_s = time.perf_counter()
            arrivals = [begin_s + index * interval_s for index in range(len(prompts))]
            answers = list(threads.map(arrive, arrivals, prompts))
        finally:
            is_over.set()
        batches = streamed.result()
    firsts = [one.events_s[0] for one in answers]
    gaps_s = [
        later - earlier
        for batch in batches
        for one in batch
        for earlier, later in itertools.pairwise(one.events_s)
        if begin_s <= earlier <= max(firsts)
    ]
    # An answer of a stream that differs from the stream's first one is kept beside it.
    by_stream = zip(*batches, strict=True)
    of_streams = [
        next((one.tokens for one in same if one.tokens != same[0].tokens), same[0].tokens)
        for same in by_stream
    ]
    return Run(
        gaps_s,
        [first - at for first, at in zip(firsts, arrivals, strict=True)],
        [*(one.tokens for one in answers), *of_streams],
    )
