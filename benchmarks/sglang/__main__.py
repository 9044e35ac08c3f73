"""`scripts/bench sglang`: SGLang with kvelastic against stock SGLang, and stock against itself.

    scripts/bench sglang                  about six minutes
    scripts/bench sglang --quick          about two; its figures are no evidence

README.md says what the figures mean.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import permutations
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import psutil
from sglang_server import PAGE_TOKENS, SglangServer

from benchmarks.harness import end_by_exception, facts
from benchmarks.transformers import results
from benchmarks.transformers.comparison import headings, row
from benchmarks.transformers.results import Part, Table
from benchmarks.transformers.workload import AT_ONCE, TINY, Load
from benchmarks.vllm.models import prepare
from kvelastic import segment

STOCK, AGAIN, ELASTIC = NAMES = ("stock", "stock again", "kvelastic")
INSTANCE = f"bench_sglang_{os.getpid()}"
FOLDER = Path(__file__).parent / "results"
LOAD = replace(TINY, starts=2, turns=10)
_ORDERS = list(permutations(NAMES))
_NO_STRICT_CHECK = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "0"}
_ELASTIC = {
    "ENABLE_KVELASTIC": "true",
    "KVELASTIC_IPC_NAME": INSTANCE,
    "KVELASTIC_LEDGER": f"bench-sglang-{os.getpid()}",
}


@dataclass(frozen=True)
class Turn:
    """What one server made of one turn."""

    engine: str
    number: int
    total_s: float
    """From the first request sent to the last answer."""
    cpu_s: float
    """User and system, of all processes of the server."""
    tokens: int

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.total_s

    @property
    def cpu_us_a_token(self) -> float:
        return 1e6 * self.cpu_s / self.tokens


@contextmanager
def started(model: Path, folder: Path) -> Iterator[dict[str, SglangServer]]:
    """All three, ready. Raises `AssertionError` for one that does not start, or is not elastic."""
    with ExitStack() as ends:
        servers = {
            name: ends.enter_context(
                SglangServer(
                    model,
                    folder / f"{name.replace(' ', '_')}.log",
                    {**_NO_STRICT_CHECK, **(_ELASTIC if name == ELASTIC else {})},
                    () if name == ELASTIC else ("--page-size", str(PAGE_TOKENS)),
                )
            )
            for name in NAMES
        }
        for server in servers.values():
            server.wait_until_ready()
        assert INSTANCE in {info.name for info in segment.list_segments()}, "it is not elastic"
        yield servers
        for server in servers.values():
            server.stop()


def cpu_s(server: SglangServer) -> float:
    """Of all its processes so far."""
    leader = psutil.Process(server.process.pid)
    return sum(sum(each.cpu_times()[:2]) for each in [leader, *leader.children(recursive=True)])


def turn(server: SglangServer, name: str, load: Load, number: int) -> tuple[Turn, list[list[int]]]:
    """The prompts of a turn, all at once."""
    before_s, begin_s = cpu_s(server), time.monotonic()
    with ThreadPoolExecutor(AT_ONCE) as threads:
        answers = list(threads.map(server.generate, load.prompts(number), load.answers(number)))
    total_s = time.monotonic() - begin_s
    tokens = [answer.tokens for answer in answers]
    taken = Turn(name, number, total_s, cpu_s(server) - before_s, sum(map(len, tokens)))
    return taken, tokens


def measure(load: Load, model: Path, folder: Path) -> Table:
    """All turns of a load."""
    turns: dict[str, list[Turn]] = {name: [] for name in NAMES}
    differing = {AGAIN: 0, ELASTIC: 0}
    asked = 0
    for start in range(load.starts):
        with started(model, folder) as servers:
            for index in range(-1, load.turns):
                number = start * (load.turns + 1) + index + 1
                answers = {}
                for name in _ORDERS[number % len(_ORDERS)]:
                    taken, answers[name] = turn(servers[name], name, load, number)
                    if index >= 0:
                        turns[name].append(taken)
                asked += AT_ONCE
                for name in differing:
                    pairs = zip(answers[name], answers[STOCK], strict=True)
                    differing[name] += sum(one != other for one, other in pairs)
    tokens_per_s = [[each.tokens_per_s for each in turns[name]] for name in NAMES]
    cpu_us = [[each.cpu_us_a_token for each in turns[name]] for name in NAMES]
    return Table(
        headings(*NAMES),
        [
            row("tokens a second", *tokens_per_s, more_is_better=True),
            row("CPU time of a token, us", *cpu_us, more_is_better=False),
        ],
        [
            f"Started {load.starts} times; {load.turns} turns of {AT_ONCE} prompts at once after"
            f" each start. Tokens a turn: {median(each.tokens for each in turns[STOCK]):.0f}.",
            f"Prompts answered otherwise than by stock, of {asked} (uncounted turns too):"
            f" {differing[AGAIN]} by stock again, {differing[ELASTIC]} with kvelastic.",
        ],
        {"turns": [asdict(each) for name in NAMES for each in turns[name]]},
    )


def main() -> int:
    """Measures, prints and keeps; the exit status."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench sglang",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="few turns; kept in build/")
    given = parser.parse_args()
    load = LOAD.shortened() if given.quick else LOAD
    told, machine_load, begin_s = facts(), os.getloadavg()[0], time.monotonic()
    with TemporaryDirectory(prefix="kvelastic-bench-sglang-") as folder:
        try:
            table = measure(load, prepare("tiny", Path(folder)).folder, Path(folder))
        except (AssertionError, OSError, subprocess.SubprocessError) as error:
            print(f"FAILED: {error or type(error).__name__}", file=sys.stderr)
            return 1
    title = "A tiny random model, 16 prompts at once"
    part = Part("tiny", title, machine_load, time.monotonic() - begin_s, table)
    print(f"\n{part.markdown()}\n", flush=True)
    kept_in = results.ROOT / "build/bench-sglang" if given.quick else FOLDER
    page = results.write(kept_in, told, [part], {}, title="SGLang with and without kvelastic")
    print(f"kept in {page}")
    return 0


if __name__ == "__main__":
    end_by_exception()
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
