"""`scripts/bench router`: the controller beside a bare proxy and the engine itself."""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

from benchmarks.harness import end_by_exception
from benchmarks.router import report, servers

CLIENTS = 32
CHUNKS = 128
"""Events of a stream; a chunk each."""
PACE_MS = 20
"""Between the events of the streams that are not as fast as can be: 50 tokens a second."""
RATE_PER_S = 300.0
"""Of the requests that come at a fixed rate: far below what any of the three can do."""


def plans(seconds: float) -> dict[str, dict[str, Any]]:
    """What the load is told, by the name of the measurement."""
    closed = {"clients": CLIENTS, "seconds": seconds}
    return {
        "requests": closed,
        "streams": closed | {"chunks": CHUNKS},
        "rate": closed | {"rate_per_s": RATE_PER_S},
        "paced": closed
        | {
            "chunks": CHUNKS // 4,
            "pace_ms": PACE_MS,
            "begin_over_s": CHUNKS // 4 * PACE_MS / 1000,
        },
        "stalls": {"program": "stalls", "seconds": 60.0},  # at most
    }


def measure(seconds: float, rounds: int, only: list[str]) -> report.Rounds:
    """All measurements, `rounds` times, the three in turns: `found[measurement][server]`."""
    todo = {name: plan for name, plan in plans(seconds).items() if not only or name in only}
    found: report.Rounds = {name: {each: [] for each in report.SERVERS} for name in todo}
    with servers.running() as running:
        for server in running.values():
            servers.load(server, {"clients": CLIENTS, "seconds": 1.0})  # all connections, all code
        for number in range(rounds):
            for name, plan in todo.items():
                # In turns, and not always the same one first: the machine changes speed.
                for each in report.SERVERS[number % 3 :] + report.SERVERS[: number % 3]:
                    found[name][each].append(servers.load(running[each], plan))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench router", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="3 short rounds, nothing is kept")
    parser.add_argument("--seconds", type=float, help="of each load")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--only", action="append", default=[], choices=list(plans(1.0)))
    arguments = parser.parse_args()
    seconds = arguments.seconds or (1.0 if arguments.quick else 4.0)
    rounds = arguments.rounds or (3 if arguments.quick else 9)
    load_before, began = os.getloadavg()[0], time.strftime("%Y-%m-%d %H:%M")
    found = measure(seconds, rounds, arguments.only)
    told = {
        "date": began,
        "load_before": round(load_before, 2),
        "clients": CLIENTS,
        "chunks": CHUNKS,
        "pace_ms": PACE_MS,
        "rate_per_s": RATE_PER_S,
        "seconds": seconds,
        "rounds": rounds,
    }
    print(report.table(found, told))
    if not arguments.quick and not arguments.only:
        report.keep(found, told)


if __name__ == "__main__":
    end_by_exception()
    main()
