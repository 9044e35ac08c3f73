"""Two models with bursts in turn, on two hosts: how the memory of the hosts is divided.

Each arrangement is a Ray of its own on two hosts, one after the other. All get the same bursts:
first one at model A while B has nothing to do, then the other way round. Every answer is compared
with that of one engine, which has the memory of both hosts and gets the same requests.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import tiny_model
from hosts import Host
from open_memfds import open_memfds
from ray_hosts import APPLICATION, HTTP_PORT, RayHosts
from vllm_server import VLLM, VllmServer, metrics_in

from benchmarks.harness import half_of_the_cores, number, percentile
from benchmarks.pages import Table
from benchmarks.two_models.client import Request, make_burst, send_burst

MIB = 1 << 20
MODELS = ("a", "b")
HOSTS = 2
LAYERS, KV_HEADS, HEAD_DIM = 4, 4, 128
BLOCK_TOKENS = 32
BLOCK_BYTES = BLOCK_TOKENS * LAYERS * 2 * KV_HEADS * HEAD_DIM * 4
"""Large blocks: half of a host's memory has twelve pages of kvelastic's."""
PROMPT_TOKENS, ANSWER_TOKENS = 160, 96
WORDS = range(3, tiny_model.VOCABULARY)
HOST_MIB = 96
PLAIN = "benchmarks.cluster.plain:build"
START_DEADLINE_S = 1200.0
LOOK_EVERY_S = 0.25
REST_S = 1.5
"""Between bursts: a worker of vLLM spins for a second after its last request."""
_HALF_MIB = HOST_MIB // 2


@dataclass(frozen=True)
class Size:
    """How much is sent in each arrangement."""

    rounds: int
    """Bursts at each model."""
    requests: int
    """Requests of a burst, all at once."""

    @property
    def part(self) -> float:
        """What a burst needs at most, as a part of a half of all memory."""
        blocks = -(-(PROMPT_TOKENS + ANSWER_TOKENS) // BLOCK_TOKENS)
        return self.requests * blocks * BLOCK_BYTES / (HOSTS * _HALF_MIB * MIB)

    def burst(self, model: str, number: int) -> list[Request]:
        """The same in every arrangement, another one for each model and round."""
        seed = f"round {number} of {model}"
        return make_burst(self.requests, PROMPT_TOKENS, ANSWER_TOKENS, 0.0, seed, WORDS)


WHOLE, QUICK = Size(6, 40), Size(1, 40)


@dataclass(frozen=True)
class Arrangement:
    """An application, and what the engines of a model may have in each host."""

    name: str
    builder: str
    engine_mib: int
    guarantee_mib: int = 0
    """0: the engines run without kvelastic."""
    one_host_each: bool = False

    def model(self, name: str, folder: Path) -> dict[str, Any]:
        """The model's part of the configuration."""
        command = [
            str(VLLM), "serve", str(folder), "--served-model-name", name, "--dtype", "float32",
            "--host", "127.0.0.1", "--port", "{port}", "--enforce-eager", "--block-size",
            str(BLOCK_TOKENS), *engine_arguments(self.engine_mib),
        ]  # fmt: skip
        env = {
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_CI_ENV": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # its host has a half of the cores
            "OMP_NUM_THREADS": str(len(half_of_the_cores(second=False).split(","))),
            "VLLM_NO_USAGE_STATS": "1",
        }
        if not self.guarantee_mib:
            where = {f"host{MODELS.index(name)}": 1} if self.one_host_each else {}
            return {"name": name, "command": command, "env": env, "resources": where}
        env |= {"ENABLE_KVELASTIC": "true", "KVELASTIC_HOST_MEMORY": f"{HOST_MIB}M"}
        return {
            "name": name,
            "command": command,
            "env": env | {"VLLM_SERVER_DEV_MODE": "1"},
            "guarantee": f"{self.guarantee_mib}M",
            "replicas": HOSTS,
            "replicas_per_node": 1,
        }

    def config(self, folder: Path) -> dict[str, Any]:
        """What is deployed."""
        config: dict[str, Any] = {
            "models": [self.model(name, folder) for name in MODELS],
            "front": {"resources": {"host0": 0.01}},
        }
        if self.guarantee_mib:
            config["health"] = {"timeout": 3}  # the engines share this machine's cores
        return config


ARRANGEMENTS = (
    Arrangement("fixed parts", APPLICATION, _HALF_MIB, guarantee_mib=_HALF_MIB),
    Arrangement("kvelastic", APPLICATION, HOST_MIB, guarantee_mib=8),
    Arrangement("Ray alone", PLAIN, HOST_MIB, one_host_each=True),
    Arrangement("kvelastic, again", APPLICATION, HOST_MIB, guarantee_mib=8),
)
AT_ENGINES = ("time_to_first_token_seconds_sum", "request_queue_time_seconds_sum")
NAMES = tuple(each.name for each in ARRANGEMENTS)
Key = tuple[str, int]
"""A burst: its model and round."""


@dataclass
class Found:
    """What an arrangement's requests and hosts have shown."""

    first_s: dict[str, list[float]] = field(default_factory=dict)
    """Seconds to the first token, by burst."""
    failures: list[str] = field(default_factory=list)
    differing: int = 0
    compared: int = 0
    held_bytes: list[int] = field(default_factory=list)
    """The memory of all KV caches on both hosts, look by look."""
    at_engines: dict[str, float] = field(default_factory=dict)
    """Sums of vLLM's own figures (AT_ENGINES) over its requests."""

    @property
    def all_s(self) -> list[float]:
        return list(itertools.chain.from_iterable(self.first_s.values()))


def engine_arguments(mib: int) -> list[str]:
    """What every engine has in common, but for its memory."""
    return [
        "--max-model-len", str(PROMPT_TOKENS + ANSWER_TOKENS), "--max-num-seqs", "64",
        "--max-num-batched-tokens", "256", "--kv-cache-memory-bytes", str(mib * MIB),
        # After the first token: else all hosts' cores are busy with passing single tokens on.
        "--stream-interval", str(BLOCK_TOKENS),
    ]  # fmt: skip


class CoresHost(Host):
    """A host with some of this machine's cores."""

    def __init__(self, cores: str) -> None:
        super().__init__()
        self._cores = cores

    def command(self, *command: str) -> list[str]:
        return ["taskset", "--cpu-list", self._cores, *super().command(*command)]


def host_maker() -> Callable[[], Host]:
    """Makes hosts that have one half of the cores and the other half in turn."""
    halves = itertools.cycle(half_of_the_cores(second=second) for second in (False, True))
    return lambda: CoresHost(next(halves))


def has_one_core() -> bool:
    """Whether both hosts have the same core: then two busy engines get half of it each."""
    return half_of_the_cores(second=False) == half_of_the_cores(second=True)


@contextlib.contextmanager
def watched(cluster: RayHosts, found: Found) -> Iterator[None]:
    """In the body, add what the kernel holds for the engines' KV caches on both hosts."""
    processes = [process.pid for host in cluster.hosts for process in host.find()]
    files: dict[int, Path] = {}
    for pid in processes:
        with contextlib.suppress(OSError):
            files |= open_memfds(pid)
    ends = threading.Event()

    def run() -> None:
        while not ends.wait(LOOK_EVERY_S):
            with contextlib.suppress(OSError):  # an engine has ended
                found.held_bytes.append(sum(fd.stat().st_blocks for fd in files.values()) * 512)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()


def at_engines(cluster: RayHosts) -> dict[str, float]:
    """The sums of vLLM's own figures over all engines."""
    sums = dict.fromkeys(AT_ENGINES, 0.0)
    for host in cluster.hosts:
        lines = [process.cmdline() for process in host.find(str(VLLM), "--port")]
        with host.network():
            for port in {line[line.index("--port") + 1] for line in lines}:
                found = metrics_in(httpx.get(f"http://127.0.0.1:{port}/metrics").text)
                sums = {name: before + found.get(name, 0.0) for name, before in sums.items()}
    return sums


def expected(size: Size, model: Path, folder: Path) -> dict[Key, list[list[int]]]:
    """The tokens of one engine, which has the memory of both hosts."""
    tokens = {}
    arguments = engine_arguments(HOSTS * HOST_MIB)
    environment = {"TMPDIR": str(folder)}  # its files are removed with the folder
    with VllmServer(model, folder / "one_engine.log", environment, arguments) as server:
        server.wait_until_ready()
        for key in itertools.product(MODELS, range(size.rounds)):
            answers = send_burst(server.port, size.burst(*key))
            if failures := [each.failure for each in answers if each.failure]:
                raise RuntimeError(f"the engine to compare with failed: {failures[0]!r}")
            tokens[key] = [answer.tokens for answer in answers]
    return tokens


def run(
    arrangement: Arrangement, size: Size, model: Path, tokens: dict[Key, list[list[int]]]
) -> Found:
    """All bursts in one arrangement, from the start of its hosts to their end."""
    found = Found()
    with RayHosts(HOSTS, make_host=host_maker(), mib_per_host=HOST_MIB) as cluster:
        began_s = time.monotonic()
        cluster.deploy(arrangement.config(model), START_DEADLINE_S, arrangement.builder)
        print(f"  {arrangement.name}: ready after {time.monotonic() - began_s:.0f} s", flush=True)

        def send(name: str, number: int) -> None:
            with cluster.hosts[0].network():
                answers = send_burst(HTTP_PORT, size.burst(name, number), name)
            time.sleep(REST_S)
            if number < 0:
                return
            whole = [each for each in answers if each.failure is None]
            found.first_s[f"{name}{number}"] = [each.first_token_s for each in whole]
            found.failures += [repr(each.failure) for each in answers if each.failure]
            found.compared += len(whole)
            found.differing += sum(
                answer.failure is None and answer.tokens != right
                for answer, right in zip(answers, tokens[name, number], strict=True)
            )

        for name in MODELS:
            send(name, -1)  # all code, all connections
        before = at_engines(cluster)
        with contextlib.ExitStack() as stack:
            if arrangement.guarantee_mib:
                stack.enter_context(watched(cluster, found))
            else:
                engines = len(MODELS) if arrangement.one_host_each else HOSTS * len(MODELS)
                found.held_bytes.append(engines * arrangement.engine_mib * MIB)
            for number, name in itertools.product(range(size.rounds), MODELS):
                send(name, number)
        found.at_engines = {
            name: after - before[name] for name, after in at_engines(cluster).items()
        }
    return found


def measure(size: Size, arrangements: Sequence[str]) -> Table:
    """Every arrangement after the other. Raises AssertionError if one does not start."""
    found: dict[str, Found] = {}
    with TemporaryDirectory(prefix="kvbench") as folder:
        model = Path(folder, "model")
        shape = map(str, (LAYERS, KV_HEADS, HEAD_DIM))
        subprocess.run([sys.executable, tiny_model.__file__, str(model), *shape], check=True)
        tokens = expected(size, model, Path(folder))
        for arrangement in ARRANGEMENTS:
            if arrangement.name in arrangements:
                found[arrangement.name] = run(arrangement, size, model, tokens)
    return table(size, found)


def table(size: Size, found: dict[str, Found]) -> Table:
    """A row for each arrangement."""
    elastic = found.get("kvelastic")
    p99_s = percentile(elastic.all_s, 99) if elastic and elastic.all_s else None

    def row(name: str, of: Found) -> tuple[str, ...]:
        first_s = of.all_s
        shown: list[float] = []
        if first_s:
            shown = [percentile(first_s, 50), percentile(first_s, 99), statistics.mean(first_s)]
        seconds = [f"{number(value)} s" for value in shown] or [""] * 3
        ratio = f"{shown[1] / p99_s:.2f}" if shown and p99_s else ""
        held = [max(of.held_bytes), statistics.mean(of.held_bytes)] if of.held_bytes else []
        mib = [f"{value / MIB:.0f} MiB" for value in held] or [""] * 2
        sums = [of.at_engines[each] for each in AT_ENGINES if first_s and of.at_engines]
        inside = [f"{number(each / len(first_s))} s" for each in sums] or [""] * 2
        differ = f"{of.differing} of {of.compared}"
        return (name, *seconds[:2], ratio, seconds[2], *inside, str(len(of.failures)), differ, *mib)

    notes = [
        f"{HOSTS} hosts with {HOST_MIB} MiB each; a burst: {size.requests} requests at once,"
        f" prompts of up to {PROMPT_TOKENS} tokens and answers of up to {ANSWER_TOKENS}, which need"
        f" {size.part:.2f} of a half of all memory; {size.rounds} bursts at each model.",
        *(["Both hosts share one core: these figures are no evidence."] * has_one_core()),
        *(f"{name}: {failure[:300]}" for name, of in found.items() for failure in of.failures[:1]),
    ]
    headings = ("arrangement", "first token p50", "p99", "p99 by kvelastic's", "mean",
                "at the engine, mean", "in its queue, mean", "errors", "answers that differ",
                "most held", "mean held")  # fmt: skip
    samples = {"size": asdict(size), "arrangements": {n: asdict(of) for n, of in found.items()}}
    return Table(headings, [row(name, of) for name, of in found.items()], notes, samples)


def add_options(parser: argparse.ArgumentParser) -> None:
    """The sizes of this part."""
    of = parser.add_argument_group("part memory")
    of.add_argument("--rounds", type=int, help=f"bursts at each model (default: {WHOLE.rounds})")
    of.add_argument("--requests", type=int, help=f"of a burst (default: {WHOLE.requests})")
    of.add_argument("--arrangement", action="append", choices=NAMES, help="only this (repeatable)")


def part(given: argparse.Namespace | None = None) -> Callable[[bool], Table]:
    """The part with the sizes that were given on the command line."""

    def measured(quick: bool) -> Table:
        assert given is not None
        usual = QUICK if quick else WHOLE
        size = Size(given.rounds or usual.rounds, given.requests or usual.requests)
        return measure(size, given.arrangement or NAMES)

    return measured
