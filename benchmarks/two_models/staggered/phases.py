"""The schedule's phases, and what is measured in each.

    a begins   a's burst   b begins   b's burst   a comes back   b comes back

While one model has its burst the other one is asked a little now and then. Without a prefix cache
nobody finds anything when he comes back: the last two are left out.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from vllm_server import VllmServer

from benchmarks.two_models.client import run_burst
from benchmarks.two_models.servers import Servers
from benchmarks.two_models.staggered.conversations import Conversations, probe
from benchmarks.two_models.staggered.plan import Plan
from benchmarks.two_models.workload import MODELS

_LOOK_S = 0.5


@dataclass(frozen=True)
class Phase:
    """All conversations of one model take one turn."""

    model: str
    turn: int

    @property
    def is_burst(self) -> bool:
        """Whether it counts: in the first turn the conversations only begin."""
        return self.turn > 1

    @property
    def name(self) -> str:
        """As results have it."""
        return f"{self.model} {('begins', 'burst', 'comes back')[self.turn - 1]}"


def phases(*, prefix_cache: bool) -> list[Phase]:
    """In their order."""
    a, b = MODELS
    begun = [Phase(a, 1), Phase(a, 2), Phase(b, 1), Phase(b, 2)]
    return [*begun, Phase(a, 3), Phase(b, 3)] if prefix_cache else begun


@dataclass(frozen=True)
class PhaseResult:
    """What one way has made of a phase."""

    way: str
    phase: Phase
    first_token_s: list[float]
    """By the order in which the requests came."""
    probe_first_token_s: list[float]
    total_s: float
    """Until the last token of the last answer."""
    queued_s: float
    """By vLLM's own account, the time that a request waited to be scheduled: the mean."""
    preemptions: int
    prompt_tokens: int
    own_hit_tokens: int
    """Found in vLLM's prefix cache."""
    outside_hit_tokens: int
    """Found in an offload or in a tier."""
    most_used: float
    """The largest part of its blocks that the model had in use at one look."""
    tokens: list[list[int]]

    @property
    def hit_tokens(self) -> int:
        """Of the prompts those that were not computed again."""
        return self.own_hit_tokens + self.outside_hit_tokens


def measure(
    servers: Servers, way: str, phase: Phase, plan: Plan, conversations: Conversations
) -> PhaseResult:
    """Carry out one phase in one way; raises what `run_burst` raises."""
    (other,) = set(MODELS) - {phase.model}
    server = servers[way, phase.model]
    requests = conversations.requests(phase.turn)
    before = server.metrics()
    with (
        _looking(server) as used,
        _probing(servers[way, other], other, plan, phase) as probed,
    ):
        start_s = time.monotonic()
        answers = run_burst(server.port, requests)
        total_s = time.monotonic() - start_s
    after = server.metrics()

    def went_up(name: str) -> float:
        return after.get(name, 0.0) - before.get(name, 0.0)

    conversations.heard(phase.turn, [answer.tokens for answer in answers])
    return PhaseResult(
        way,
        phase,
        [answer.first_token_s for answer in answers],
        probed,
        total_s,
        went_up("request_queue_time_seconds_sum") / len(requests),
        round(went_up("num_preemptions_total")),
        sum(len(request.prompt) for request in requests),
        round(went_up("prefix_cache_hits_total")),
        round(went_up("external_prefix_cache_hits_total")),
        max(used, default=0.0),
        [answer.tokens for answer in answers],
    )


@contextmanager
def _repeating(what: threading.Thread, over: threading.Event) -> Iterator[None]:
    what.start()
    try:
        yield
    finally:
        over.set()
        what.join()


@contextmanager
def _looking(server: VllmServer) -> Iterator[list[float]]:
    """How much of its KV cache the server has in use, every half second."""
    used: list[float] = []
    over = threading.Event()

    def look() -> None:
        while not over.wait(_LOOK_S):
            used.append(server.metrics().get("kv_cache_usage_perc", 0.0))

    with _repeating(threading.Thread(target=look, daemon=True), over):
        yield used


@contextmanager
def _probing(server: VllmServer, model: str, plan: Plan, phase: Phase) -> Iterator[list[float]]:
    """Ask the model without a burst a little; raises in the end what one of them raised."""
    first_token_s: list[float] = []
    failures: list[Exception] = []
    over = threading.Event()

    def ask() -> None:
        number = 100 * phase.turn
        try:
            while not over.wait(plan.probe_every_s):
                (answer,) = run_burst(server.port, [probe(model, number)])
                first_token_s.append(answer.first_token_s)
                number += 1
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    if not phase.is_burst:
        over.set()
    with _repeating(thread, over):
        yield first_token_s
    if failures:
        raise failures[0]
