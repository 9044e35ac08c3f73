"""`scripts/bench sglang`: SGLang with kvelastic against stock SGLang, and stock against itself.

    scripts/bench sglang                  about four minutes
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
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
from sglang_server import PAGE_TOKENS, SglangServer

from benchmarks import pages
from benchmarks.harness import end_by_exception, facts
from benchmarks.transformers.comparison import ELASTIC, NAMES
from benchmarks.transformers.turns import Answered, Ask, measure
from benchmarks.transformers.workload import TINY
from benchmarks.vllm.models import prepare
from kvelastic.shared import segment

INSTANCE = f"bench_sglang_{os.getpid()}"
LOAD = replace(TINY, starts=2, turns=10)
_NO_STRICT_CHECK = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "0"}
_ELASTIC = {
    "ENABLE_KVELASTIC": "true",
    "KVELASTIC_IPC_NAME": INSTANCE,
    "KVELASTIC_LEDGER": f"bench-sglang-{os.getpid()}",
}


@contextmanager
def started(model: Path, folder: Path) -> Iterator[dict[str, Ask]]:
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
        yield {name: partial(ask, servers, name) for name in NAMES}
        for server in servers.values():
            server.stop()


def processes(server: SglangServer) -> list[psutil.Process]:
    """All that it has."""
    leader = psutil.Process(server.process.pid)
    return [leader, *leader.children(recursive=True)]


def cpu_s(server: SglangServer) -> float:
    """Of all its processes so far."""
    return sum(sum(each.cpu_times()[:2]) for each in processes(server))


@contextmanager
def alone(servers: dict[str, SglangServer], name: str) -> Iterator[None]:
    """Stop the others: SGLang's scheduler keeps a core busy while it has nothing to do."""
    others = [each for key, server in servers.items() if key != name for each in processes(server)]
    for each in others:
        each.suspend()
    try:
        yield
    finally:
        for each in others:
            each.resume()


def ask(
    servers: dict[str, SglangServer], name: str, prompts: list[list[int]], new_tokens: list[int]
) -> Answered:
    """The prompts of a turn to one of them, all at once."""
    server = servers[name]
    with alone(servers, name), ThreadPoolExecutor(len(prompts)) as threads:
        before_s, begin_s = cpu_s(server), time.monotonic()
        answers = list(threads.map(server.generate, prompts, new_tokens))
        total_s = time.monotonic() - begin_s
        return Answered(
            total_s,
            cpu_s(server) - before_s,
            [one.tokens for one in answers],
            sum(one.cached_tokens for one in answers),
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
            model = prepare("tiny", Path(folder)).folder
            table = measure(load, lambda: started(model, Path(folder)))
        except (AssertionError, OSError, subprocess.SubprocessError) as error:
            print(f"FAILED: {error or type(error).__name__}", file=sys.stderr)
            return 1
    title = "A tiny random model, 16 prompts at once"
    part = pages.Part("tiny", title, machine_load, time.monotonic() - begin_s, table)
    print(f"\n{part.markdown()}\n", flush=True)
    heading = "SGLang with and without kvelastic"
    pages.write("sglang", heading, told, [part], is_whole=not given.quick)
    return 0


if __name__ == "__main__":
    end_by_exception()
    sys.exit(main())
