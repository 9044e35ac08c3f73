"""`scripts/bench alone`: what kvelastic costs a server that has the device to itself.

    scripts/bench alone                   vLLM, SGLang and transformers; about half an hour
    scripts/bench alone --engine vllm     one of them
    scripts/bench alone --load multi_turn --rounds 3
    scripts/bench alone --quick           one round of each load; its figures are no evidence

README.md says what the figures mean.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import permutations
from pathlib import Path
from tempfile import TemporaryDirectory

import tiny_adapter
from engine_server import own_environment
from processes import LineProgram
from sglang_server import PAGE_TOKENS, SglangServer
from transformers_process import TransformersEngine

from benchmarks import pages
from benchmarks.alone import vllm_engine
from benchmarks.alone.loads import KV_TOKENS, MULTI_TURN, Load, engine_kinds
from benchmarks.alone.vllm_engine import Round
from benchmarks.harness import end_by_exception, facts
from benchmarks.pages import Part, Table
from benchmarks.sglang.__main__ import ask as ask_sglang
from benchmarks.transformers.comparison import AGAIN, ELASTIC, NAMES, STOCK, headings, row
from benchmarks.transformers.engines import SERIES
from benchmarks.vllm.models import ROOT, prepare
from kvelastic.shared import ledger, segment

ENGINES = ("vllm", "sglang", "transformers")
ROUNDS = 5
_BLOCK_TOKENS = 32
_DEADLINE_S = 600.0
_INSTANCE = f"bench_alone_{os.getpid()}"
_ORDERS = list(permutations(NAMES))

Ask = Callable[[Load, int], Round]


def environment(name: str) -> dict[str, str]:
    """Return what makes an engine elastic; every other setting is the default."""
    if name != ELASTIC:
        return {}
    return {
        "ENABLE_KVELASTIC": "true",
        "KVELASTIC_IPC_NAME": _INSTANCE,
        "KVELASTIC_LEDGER": f"bench-alone-{os.getpid()}",
    }


# --- engines -----------------------------------------------------------------------------------


@contextmanager
def vllm(kind: str, model: Path, folder: Path) -> Iterator[dict[str, Ask]]:
    adapters = []
    for seed in range(2 if kind == "lora" else 0):
        adapters.append(str(folder / f"adapter{seed}"))
        subprocess.run([sys.executable, tiny_adapter.__file__, adapters[-1], str(seed)], check=True)
    one_process = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests/programs")]),
    }
    programs = {
        name: ["env", "-i", *(f"{key}={value}" for key, value in {
            **own_environment(), **one_process, **environment(name)}.items()),
            sys.executable, vllm_engine.__file__, str(model), kind, *adapters]
        for name in NAMES
    }  # fmt: skip
    with ExitStack() as ends:
        engines = {}
        for name, command in programs.items():
            log = folder / f"vllm_{kind}_{name.replace(' ', '_')}.log"
            # `env -i` is what replaces the environment: LineProgram only adds to it.
            engines[name] = ends.enter_context(
                LineProgram(*command[1:], python=command[0], log=log)
            )
        for name, engine in engines.items():
            assert engine.read() == "ready", f"{name} did not start"
        yield {name: partial(_ask_vllm, engine) for name, engine in engines.items()}


def _ask_vllm(engine: LineProgram, load: Load, number: int) -> Round:
    engine.send(json.dumps({"load": load.name, "round": number}))
    return Round(**json.loads(engine.read()))


@contextmanager
def sglang(model: Path, folder: Path) -> Iterator[dict[str, Ask]]:
    shape = (
        "--max-total-tokens", str(KV_TOKENS), "--max-running-requests", str(MULTI_TURN.prompts),
        "--page-size", str(PAGE_TOKENS),
    )  # fmt: skip
    quiet = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "0"}
    with ExitStack() as ends:
        servers = {
            name: ends.enter_context(
                SglangServer(
                    model, folder / f"sglang_{name}.log", {**quiet, **environment(name)}, shape
                )
            )
            for name in NAMES
        }
        for server in servers.values():
            server.wait_until_ready()
        yield {name: partial(_ask_sglang, servers, name) for name in NAMES}
        for server in servers.values():
            server.stop()


def _ask_sglang(servers: dict[str, SglangServer], name: str, load: Load, number: int) -> Round:
    prompts = load.first_prompts(number)
    for turn in range(load.turns):
        answered = ask_sglang(servers, name, prompts, [load.new_tokens] * len(prompts))
        if turn + 1 < load.turns:
            prompts = load.next_prompts(number, turn, prompts, answered.tokens)
    asked = sum(map(len, prompts))
    return Round(
        answered.total_s, answered.cpu_s, asked, answered.cached_tokens, 0, answered.tokens
    )


@contextmanager
def transformers(model: Path, folder: Path) -> Iterator[dict[str, Ask]]:
    del model  # the engine makes its own
    shape = [
        "--block-tokens", str(_BLOCK_TOKENS), "--num-blocks", str(KV_TOKENS // _BLOCK_TOKENS)
    ]  # fmt: skip
    with ExitStack() as ends:
        engines = {
            name: ends.enter_context(
                TransformersEngine(
                    SERIES, folder / f"transformers_{name}.log", shape, environment(name)
                )
            )
            for name in NAMES
        }
        for engine in engines.values():
            engine.wait_until_ready()
        yield {name: partial(_ask_transformers, engine) for name, engine in engines.items()}
        for engine in engines.values():
            engine.stop()


def _ask_transformers(engine: TransformersEngine, load: Load, number: int) -> Round:
    prompts = load.first_prompts(number)
    for turn in range(load.turns):
        before = engine.ask("counters")
        answer = engine.ask(
            "timed", _DEADLINE_S, prompts=prompts, timeout_s=_DEADLINE_S,
            max_new_tokens=[load.new_tokens] * len(prompts),
        )  # fmt: skip
        after = engine.ask("counters")
        failed = answer["refused"] or answer["errors"]
        assert not failed, f"{failed}\n{engine.tail()}"
        tokens = [answer["tokens"][each] for each in answer["ids"]]
        found = Round(
            answer["total_s"], answer["cpu_s"], sum(map(len, prompts)),
            after["prefix_tokens"] - before["prefix_tokens"],
            after["preemptions"] - before["preemptions"], tokens,
        )  # fmt: skip
        if turn + 1 < load.turns:
            prompts = load.next_prompts(number, turn, prompts, tokens)
    return found


# --- the comparison ----------------------------------------------------------------------------


@dataclass
class Compared:
    """Every counted round of one load."""

    load: Load
    rounds: dict[str, list[Round]]

    def rows(self) -> list[tuple[str, ...]]:
        wall, cpu = (
            [[getattr(one, what) for one in self.rounds[name]] for name in NAMES]
            for what in ("wall_s", "cpu_s")
        )
        return [
            row(f"{self.load.name}: seconds", *wall, more_is_better=False),
            row(f"{self.load.name}: CPU seconds", *cpu, more_is_better=False),
        ]

    def note(self) -> str:
        def told(name: str) -> str:
            rounds = self.rounds[name]
            hits = sum(one.hit_tokens for one in rounds) / sum(one.prompt_tokens for one in rounds)
            return f"{name} {hits:.3f}, {sum(one.preemptions for one in rounds)}"

        pairs = zip(self.rounds[STOCK], self.rounds[ELASTIC], strict=True)
        different = sum(
            one != other
            for stock, elastic in pairs
            for one, other in zip(stock.answers, elastic.answers, strict=True)
        )
        return (
            f"{self.load.name} ({self.load.title}): part of the prompt tokens that hit the prefix"
            f" cache, and preemptions: {'; '.join(map(told, NAMES))}."
            f" Answers that differ from stock's: {different}."
        )


def measure(engines: Mapping[str, Ask], loads: list[Load], rounds: int) -> Iterator[Compared]:
    """Run every load on all engines in turns; the first round warms them up."""
    for load in loads:
        found: dict[str, list[Round]] = {name: [] for name in NAMES}
        for number in range(rounds + 1):
            for name in _ORDERS[number % len(_ORDERS)]:
                one = engines[name](load, number)
                if number > 0:
                    found[name].append(one)
        stock, again, elastic = (found[name][-1].wall_s for name in NAMES)
        print(
            f"  {time.strftime('%H:%M:%S')} {load.name}: stock {stock:.2f} s,"
            f" kvelastic {elastic:.2f} s, {AGAIN} {again:.2f} s",
            flush=True,
        )
        yield Compared(load, found)


def part(
    engine: str, title: str, engines: Mapping[str, Ask], loads: list[Load], rounds: int
) -> Part:
    load_before, begin_s = os.getloadavg()[0], time.monotonic()
    assert _INSTANCE in {info.name for info in segment.list_segments()}, "it is not elastic"
    compared = list(measure(engines, loads, rounds))
    table = Table(
        headings(*NAMES),
        [line for one in compared for line in one.rows()],
        [f"{rounds} rounds of each load, in turns.", *(one.note() for one in compared)],
        {
            one.load.name: {
                name: [vars(each) | {"answers": None} for each in found]
                for name, found in one.rounds.items()
            }
            for one in compared
        },
    )
    return Part(engine, title, load_before, time.monotonic() - begin_s, table)


def parts(given: argparse.Namespace, model: Path, folder: Path) -> Iterator[Part]:
    rounds = 1 if given.quick else given.rounds
    chosen = given.engine or ENGINES
    if "vllm" in chosen:
        for kind, every_load in engine_kinds():
            if loads := [one for one in every_load if given.load in (None, one.name)]:
                with vllm(kind, model, folder) as engines:
                    yield part("vllm", f"vLLM, {kind}", engines, loads, rounds)
    for name, started in (("sglang", sglang), ("transformers", transformers)):
        if name in chosen and given.load in (None, MULTI_TURN.name):
            with started(model, folder) as engines:
                yield part(name, name, engines, [MULTI_TURN], rounds)


def main() -> int:
    """Measure, print and keep; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench alone",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = [load.name for _, loads in engine_kinds() for load in loads]
    parser.add_argument("--engine", choices=ENGINES, action="append", help="repeatable")
    parser.add_argument("--load", choices=names)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--quick", action="store_true", help="one round; kept in build/")
    given = parser.parse_args()
    told, done = facts(), []
    with TemporaryDirectory(prefix="kvelastic-bench-alone-") as folder:
        try:
            model = prepare("tiny", Path(folder)).folder
            for one in parts(given, model, Path(folder)):
                print(f"\n{one.markdown()}\n", flush=True)
                done.append(one)
        except (AssertionError, OSError, subprocess.SubprocessError) as error:
            print(f"FAILED: {error or type(error).__name__}", file=sys.stderr)
            return 1
        finally:  # vLLM's engines are killed
            ledger.reap()
            segment.reap()
    is_whole = not (given.quick or given.engine or given.load)
    pages.write("alone", "A server on its own", told, done, is_whole=is_whole)
    return 0


if __name__ == "__main__":
    end_by_exception()
    sys.exit(main())
