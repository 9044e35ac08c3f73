"""`scripts/bench vllm`: vLLM with kvelastic against stock vLLM, the same requests, taking turns.

SmolLM2-135M in float32, so that equal inputs give equal tokens whatever is batched with what.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.harness import Figure, report
from tests.engines.vllm_server import Request, VllmServer, make_requests

ROOT = Path(__file__).parents[2]
STARTS = 2
ROUNDS = 5
REQUESTS_PER_ROUND = 16
KV_BYTES = 768 << 20
ELASTIC = {"ENABLE_KVELASTIC": "true", "KVELASTIC_MAX_CACHED_TOKENS": "-1"}


def started(model: Path, log: Path, environment: dict[str, str]) -> tuple[VllmServer, float]:
    start = time.perf_counter()
    server = VllmServer(model, log, environment, ["--kv-cache-memory-bytes", str(KV_BYTES)])
    return server.wait_until_ready(), time.perf_counter() - start


def burst(server: VllmServer, requests: list[Request]) -> tuple[list[list[int]], float]:
    """The answers, and output tokens a second."""
    start = time.perf_counter()
    answers = server.complete_all(requests)
    return answers, sum(map(len, answers)) / (time.perf_counter() - start)


def main() -> None:
    model = Path(
        subprocess.run(
            [ROOT / "scripts" / "model", "--print-folder"],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        ).stdout.strip()
    )
    startup = Figure("start-up to /health", "s", [], "at most 1 s more", "stock")
    throughput = Figure("output tokens a second, 16 at once", "tok/s", [], ">= 0.98", "stock")
    differing = Figure("requests whose tokens differ", "", [], "0")
    with TemporaryDirectory() as folder:
        for turn in range(STARTS):
            stock, stock_s = started(model, Path(folder) / "stock.log", {})
            if turn + 1 < STARTS:
                stock.stop()
            elastic, elastic_s = started(model, Path(folder) / "elastic.log", ELASTIC)
            startup.floor_samples.append(stock_s)
            startup.samples.append(elastic_s)
            if turn + 1 < STARTS:
                elastic.stop()
        with stock, elastic:
            for number in range(ROUNDS + 1):
                requests = make_requests(REQUESTS_PER_ROUND, seed=number)
                pairs = {}
                # Who begins changes too: the second finds the machine as the first has left it.
                for server in (stock, elastic) if number % 2 else (elastic, stock):
                    pairs[server] = burst(server, requests)
                wrong = sum(a != b for a, b in zip(*(pairs[s][0] for s in pairs), strict=True))
                differing.samples.append(wrong)
                if number:  # the first round warms both up
                    throughput.floor_samples.append(pairs[stock][1])
                    throughput.samples.append(pairs[elastic][1])
                print(f"  round {number}: {pairs[elastic][1]:.1f} tok/s with kvelastic,"
                      f" {pairs[stock][1]:.1f} stock, {wrong} differ", flush=True)  # fmt: skip
            elastic.stop()
            stock.stop()
    startup.note = (
        f"{statistics.median(startup.samples) - statistics.median(startup.floor_samples):+.2f} s"
        " between the medians"
    )
    report("vllm", [throughput, differing, startup])


if __name__ == "__main__":
    sys.exit(main())
