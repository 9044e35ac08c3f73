"""vLLM under load: what tiers cost where nothing is found, and what they save under a limit.

Without hits: three servers take turns at the same requests, two without tiers, one with. No two
prompts share a block, and more blocks are cached than fit. The control is the second one without.

Under a limit: requests are preempted all the time. A preempted request computes its prompt again,
and what it has answered so far; with tiers its blocks are copied, and found when it goes on.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
from engine_server import Request
from vllm_server import BLOCK_TOKENS

from benchmarks.harness import Figure
from benchmarks.tiers.served import CACHE_BYTES, Served
from benchmarks.vllm.models import Model, prepare
from benchmarks.vllm.streams import stream_all
from kvelastic.shared import segment

WITHOUT_HITS_TURNS = 10
PREEMPTED_TURNS = 4
AT_ONCE = 16
REST_S = 1.5
"""Before a turn: a worker looks for work without pause for a second after its last step."""
WAYS = ("off", "off again", "tiers")
SCHEDULER = "benchmarks.tiers.counting_scheduler.CountingScheduler"
ROOT = Path(__file__).parents[2]
_WORDS = range(1000, 40_000)
_SAME_CORES = {"VLLM_CPU_NUM_OF_RESERVED_CPU": "1"}
"""For every way: beside a KV connector vLLM sets a second core aside, and none where it has two."""


def figures() -> list[Figure]:
    """Tokens a second, CPU time a token, and tokens that were computed again."""
    with TemporaryDirectory(prefix="kvelastic-bench-tiers-", dir="/var/tmp") as folder:
        model = prepare("smollm2", Path(folder))
        return [*_without_hits(model, Path(folder)), *_preempted(model, Path(folder))]


def _requests(name: str, count: int, prompts: range, answers: range) -> list[Request]:
    pick = random.Random(name)
    return [
        Request(pick.choices(_WORDS, k=pick.choice(prompts)), pick.choice(answers))
        for _ in range(count)
    ]


def _serve(
    stack: ExitStack,
    model: Model,
    folder: Path,
    way: str,
    environment: dict[str, str],
    *arguments: str,
) -> Served:
    work_folder = folder / way.replace(" ", "_")
    work_folder.mkdir()
    served = Served(
        model.folder,
        work_folder,
        environment | _SAME_CORES,
        tiers=way == "tiers",
        arguments=arguments,
        suffix=f"_{work_folder.name}",
    )
    return stack.enter_context(served)


@dataclass(frozen=True)
class _Turn:
    tokens: int
    total_s: float
    cpu_s: float


def _turn(served: Served, requests: Sequence[Request]) -> _Turn:
    time.sleep(REST_S)
    served.server.complete(Request([1000] * 8, 4))
    processes = list(served.server.processes().values())
    before_s = _cpu_s(processes)
    begin_s = time.perf_counter()
    answers = stream_all(served.server.port, requests, AT_ONCE)
    total_s = time.perf_counter() - begin_s
    tokens = sum(len(answer.tokens) for answer in answers)
    return _Turn(tokens, total_s, _cpu_s(processes) - before_s)


def _cpu_s(processes: Sequence[psutil.Process]) -> float:
    times = [process.cpu_times() for process in processes]
    return sum(each.user + each.system for each in times)


def _without_hits(model: Model, folder: Path) -> list[Figure]:
    rate = {way: Figure(f"no hits, output tokens a second, {way}", "", []) for way in WAYS}
    cpu = {way: Figure(f"no hits, CPU time a token, {way}", "ms", []) for way in WAYS}
    arguments = ("--kv-cache-memory-bytes", str(CACHE_BYTES // 4))
    with ExitStack() as stack:
        servers = {
            way: _serve(stack, model, folder, way, {"KVELASTIC_TIER_COMPARE": "false"}, *arguments)
            for way in WAYS
        }
        for number in range(-1, WITHOUT_HITS_TURNS):
            requests = _requests(f"load {number}", 16, range(64, 320), range(32, 64))
            first = number % len(WAYS)
            for way in WAYS[first:] + WAYS[:first]:
                turn = _turn(servers[way], requests)
                if number >= 0:  # the first warms up
                    rate[way].samples.append(turn.tokens / turn.total_s)
                    cpu[way].samples.append(1e3 * turn.cpu_s / turn.tokens)
        written = sum(tier.bytes_written for tier in servers["tiers"].status_file().tiers)
        found = servers["tiers"].status_file().blocks.loaded
    for rows in (rate, cpu):
        for way in WAYS[1:]:
            rows[way].floor_name, rows[way].floor_samples = "off", rows["off"].samples
        rows["off again"].name = "control: " + rows["off again"].name
    rate["tiers"].note = f"{written / 2**20:.0f} MiB written, {found} blocks loaded"
    rate["tiers"].bar = cpu["tiers"].bar = "ratio within the control's"
    return [*rate.values(), *cpu.values()]


def _preempted(model: Model, folder: Path) -> list[Figure]:
    """Tokens computed beyond one prompt and one answer each, for a thousand tokens asked for."""
    rows = {
        way: Figure(f"under a limit, tokens computed again, {way}", "of 1000", [])
        for way in ("off", "tiers")
    }
    preemptions = dict.fromkeys(rows, 0)
    for way, row in rows.items():
        counted = folder / f"counted_{way}"
        environment = {
            "COUNTED_TOKENS_FILE": str(counted),
            "PYTHONPATH": str(ROOT),
            "KVELASTIC_TIER_STAGING": "256M",
        }
        work_folder = folder / "preempted"
        work_folder.mkdir(exist_ok=True)
        with ExitStack() as stack:
            served = _serve(
                stack, model, work_folder, way, environment, "--scheduler-cls", SCHEDULER
            )
            page_bytes = segment.inspect(served.name).usage["page_bytes"]
            segment.request(served.name, limit_bytes=2 * page_bytes, wait_s=60)
            before = served.server.metrics()["num_preemptions_total"]
            for number in range(PREEMPTED_TURNS):
                requests = _requests(f"limit {number}", 8, range(96, 160), range(96, 160))
                asked = sum(len(each.prompt) + each.max_tokens - 1 for each in requests)
                start = int(counted.read_text())
                stream_all(served.server.port, requests, 8)
                again = int(counted.read_text()) - start - asked
                row.samples.append(1e3 * max(0, again) / asked)
            after = served.server.metrics()["num_preemptions_total"]
            preemptions[way] = int(after - before)
    rows["tiers"].floor_name, rows["tiers"].floor_samples = "off", rows["off"].samples
    for way, row in rows.items():
        row.note = f"{preemptions[way]} preemptions; blocks of {BLOCK_TOKENS} tokens"
    return list(rows.values())
