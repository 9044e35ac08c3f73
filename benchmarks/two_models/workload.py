"""What is sent to whom, and how much memory there is for it: every number of this benchmark.

One burst needs most of the budget and clearly more than half of it. Prompts and answers are of
similar length: the prompts of one burst alone do not fit into half of the budget, so a request that
comes late has to wait there until earlier answers are finished.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from benchmarks.two_models.client import Request, make_burst

MIB = 1 << 20
BLOCK_TOKENS = 32
BLOCK_BYTES = BLOCK_TOKENS * 30 * 2 * 3 * 64 * 4
"""SmolLM2-135M: 30 layers, K and V, 3 heads of 64, float32."""
PAGE_BYTES = 24 * MIB
"""What kvelastic makes of such blocks; a run compares it with what it finds."""
MODELS = ("a", "b")
_SPREAD = 0.75
"""A burst's arrivals, by the time that its answers take."""


@dataclass(frozen=True)
class Workload:
    rounds: int
    """Bursts at each model, in each of the two ways."""
    requests: int = 20
    prompt_tokens: int = 192
    answer_tokens: int = 128
    over_s: float = 0.0
    """The time in which a burst's requests come: see `on_machine`."""
    budget_pages: int = 14
    woken_turns: int = 5
    """How often a model is woken beside a full neighbour."""
    new_rounds_for_s: float = 420.0
    """No round begins later than this after the first."""

    def on_machine(self, step_s: float) -> Workload:
        """Have a burst come faster than its first answers end, where a step takes so long.

        All requests are under way at once then, and need the same memory on any processor.
        """
        return replace(self, over_s=_SPREAD * self.answer_tokens * step_s)

    @property
    def budget_bytes(self) -> int:
        return self.budget_pages * PAGE_BYTES

    @property
    def half_bytes(self) -> int:
        return self.budget_bytes // 2

    @property
    def request_bytes(self) -> int:
        """The blocks of one request at its end, at the most."""
        return math.ceil((self.prompt_tokens + self.answer_tokens) / BLOCK_TOKENS) * BLOCK_BYTES

    @property
    def burst_bytes(self) -> int:
        """All requests of a burst at their ends, at the most."""
        return self.requests * self.request_bytes

    @property
    def part(self) -> float:
        """What a burst needs at once at the most, as a part of a half."""
        return self.burst_bytes / self.half_bytes

    def burst(self, round_number: int, model: str) -> list[Request]:
        """The same in both ways, another one for each model and round."""
        return make_burst(
            self.requests,
            self.prompt_tokens,
            self.answer_tokens,
            self.over_s,
            f"round {round_number} of {model}",
        )


WHOLE = Workload(rounds=3)
QUICK = Workload(rounds=1, answer_tokens=96, woken_turns=2)
