"""Two engines and one KV budget: halves that are fixed, or one ledger; the time to the first token.

Bursts come to one engine, then to the other, and each needs more than half of the budget. Beside
both: one engine that has all of the budget for itself. Continuous batching of transformers, the
same random model in all. It ends by itself: nothing begins that would last beyond `--seconds`.
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from statistics import median
from typing import Any

from benchmarks.gpu.batching import (
    Engines,
    LedgerWatch,
    Nvml,
    add_up,
    differing,
    p,
    said,
    to_the_end,
    why_unanswered,
)
from benchmarks.gpu.findings import Findings
from benchmarks.gpu.line_child import ChildError
from benchmarks.gpu.steps.tokens import REHEARSAL_S, has_gpu, options_of
from benchmarks.harness import number
from benchmarks.vmm.section import Section
from kvelastic.shared import ledger

LONE, HALVES, ELASTIC = ARRANGEMENTS = ("lone", "halves", "elastic")
ENGINES = {
    LONE: ("lone", "lone"),
    HALVES: ("half 1", "half 2"),
    ELASTIC: ("elastic 1", "elastic 2"),
}
"""Who gets the first burst of a pair, and who the second."""
_READY_S = 50.0
_LOOK_S = 1.5
"""Maintenance threads look at a shared device every second."""
_GPU: dict[str, Any] = {
    # The layers of Llama 2 7B, eight of them: 2 x 8 x 32 heads x 128 x 2 bytes, 128 KiB a token.
    "shape": {
        "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 11_008,
        "num_hidden_layers": 8, "num_attention_heads": 32, "num_key_value_heads": 32,
        "head_dim": 128,
    },
    "dtype": "bfloat16", "block_tokens": 64, "num_blocks": 768, "max_batch_tokens": 2048,
}  # fmt: skip
_CPU: dict[str, Any] = {
    # 2 x 8 x 4 heads x 32 x 4 bytes, 8 KiB a token.
    "shape": {
        "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 8,
        "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32,
    },
    "dtype": "float32", "block_tokens": 16, "num_blocks": 384, "max_batch_tokens": 256,
}  # fmt: skip
_GPU_LOAD = {"count": 24, "prompt_tokens": 1500, "new_tokens": 128}
_CPU_LOAD = {"count": 24, "prompt_tokens": 150, "new_tokens": 24}
_COLUMNS = {
    "bursts": "bursts", "p50_s": "p50, s", "p99_s": "p99, s", "max_s": "most, s",
    "most_s": "most of a burst, median, s", "most_in": "in its batch", "burst_s": "a burst, s",
    "gap_p50_ms": "between tokens, ms", "preemptions": "preempted",
}  # fmt: skip
_WARM_TOKENS = 4
_PAUSES_S = (1.0, 0.0)
"""Between the end of a burst and the other engine's, by rounds. kvelastic counts an engine as idle,
and its memory as others', half a second after it has last taken or given a block."""


def main() -> None:
    def more(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--seconds", type=float, default=98.0, help="nothing ends after it")
        parser.add_argument("--attention", help="instead of what transformers takes by itself")
        parser.add_argument("--rounds", type=int, default=3)
        parser.add_argument("--tiny", action="store_true", help="the shape for a CPU")
        parser.add_argument(
            "--environ",
            action="append",
            default=[],
            metavar="NAME=VALUE",
            help="of the elastic engines: KVELASTIC_RECLAIM_WAIT=0.5",
        )

    with Findings.of_command(__doc__, more) as found:
        if importlib.util.find_spec("transformers") is None:
            found.skip("needs transformers")
            return
        begun = time.monotonic()
        tiny = found.arguments.tiny or not has_gpu()
        # Of the host's memory; of a GPU the capacity is set once all have loaded.
        environ = {} if has_gpu() else {"KVELASTIC_HOST_MEMORY": "4G"}
        environ |= dict(one.partition("=")[::2] for one in found.arguments.environ)
        found.figure("environ", environ)
        with Engines(**environ) as engines:
            Measurement(found, engines, begun, tiny=tiny).run()


class Measurement:
    def __init__(self, found: Findings, engines: Engines, begun: float, *, tiny: bool) -> None:
        self.found = found
        self.engines = engines
        self.begun = begun
        self.seconds = found.arguments.seconds if has_gpu() else REHEARSAL_S
        self.end = begun + self.seconds
        self.base = _CPU if tiny else _GPU
        self.load = dict(_CPU_LOAD if tiny else _GPU_LOAD)
        self.rounds = 1 if found.quick else found.arguments.rounds
        shape = self.base["shape"]
        self.token_bytes = (
            2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"]
            * (2 if self.base["dtype"] == "bfloat16" else 4)
        )  # fmt: skip
        self.block_bytes = self.token_bytes * self.base["block_tokens"]
        self.budget = self.block_bytes * self.base["num_blocks"]
        self.nvml = Nvml()
        self.bursts: list[dict[str, Any]] = []
        self.tokens: dict[tuple[str, int], list[list[int]]] = {}
        self.lasted: dict[str, float] = {}
        self.capacity = 0

    def run(self) -> None:
        with to_the_end(self.found):
            self._say_the_numbers()
            self._start()
            self._warm_up()
            with LedgerWatch(self.engines) as watch:
                self._set_capacity()
                watch.most_bytes, watch.most_of = 0, {}
                try:
                    self._rounds()
                finally:
                    self._judge_ledger(watch)
        self._conclude()

    # --- what is measured ------------------------------------------------------------------------

    def _say_the_numbers(self) -> None:
        load, block = self.load, self.base["block_tokens"]
        blocks = -(-(load["prompt_tokens"] + load["new_tokens"]) // block)
        need = load["count"] * blocks * self.block_bytes
        half = self.budget // 2
        fit = half // (blocks * self.block_bytes)
        self.found.figure("token_kib", self.token_bytes / 1024)
        self.found.figure("budget_mib", self.budget >> 20)
        self.found.figure("burst_mib", need >> 20)
        self.found.figure("burst", load)
        self.found.line(
            f"A token has {self.token_bytes >> 10} KiB of KV, a block {block} tokens. A burst is"
            f" {load['count']} prompts of {load['prompt_tokens']} tokens with {load['new_tokens']}"
            f" new: {blocks} blocks each, {need / 2**20:.0f} MiB in all, of a budget of"
            f" {self.budget >> 20} MiB. A half has {half >> 20} MiB: {fit} of the"
            f" {load['count']} fit (fewer with the scheduler's margin of 15 %), the others wait."
        )
        self.found.check("a burst needs more than a half, less than all", half < need < self.budget)

    def _start(self) -> None:
        self.found.figure("gpu_used_at_first_mib", self.nvml.used_mib())
        whole = self.base["num_blocks"]
        for name in dict.fromkeys(name for pair in ENGINES.values() for name in pair):
            blocks = whole // 2 if name.startswith("half") else whole
            # The same lengths are possible in all.
            options = options_of(self.base, attention=self.found.arguments.attention)
            options["num_blocks"] = blocks
            self.engines.start(name, options, elastic=name.startswith("elastic"))
        failed = self.engines.wait_until_ready(max(_READY_S, self.seconds - 70.0))
        for name, why in failed.items():
            self.found.check(f"{name} starts", False, why)
        ready = self.engines
        if not ready:
            raise ChildError("no engine has started")
        some = next(iter(ready.values())).facts
        self.found.figure("started_s", round(time.monotonic() - self.begun, 1))
        self.found.line(
            f"transformers {some['transformers']}, torch {some['torch']}, {some['device']};"
            f" {some['parameters'] / 1e9:.2f}e9 random parameters, {self.base['dtype']}; attention"
            f" {some['attention']}, CUDA graphs {some['cuda_graphs']}, asynchronous batches"
            f" {some['asynchronous']}, {some['batch_tokens']} tokens a batch, the prefix cache off."
            f" All five engines stay on the device, and one of them computes at a time."
        )
        told = ("attention", "cuda_graphs", "asynchronous", "batch_tokens", "weights_sum")
        unequal = {
            (name, what): engine.facts[what]
            for name, engine in ready.items()
            for what in told
            if engine.facts[what] != some[what]
        }
        self.found.check(
            "all are set up alike, with the same weights", not unequal, f"{unequal or ''}"
        )
        elastic = {name: bool(engine.facts["instances"]) for name, engine in ready.items()}
        self.found.check(
            "the elastic ones are kvelastic's, and no other is",
            all(is_so == name.startswith("elastic") for name, is_so in elastic.items()),
            str(elastic),
        )
        self.found.figure(
            "tokens_read", {name: engine.facts["tokens_read"] for name, engine in ready.items()}
        )
        self.found.figure("gpu_used_ready_mib", self.nvml.used_mib())

    def _warm_up(self) -> None:
        """A whole burst for each, few tokens: kernels are loaded, torch has its memory."""
        begun = time.monotonic()
        load = self.load | {"new_tokens": _WARM_TOKENS}
        for engine in self.engines.values():
            engine.tell("burst", seed=1, within_s=self._left_s(), **load)
        for name, engine in self.engines.items():
            answer = engine.answer(self._left_s() + 10.0)
            self._is_answered(f"the warm-up of {name}", answer, _WARM_TOKENS)
        self.found.figure("warm_up_s", round(time.monotonic() - begun, 1))

    def _left_s(self) -> float:
        return max(4.0, self.end - time.monotonic())

    def _set_capacity(self) -> None:
        """What both may hold of KV together is the budget from now on."""
        if not any(name in self.engines for name in ENGINES[ELASTIC]):
            return
        time.sleep(_LOOK_S)
        self._follow_others()
        end = time.monotonic() + 4.0
        info = self.engines.ledger()
        # What the warm-up has left is parked; it goes when it is asked for, or by and by.
        while info is not None and info.granted_bytes > self.budget and time.monotonic() < end:
            time.sleep(0.05)
            info = self.engines.ledger()
        if info is not None:
            self.found.figure(
                "ledger",
                {
                    "capacity_mib": info.capacity_bytes >> 20,
                    "others_mib": info.others_bytes >> 20,
                    "reserved_mib": info.reserved_bytes >> 20,
                    "granted_mib": info.granted_bytes >> 20,
                    "free_mib": info.free_bytes >> 20,
                    "page_mib": max((m.page_bytes for m in info.members), default=0) >> 20,
                },
            )

    def _follow_others(self) -> None:
        """Beside KV there are weights, contexts and other programs; they count on a GPU."""
        info = self.engines.ledger()
        if info is None:
            return
        capacity = self.budget
        if info.total_bytes == 0:
            beside = info.others_bytes + info.reserved_bytes
            used = self.nvml.used_bytes()
            if used is not None:
                self.found.figure("nvml_beside_mib", (used - info.granted_bytes) >> 20)
            capacity += beside
        if capacity != self.capacity:
            ledger.set_capacity(info.device, group=info.group, capacity_bytes=capacity)
            self.capacity = capacity

    def _rounds(self) -> None:
        # What is compared comes first, where time is short; then the floor.
        order = [(HALVES, 0), (ELASTIC, 0), (LONE, 0)]
        order += [(each, r) for r in range(1, self.rounds) for each in (HALVES, ELASTIC)]
        order += [(LONE, r) for r in range(1, self.rounds)]
        for arrangement, turn in order:
            if any(name not in self.engines for name in ENGINES[arrangement]):
                continue
            expected = 1.25 * self.lasted.get(arrangement, 4.0)
            if time.monotonic() + expected > self.end:
                self.found.line(f"No time was left for round {turn} of {arrangement}.")
                continue
            begun = time.monotonic()
            for which, name in enumerate(ENGINES[arrangement]):
                if which:
                    time.sleep(self._pause_s(turn))
                if arrangement == ELASTIC:
                    self._follow_others()
                try:
                    self._burst(arrangement, name, turn, 100 + 2 * turn + which)
                except ChildError as error:  # the others go on
                    self.found.check(f"{name} goes on to the end", False, str(error))
                    self.engines.pop(name).end()
                    break
            self.lasted[arrangement] = time.monotonic() - begun

    @staticmethod
    def _pause_s(turn: int) -> float:
        return _PAUSES_S[turn % len(_PAUSES_S)]

    def _burst(self, arrangement: str, name: str, turn: int, seed: int) -> None:
        limit_s = self._left_s()
        answer = self.engines[name].ask(
            "burst", limit_s + 10.0, seed=seed, within_s=limit_s, **self.load
        )
        whole = self._is_answered(f"round {turn} of {name}", answer, self.load["new_tokens"])
        self.bursts.append(
            {
                "arrangement": arrangement,
                "engine": name,
                "round": turn,
                "begun": answer["begun"],
                "whole": whole,
                "total_s": answer["total_s"],
                "first_s": answer["first_s"],
                "first_in": answer["first_in"],
                "at_once": name != ENGINES[arrangement][0] and not self._pause_s(turn),
                "gap_p50_ms": 1e3 * p(answer["gaps_s"], 50),
                "gap_p99_ms": 1e3 * p(answer["gaps_s"], 99),
                "batches": answer["batches"],
                "preemptions": answer["preemptions"],
                "cpu_s": answer["cpu_s"],
            }
        )
        if whole:
            self.tokens[arrangement, seed] = answer["tokens"]
        self.found.figure("bursts", self.bursts)
        firsts = answer["first_s"]
        print(
            f"  {turn} {name}: {answer['total_s']:.2f} s; first token p50 {p(firsts, 50):.2f},"
            f" most {max(firsts, default=0.0):.2f} s, in batch"
            f" {max(answer['first_in'], default=0)} of {answer['batches']}",
            flush=True,
        )

    def _is_answered(self, what: str, answer: dict[str, Any], wanted: int) -> bool:
        why = why_unanswered(answer, wanted)
        if why:
            self.found.check(f"{what} is answered", False, why)
        return not why

    def _judge_ledger(self, watch: LedgerWatch) -> None:
        if not watch.looks:
            return
        self.found.figure("most_granted_mib", watch.most_bytes >> 20)
        self.found.figure("most_granted_of_mib", {n: b >> 20 for n, b in watch.most_of.items()})
        self.found.figure("granted_mib", watch.series[-4000:])
        self.found.check(
            "both together never hold more than the budget",
            0 < watch.most_bytes <= self.budget,
            f"{watch.most_bytes >> 20} MiB at most of {self.budget >> 20}, by {watch.looks} looks",
        )
        if len({b["engine"] for b in self.bursts if b["arrangement"] == ELASTIC}) > 1:
            least = min(watch.most_of.values())
            self.found.check(
                "each has held more than a half",
                least > self.budget // 2,
                ", ".join(f"{n}: {b >> 20} MiB" for n, b in watch.most_of.items()),
            )

    # --- what it comes to ------------------------------------------------------------------------

    def _conclude(self) -> None:
        self.found.figure("took_s", round(time.monotonic() - self.begun, 1))
        rows: list[tuple[str, ...]] = []
        by: dict[str, dict[str, Any]] = {}
        kinds = [(each, at_once) for at_once in (False, True) for each in ARRANGEMENTS]
        for arrangement, at_once in kinds:
            bursts = [
                burst
                for burst in self.bursts
                if burst["arrangement"] == arrangement
                and burst["whole"]
                # For who is alone, or has a half, it is one and the same.
                and (burst["at_once"] == at_once or arrangement == LONE)
            ]
            if not bursts or (at_once and arrangement == LONE):
                continue
            name = arrangement + (", at once" if at_once else "")
            by[name] = self._figures(bursts)
            self.found.figure(name, by[name])
            rows.append((name, *(number(by[name][each]) for each in _COLUMNS)))
        self.found.check("halves and one ledger were both measured", HALVES in by and ELASTIC in by)
        if rows:
            load = self.load
            self.found.table(
                Section(
                    f"Time to the first token: bursts of {load['count']} prompts of"
                    f" {load['prompt_tokens']} tokens in turn, {self.budget >> 20} MiB of KV",
                    ("", *_COLUMNS.values()),
                    rows,
                    [
                        "lone: one engine with all of the budget. halves: two of stock with half of"
                        " it each. elastic: two in one ledger that has the budget for both.",
                        "at once: a burst that comes as soon as the other engine's has ended; else"
                        " a second later (with kvelastic who is idle for half a second gives).",
                        "No MPS; one engine computes at a time in all of them.",
                    ],
                )
            )
        self._compare_tokens()
        if HALVES in by and ELASTIC in by:
            halves, own = by[HALVES], by[ELASTIC]
            # A CPU is shared with others: batches tell what seconds do not.
            key = "most_s" if self.base is _GPU else "most_in"
            self.found.check(
                "a burst's longest wait for a first token is shorter than in halves (median)",
                own[key] < halves[key],
                f"{number(own['most_s'])} s (batch {own['most_in']:g}), in halves"
                f" {number(halves['most_s'])} s (batch {halves['most_in']:g})",
            )

    @staticmethod
    def _figures(bursts: list[dict[str, Any]]) -> dict[str, Any]:
        firsts = [first for burst in bursts for first in burst["first_s"]]
        return {
            "bursts": len(bursts),
            "p50_s": p(firsts, 50),
            "p99_s": p(firsts, 99),
            "max_s": max(firsts),
            "most_s": median([max(burst["first_s"]) for burst in bursts]),
            "most_in": median([max(burst["first_in"]) for burst in bursts]),
            "burst_s": median([burst["total_s"] for burst in bursts]),
            "gap_p50_ms": median([burst["gap_p50_ms"] for burst in bursts]),
            "preemptions": sum(burst["preemptions"] for burst in bursts),
        }

    def _compare_tokens(self) -> None:
        found = {}
        for arrangement in (HALVES, ELASTIC):
            pairs = [
                differing(tokens, self.tokens[LONE, seed])
                for (which, seed), tokens in self.tokens.items()
                if which == arrangement and (LONE, seed) in self.tokens
            ]
            found[arrangement] = add_up(pairs)
            self.found.figure(f"{arrangement}_differing_from_lone", found[arrangement])
            self.found.line(f"{arrangement} beside lone: {said(found[arrangement])}.")
        own, halves = found[ELASTIC], found[HALVES]
        if not own["of_prompts"] or not halves["of_prompts"]:
            return
        exact = self.base["dtype"] == "float32"
        # Which requests share a batch decides how sums are rounded, in halves as on a ledger.
        allowed = 0.0 if exact else 1.25 * halves["prompts"] / halves["of_prompts"] + 0.05
        self.found.check(
            "tokens equal a lone engine's" if exact else "tokens differ no more than in halves",
            own["prompts"] / own["of_prompts"] <= allowed,
            said(own),
        )
        distinct = len(
            {token for tokens in self.tokens.values() for one in tokens for token in one}
        )
        self.found.check("tokens vary, so a wrong one shows", distinct > 20, f"{distinct} distinct")


if __name__ == "__main__":
    main()
