"""Two vLLM servers on one KV budget: as good as one server that has all of it?

Three arrangements: a lone server with the whole budget, two with a half each, two on one ledger.
The first and the second server of a pair get their loads in turn: a burst at once, then a Poisson
wave of 0.8 of what the lone server can serve. The lone server gets both servers' prompts; what its
two rows differ by is the control. The measure is the first token, in seconds and in steps of the
scheduler; tokens are compared with the lone server's. Model: a Llama shape with random weights,
bfloat16, CUDA graphs, Triton attention; on a CPU a tiny one.
"""

from __future__ import annotations

import json
import os
import threading
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.gpu.driver_calls import has_torch
from benchmarks.gpu.findings import Findings
from benchmarks.gpu.line_child import ChildError
from benchmarks.gpu.vllm_servers import Server, environment, how_on_gpu, llama
from benchmarks.harness import half_of_the_cores
from benchmarks.vmm.section import Section
from kvelastic.shared import ledger, segment

MIB = 1 << 20
ARRANGEMENTS = {
    "lone": ("lone", "lone"),
    "halves": ("half-1", "half-2"),
    "ledger": ("elastic-1", "elastic-2"),
}
SERVERS = ("first", "second")
LOADS = ("burst", "wave")
PAUSE_S = 1.0
"""Between the loads of a pair, in every other round; else the second one follows at once."""
PATIENCE_S, PATIENCE_OF_A_REHEARSAL_S = 150.0, 900.0
"""For a start and for a burst. A rehearsal is on whichever CPU is there, maybe a busy one."""
END_S = 15.0
LOADS_S = 170.0
"""No load is begun later than this after the start."""
WAVE_S = 7.0
WARM_BURSTS = 2
"""A server's first burst takes up to four times as long as its second one."""
PART_OF_THE_BEST = 0.8


Firsts = dict[tuple[str, str, str], tuple[list[float], list[float]]]
"""By load, arrangement and server: each request's seconds and steps to the first token."""


@dataclass(frozen=True)
class Size:
    """Of model and load: a burst fills most of the budget."""

    layers: int
    heads: int
    head: int
    hidden: int
    vocabulary: int
    count: int
    prompt_tokens: int
    new_tokens: int
    budget_bytes: int
    on_gpu: bool

    @property
    def token_bytes(self) -> int:
        return 2 * self.layers * self.heads * self.head * (2 if self.on_gpu else 4)

    def model(self) -> dict[str, Any]:
        return llama(
            dtype="bfloat16" if self.on_gpu else "float32",
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.heads,
            head_dim=self.head,
            hidden_size=self.hidden,
            intermediate_size=11 * self.hidden // 4,
            vocab_size=self.vocabulary,
        )

    def engine(self, model: Path, budget_bytes: int) -> dict[str, Any]:
        made = {
            "model": str(model),
            "skip_tokenizer_init": True,
            "load_format": "dummy",
            "dtype": self.model()["torch_dtype"],
            "max_model_len": 2048 if self.on_gpu else 256,
            "max_num_seqs": 64,
            "max_num_batched_tokens": 4096 if self.on_gpu else 256,
            "enable_prefix_caching": True,
            "seed": 1,
            "kv_cache_memory_bytes": budget_bytes,
            "gpu_memory_utilization": 0.2 if self.on_gpu else 0.05,
        }
        if not self.on_gpu:
            return made | {"enforce_eager": True, "block_size": TINY_BLOCK_TOKENS}
        return made | how_on_gpu(graphs=True)


LARGE = Size(16, 32, 64, 2048, 32000, 22, 1500, 512, 6144 * MIB, on_gpu=True)
TINY = Size(4, 4, 128, 128, 512, 26, 150, 24, 96 * MIB, on_gpu=False)

TINY_BLOCK_TOKENS = 32
"""So that a page is 4 MiB: each of two servers keeps one for its null block, of 24 in all."""


@dataclass
class Watch:
    """The most that the ledger has granted, looked at beside everything."""

    group: str
    most_bytes: int = 0
    ends: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        while not self.ends.wait(0.01):
            if (found := ledger_of(self.group)) is not None:
                self.most_bytes = max(self.most_bytes, found.granted_bytes)


def _cores(name: str) -> dict[str, str]:
    """The worker of an idle server spins for a second: it must not do so on the other's cores."""
    second = name in {second for _, second in ARRANGEMENTS.values()} - {"lone"}
    return {"VLLM_CPU_OMP_THREADS_BIND": half_of_the_cores(second=second)}


def ledger_of(group: str) -> Any:
    with suppress(Exception):  # it changes while it is read
        return next((one for one in ledger.list_ledgers() if one.group == group), None)
    return None


class Trial:
    """All servers of all arrangements; one at a time computes."""

    def __init__(self, size: Size, folder: Path) -> None:
        self.size, self.folder, self.group = size, folder, f"pair-{os.getpid()}"
        self._patience_s = PATIENCE_S if size.on_gpu else PATIENCE_OF_A_REHEARSAL_S
        self.servers: dict[str, Server] = {}
        self.firsts: Firsts = {}
        self.differing = self.compared = 0
        self._tokens: dict[tuple[str, int], list[list[int]]] = {}
        self._rate = 0.0
        (folder / "config.json").write_text(json.dumps(size.model()))

    def start(self) -> None:
        """Start and warm up every server. Raises `ChildError`."""
        for name in dict.fromkeys(name for names in ARRANGEMENTS.values() for name in names):
            part = 2 if name.startswith("half") else 1
            options = {
                "engine": self.size.engine(self.folder, self.size.budget_bytes // part),
                "vocabulary": self.size.vocabulary,
            }
            self.servers[name] = Server(name, options, self._environ(name), self.folder)
        for server in self.servers.values():
            server.answer(self._patience_s)
        for server in self.servers.values():
            for seed in range(WARM_BURSTS):
                self._burst(server, seed=1 + seed)
            server.tell("reset")
            server.answer(self._patience_s)
        self.bound()
        self._wait_for_budget()

    def _environ(self, name: str) -> dict[str, str]:
        own = {}
        if name.startswith("elastic"):
            own = {"KVELASTIC_LEDGER": self.group, "KVELASTIC_IPC_NAME": f"{self.group}-{name}"}
            if not self.size.on_gpu:
                own["KVELASTIC_HOST_MEMORY"] = str(self.size.budget_bytes)
        environ = environment(self.folder, **own)
        return environ if self.size.on_gpu else environ | _cores(name)

    def bound(self) -> None:
        """Let the ledger's KV caches have the budget, and no more of the GPU."""
        found = ledger_of(self.group)
        if found is not None and self.size.on_gpu:
            beside_bytes = found.others_bytes + found.reserved_bytes
            ledger.set_capacity(
                found.device,
                group=found.group,
                capacity_bytes=self.size.budget_bytes + beside_bytes,
            )

    def _wait_for_budget(self) -> None:
        """Wait until the warm-up's memory beyond the budget is back. Raises `ChildError`."""
        ends = time.monotonic() + self._patience_s
        while (found := ledger_of(self.group)) is None or (
            found.granted_bytes > self.size.budget_bytes
        ):
            if time.monotonic() > ends:
                raise ChildError(f"the ledger does not come down to its budget: {found}")
            time.sleep(0.01)

    def run(self, rounds: int, seconds: float) -> None:
        """Every load, in every arrangement, as often; none is begun after so many seconds."""
        ends = time.monotonic() + seconds
        for turn in range(rounds):
            for load in LOADS:
                for arrangement, names in ARRANGEMENTS.items():
                    for which, name in zip(SERVERS, names, strict=True):
                        if time.monotonic() < ends:
                            seed = 10 * turn + SERVERS.index(which)
                            self._load(load, arrangement, which, self.servers[name], seed)
                        time.sleep(PAUSE_S if turn % 2 == 0 else 0.0)

    def _load(self, load: str, arrangement: str, which: str, server: Server, seed: int) -> None:
        self.bound()
        if not self.size.on_gpu:
            # vLLM's worker on a CPU polls every 0.1 s after a second without work.
            self._burst(server, seed=3000 + seed, count=1, prompt_tokens=8, new_tokens=1)
        more: dict[str, Any] = {"seed": 1000 + seed}
        if load == "wave":
            more = {"seed": 2000 + seed, "rate": self._rate}
            more["count"] = max(self.size.count, int(WAVE_S * self._rate))
        told = self._burst(server, **more)
        if load == "burst" and arrangement == "lone":
            tokens = self.size.prompt_tokens + self.size.new_tokens
            fit = self.size.budget_bytes // (tokens * self.size.token_bytes)
            at_once = min(fit, self.size.count)
            self._rate = self._rate or PART_OF_THE_BEST * at_once / told["total_s"]
        firsts = self.firsts.setdefault((load, arrangement, which), ([], []))
        firsts[0].extend(told["first_s"])
        firsts[1].extend(told["first_steps"])
        theirs = self._tokens.setdefault((load, seed), told["tokens"])
        self.compared += len(theirs)
        self.differing += sum(a != b for a, b in zip(theirs, told["tokens"], strict=True))

    def _burst(self, server: Server, **more: Any) -> dict[str, Any]:
        usual = {
            "count": self.size.count,
            "prompt_tokens": self.size.prompt_tokens,
            "new_tokens": self.size.new_tokens,
            "rate": 0.0,
        }
        server.tell("burst", **(usual | more))
        return server.answer(self._patience_s)

    def close(self) -> None:
        for server in self.servers.values():
            server.send_end()
        ends = time.monotonic() + END_S
        for server in self.servers.values():
            server.end(max(0.0, ends - time.monotonic()))
        ledger.reap()
        segment.reap()


def percentile(values: list[float], percent: int) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]


def _first_tokens(found: Findings, firsts: Firsts) -> Section:
    """A row for each server of each arrangement; its p99 beside the lone server's."""
    rows: list[tuple[str, ...]] = []
    for (load, arrangement, which), (first_s, steps) in sorted(
        firsts.items(), key=lambda item: (item[0][0], list(ARRANGEMENTS).index(item[0][1]))
    ):
        shown = [percentile(first_s, percent) for percent in (50, 90, 99)]
        shown_steps = [percentile(steps, percent) for percent in (50, 90, 99)]
        # The lone server's prompts of the first server are the measure of both of its rows.
        of = SERVERS[0] if arrangement == "lone" else which
        lone_s, lone_steps = (percentile(values, 99) for values in firsts[load, "lone", of])
        named = f"{load}, {arrangement}, {which}"
        found.figure(
            named,
            {"p50_p90_p99_s": shown, "p50_p90_p99_steps": shown_steps, "n": len(first_s)},
        )
        seconds = (*(f"{value:.3f}" for value in shown), f"{shown[-1] / lone_s:.2f}")
        counts = (*(f"{value:.0f}" for value in shown_steps), f"{shown_steps[-1] / lone_steps:.2f}")
        rows.append((load, arrangement, which, str(len(first_s)), *seconds, *counts))
    header = ("load", "servers", "server", "requests", "p50 s", "p90 s", "p99 s", "by lone's")
    steps_header = ("p50 steps", "p90 steps", "p99 steps", "by lone's")
    return Section("Seconds and scheduler's steps to the first token", header + steps_header, rows)


def main() -> None:
    with Findings.of_command(__doc__) as found, ExitStack() as stack:
        size = LARGE if has_torch() and not found.quick else TINY
        trial = Trial(size, Path(stack.enter_context(TemporaryDirectory(prefix="pair_"))))
        stack.callback(trial.close)
        watch = Watch(trial.group)
        begun = time.monotonic()
        trial.start()
        found.figure("ready_s", time.monotonic() - begun)
        watching = threading.Thread(target=watch.run, daemon=True)
        watching.start()
        trial.run(1 if found.quick else 6, LOADS_S if size.on_gpu else PATIENCE_OF_A_REHEARSAL_S)
        watch.ends.set()
        watching.join()
        found.table(_first_tokens(found, trial.firsts))
        found.check(
            "tokens are the lone server's", trial.differing == 0, f"{trial.differing} differ"
        )
        found.check("tokens were compared", trial.compared > 0)
        found.check(
            "the ledger never granted more than its budget",
            0 < watch.most_bytes <= size.budget_bytes,
            f"{watch.most_bytes >> 20} of {size.budget_bytes >> 20} MiB",
        )


if __name__ == "__main__":
    main()
