"""One burst at one model, and everything that is measured about it."""

from __future__ import annotations

import time
from dataclasses import dataclass

from benchmarks.two_models.client import Request, run_burst
from benchmarks.two_models.memory import MemoryWatch, Sample
from benchmarks.two_models.servers import Servers
from benchmarks.two_models.workload import MODELS


@dataclass(frozen=True)
class BurstResult:
    way: str
    model: str
    round_number: int
    begin_s: float
    """By the clock of the memory's samples."""
    total_s: float
    """Until the last token of the last answer."""
    first_token_s: list[float]
    queued_s: float
    """By vLLM's own account, the time that a request waited to be scheduled: the mean."""
    preemptions: int
    before: dict[str, Sample]
    after: dict[str, Sample]
    """Both models of this way, by model."""
    tokens: list[list[int]]

    @property
    def moved_bytes(self) -> int:
        """What the idle model has given up while this one was busy."""
        return sum(
            max(0, self.before[model].granted_bytes - self.after[model].granted_bytes)
            for model in MODELS
            if model != self.model
        )


def measure(
    servers: Servers, watch: MemoryWatch, way: str, model: str, number: int, requests: list[Request]
) -> BurstResult:
    """Send the burst, wait for its end; raises what `run_burst` raises."""
    server = servers[way, model]
    before, figures = _both(watch, way), server.metrics()
    begin_s, start_s = watch.now_s(), time.monotonic()
    answers = run_burst(server.port, requests)
    total_s = time.monotonic() - start_s
    after, later = _both(watch, way), server.metrics()

    def went_up(name: str) -> float:
        return later.get(name, 0.0) - figures.get(name, 0.0)

    return BurstResult(
        way,
        model,
        number,
        begin_s,
        total_s,
        [answer.first_token_s for answer in answers],
        went_up("request_queue_time_seconds_sum") / len(requests),
        round(went_up("num_preemptions_total")),
        before,
        after,
        [answer.tokens for answer in answers],
    )


def _both(watch: MemoryWatch, way: str) -> dict[str, Sample]:
    return {model: sample for (of, model), sample in watch.look().items() if of == way}
