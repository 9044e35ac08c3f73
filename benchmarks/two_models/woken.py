"""A woken model's first token, with room on the device and beside a neighbour that fills it.

The neighbour is idle and has filled the device with its cache, so a page has to come from it before
the woken model can run. The bar is `BAR_RATIO` times an ordinary request's time and the page's own
price: what a woken model's first request takes longer where there is room.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

from vllm_server import VllmServer

from benchmarks.two_models.client import make_burst, run_burst
from benchmarks.two_models.servers import SHARED, Servers, instance_name
from benchmarks.two_models.workload import MODELS, Workload
from kvelastic.shared import segment

BAR_RATIO = 1.5
_PROMPT_TOKENS = 16
_ANSWER_TOKENS = 8
_FILLING_REQUESTS = 16
_FILLING_TOKENS = 256
_MOST_FILLINGS = 30


@dataclass
class WokenResult:
    """Times to the first token, one a turn."""

    ordinary_s: list[float] = field(default_factory=list)
    with_room_s: list[float] = field(default_factory=list)
    beside_neighbour_s: list[float] = field(default_factory=list)

    @property
    def page_price_s(self) -> float:
        """What a page costs that nobody has to give up."""
        return max(0.0, statistics.median(self.with_room_s) - statistics.median(self.ordinary_s))

    @property
    def bar_s(self) -> float:
        """What the woken model's first token beside a full neighbour may take."""
        return BAR_RATIO * statistics.median(self.ordinary_s) + self.page_price_s


def measure(servers: Servers, workload: Workload) -> WokenResult:
    """Take turns; raises what `run_burst` raises. Both serve as before afterwards."""
    a, b = MODELS
    woken, neighbour = servers[SHARED, a], servers[SHARED, b]
    neighbours_name = instance_name(SHARED, b)
    result = WokenResult()
    for turn in range(workload.woken_turns):
        _first_token_s(woken, f"warm {turn}")
        result.ordinary_s.append(_first_token_s(woken, f"ordinary {turn}"))
        woken.post("/sleep?level=1")
        neighbour.post("/sleep?level=1")
        woken.post("/wake_up")
        result.with_room_s.append(_first_token_s(woken, f"with room {turn}"))
        woken.post("/sleep?level=1")
        neighbour.post("/wake_up")
        _fill(neighbour, neighbours_name, workload.budget_bytes, f"filling {turn}")
        woken.post("/wake_up")
        result.beside_neighbour_s.append(_first_token_s(woken, f"beside {turn}"))
    return result


def _first_token_s(server: VllmServer, seed: str) -> float:
    (answer,) = run_burst(server.port, make_burst(1, _PROMPT_TOKENS, _ANSWER_TOKENS, 0.1, seed))
    return answer.first_token_s


def _fill(server: VllmServer, name: str, budget_bytes: int, seed: str) -> None:
    """Send requests until the device has less than a page left."""
    for number in range(_MOST_FILLINGS):
        usage = segment.inspect(name).usage
        if usage["mapped_bytes"] + usage["page_bytes"] > budget_bytes:
            return
        burst = make_burst(_FILLING_REQUESTS, _FILLING_TOKENS, 8, 0.1, f"{seed} {number}")
        run_burst(server.port, burst)
    raise AssertionError(f"{name} does not fill the device")
