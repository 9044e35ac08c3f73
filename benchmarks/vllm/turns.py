"""Turns: the same requests to one server, then to the other; who begins changes every time."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from engine_server import Request
from vllm_server import VllmServer

from benchmarks.vllm.servers import ORDER, Servers, mapped_bytes
from benchmarks.vllm.streams import stream_all
from benchmarks.vllm.workload import Load

WARM_UP_TURNS = 2
REST_S = 1.5
"""Before a turn. vLLM's worker looks for work without pause for a second after its last step, on
the core that the other server's worker is bound to as well."""
WAKING = Request([3] * 8, 8)
"""Asked before the clock starts: after a rest, stock vLLM's first step may be a second late."""
Tokens = list[list[int]]


@dataclass(frozen=True)
class Turn:
    """What one server made of one turn."""

    server: str
    number: int
    total_s: float
    """From the first request sent to the last token."""
    tokens: int
    gaps_s: list[float]
    first_token_s: list[float]
    cpu_s: dict[str, float]
    """By the process's role."""
    preemptions: int
    steps: int
    mapped_bytes: int
    """Of the elastic cache, at the turn's end."""
    machine_load: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.total_s


@dataclass
class Compared:
    """All turns of one load, pair by pair, and which requests differed."""

    load: Load
    turns: dict[str, list[Turn]]
    differing: list[Request]
    differing_from_itself: int | None = None
    """Of those, how many stock vLLM answers otherwise when it is asked them alone."""


def compare(servers: Servers, load: Load) -> Compared:
    """All turns; raises what `stream_all` raises."""
    found = Compared(load, {name: [] for name in ORDER}, [])
    for number in range(-WARM_UP_TURNS, load.turns):
        requests = load.turn(number)
        answers: dict[str, Tokens] = {}
        for name in ORDER if number % 2 else ORDER[::-1]:
            turn, answers[name] = _turn(servers, load, name, number, requests)
            if number >= 0:
                found.turns[name].append(turn)
        pairs = zip(requests, *(answers[name] for name in ORDER), strict=True)
        wrong = [request for request, one, other in pairs if one != other]
        found.differing += wrong
        if number >= 0:
            _say(found, len(wrong))
    if found.differing:
        stock = servers[ORDER[0]]
        found.differing_from_itself = sum(_differs_alone(stock, each) for each in found.differing)
    return found


def _turn(
    servers: Servers, load: Load, name: str, number: int, requests: list[Request]
) -> tuple[Turn, Tokens]:
    server = servers[name]
    time.sleep(REST_S)
    server.complete(WAKING)
    figures, cpu_before = server.metrics(), servers.cpu_s(name)
    answers = stream_all(server.port, requests, load.at_once)
    cpu_after, later = servers.cpu_s(name), server.metrics()

    def went_up(figure: str) -> int:
        return round(later.get(figure, 0.0) - figures.get(figure, 0.0))

    begin_s = min(answer.sent_s for answer in answers)
    turn = Turn(
        server=name,
        number=number,
        total_s=max(answer.events_s[-1] for answer in answers) - begin_s,
        tokens=sum(len(answer.tokens) for answer in answers),
        gaps_s=[gap for answer in answers for gap in answer.gaps_s],
        first_token_s=[answer.first_token_s for answer in answers],
        cpu_s={role: cpu_after[role] - cpu_before[role] for role in cpu_after},
        preemptions=went_up("num_preemptions_total"),
        steps=went_up("iteration_tokens_total_count"),
        mapped_bytes=mapped_bytes() if name != ORDER[0] else 0,
        machine_load=os.getloadavg()[0],
    )
    return turn, [answer.tokens for answer in answers]


def _differs_alone(server: VllmServer, request: Request) -> bool:
    """Whether this server gives one request two answers: alone, and in company."""
    alone = server.complete(request)
    crowd = stream_all(server.port, [request] * 8, at_once=8)
    return any(answer.tokens != alone for answer in crowd)


def _say(found: Compared, wrong: int) -> None:
    stock, elastic = (found.turns[name][-1] for name in ORDER)
    print(
        f"  {time.strftime('%H:%M:%S')} {found.load.name} turn {stock.number + 1}:"
        f" {elastic.tokens_per_s:,.0f} tok/s beside {stock.tokens_per_s:,.0f} stock"
        f" ({elastic.tokens_per_s / stock.tokens_per_s:.3f}),"
        f" CPU {sum(elastic.cpu_s.values()) / sum(stock.cpu_s.values()):.3f},"
        f" {elastic.preemptions} and {stock.preemptions} preempted, {wrong} differ,"
        f" load {stock.machine_load:.1f}",
        flush=True,
    )
