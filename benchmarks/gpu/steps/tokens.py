"""Tokens a second of transformers' continuous batching: stock, and on an elastic cache, by turns.

Two engines of the same random Llama stay; the same prompts go to one, then to the other: stock,
elastic, stock again, elastic again. What stock differs from itself is the control, of the speed
and of the tokens. After it the memory of the elastic one is seen to come back. It ends by itself:
no turn begins that would end after `--seconds`.
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from collections.abc import Sequence
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
from benchmarks.harness import bootstrap_range, number
from benchmarks.transformers.comparison import Ratio, verdict
from benchmarks.vmm.section import Section

STOCK, ELASTIC, STOCK_AGAIN, ELASTIC_AGAIN = ORDER = (
    "stock", "elastic", "stock again", "elastic again"
)  # fmt: skip
REHEARSAL_S = 900.0
"""On whichever CPU is there, instead of `--seconds`."""
_READY_S = 40.0
_GIVEN_BACK_S = 16.0
"""Pages of who is idle go back every five seconds; what was kept ahead of demand goes last."""
_KEPT_PAGES = 6
_GPU = {
    "shape": {
        "vocab_size": 32_000, "hidden_size": 2048, "intermediate_size": 8192,
        "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 64,
    },
    "dtype": "bfloat16", "block_tokens": 256, "num_blocks": 128, "max_batch_tokens": 2048,
}  # fmt: skip
_CPU = {
    "shape": {
        "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 8,
        "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32,
    },
    "dtype": "float32", "block_tokens": 16, "num_blocks": 256, "max_batch_tokens": 256,
}  # fmt: skip
_GPU_LOAD = {"count": 32, "prompt_tokens": 512, "new_tokens": 128}
_CPU_LOAD = {"count": 12, "prompt_tokens": 96, "new_tokens": 16}


def has_gpu() -> bool:
    """Asked of the driver alone: this process makes no context."""
    import ctypes

    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int()
    return (
        cuda.cuInit(0) == 0 and cuda.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0
    )


def options_of(base: dict[str, Any], **more: Any) -> dict[str, Any]:
    """An engine's; a batch may read all that the cache can hold, in stock and on kvelastic.

    Where attention needs a mask an elastic one reads as much as the longest request may have.
    """
    tokens = (more.get("num_blocks") or base["num_blocks"]) * base["block_tokens"]
    shape = base["shape"] | {"max_position_embeddings": tokens}
    return base | {"shape": shape} | more


def main() -> None:
    def more(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--seconds", type=float, default=52.0, help="no turn ends after it")
        parser.add_argument("--attention", help="instead of what transformers takes by itself")
        parser.add_argument("--max-rounds", type=int, default=12)
        parser.add_argument("--tiny", action="store_true", help="the shape for a CPU")

    with Findings.of_command(__doc__, more) as found:
        if importlib.util.find_spec("transformers") is None:
            found.skip("needs transformers")
            return
        begun = time.monotonic()
        with Engines() as engines:
            Measurement(found, engines, begun).run()


class Measurement:
    def __init__(self, found: Findings, engines: Engines, begun: float) -> None:
        self.found = found
        self.engines = engines
        self.begun = begun
        self.seconds = found.arguments.seconds if has_gpu() else REHEARSAL_S
        self.end = begun + self.seconds
        tiny = found.arguments.tiny or not has_gpu()
        self.options = options_of(_CPU if tiny else _GPU, attention=found.arguments.attention)
        self.load = dict(_CPU_LOAD if tiny else _GPU_LOAD)
        if found.quick:
            self.load["new_tokens"] //= 4
        self.rounds = 2 if found.quick else found.arguments.max_rounds
        self.nvml = Nvml()
        self.turns: dict[str, list[dict[str, Any]]] = {name: [] for name in ORDER}
        self.tokens: dict[int, dict[str, list[list[int]]]] = {}

    def run(self) -> None:
        with to_the_end(self.found):
            if self._start():
                with LedgerWatch(self.engines) as watch:
                    self._turns()
                self.found.figure("elastic_most_granted_mib", watch.most_bytes >> 20)
                self._given_back()
        self._conclude()

    def _start(self) -> bool:
        self.found.figure("gpu_used_at_first_mib", self.nvml.used_mib())
        self.engines.start(STOCK, self.options)
        self.engines.start(ELASTIC, self.options, elastic=True)
        failed = self.engines.wait_until_ready(max(_READY_S, self.seconds - 20.0))
        for name, why in failed.items():
            self.found.check(f"{name} starts", False, why)
        if failed:
            return False
        stock, elastic = self.engines[STOCK].facts, self.engines[ELASTIC].facts
        told = (
            "attention", "cuda_graphs", "asynchronous", "compiled", "batch_tokens",
            "tokens_read", "weights_sum", "parameters",
        )  # fmt: skip
        self.found.figure("engine", {name: stock[name] for name in (*told, "torch", "device")})
        self.found.figure(
            "start_s", {name: self.engines[name].facts["begun_s"] for name in (STOCK, ELASTIC)}
        )
        self.found.line(
            f"transformers {stock['transformers']}, torch {stock['torch']}, {stock['device']};"
            f" {stock['parameters'] / 1e9:.2f}e9 random parameters, {self.options['dtype']};"
            f" attention {stock['attention']}, CUDA graphs {stock['cuda_graphs']}, asynchronous"
            f" batches {stock['asynchronous']}, {stock['batch_tokens']} tokens a batch."
        )
        if not self.found.arguments.attention:
            self.found.line(
                f"Attention is what transformers took by itself ({stock['attention']})."
            )
        unequal = {
            name: (stock[name], elastic[name]) for name in told if stock[name] != elastic[name]
        }
        self.found.check(
            "both are set up alike, with the same weights", not unequal, str(unequal or "")
        )
        self.found.check("stock runs without kvelastic", not stock["instances"])
        self.found.check(
            "the cache is kvelastic's", bool(elastic["instances"]), f"{elastic['instances']}"
        )
        self.found.figure("gpu_used_ready_mib", self.nvml.used_mib())
        self.found.figure("elastic_granted_ready_mib", self._granted() >> 20)
        return True

    def _burst(self, name: str, seed: int) -> dict[str, Any]:
        limit_s = max(5.0, self.end - time.monotonic())
        engine = self.engines[STOCK if name in (STOCK, STOCK_AGAIN) else ELASTIC]
        return engine.ask("burst", limit_s + 10.0, seed=seed, within_s=limit_s, **self.load)

    def _turns(self) -> None:
        for name in (STOCK, ELASTIC):
            self._burst(name, 1)  # kernels are loaded, memory is found
        longest = 0.0
        for turn in range(self.rounds):
            seed = 100 + turn
            for name in ORDER:
                begun = time.monotonic()
                if begun + 1.3 * longest > self.end:
                    self.found.line(f"The time is over after {turn} whole rounds.")
                    return
                answer = self._burst(name, seed)
                longest = max(longest, time.monotonic() - begun)
                if not self._keep(name, turn, answer):
                    return

    def _keep(self, name: str, turn: int, answer: dict[str, Any]) -> bool:
        if why := why_unanswered(answer, self.load["new_tokens"]):
            self.found.check(f"turn {turn} of {name} is answered", False, why)
            return False
        tokens = sum(map(len, answer["tokens"]))
        self.tokens.setdefault(turn, {})[name] = answer["tokens"]
        self.turns[name].append(
            {
                "tokens_a_s": tokens / answer["total_s"],
                "total_s": answer["total_s"],
                "cpu_us_a_token": 1e6 * answer["cpu_s"] / tokens,
                "first_p50_ms": 1e3 * p(answer["first_s"], 50),
                "gap_p50_ms": 1e3 * p(answer["gaps_s"], 50),
                "gap_p99_ms": 1e3 * p(answer["gaps_s"], 99),
                "gap_max_ms": 1e3 * max(answer["gaps_s"], default=0.0),
                "batches": answer["batches"],
                "preemptions": answer["preemptions"],
            }
        )
        self.found.figure("turns", self.turns)
        last = self.turns[name][-1]
        print(f"  {turn} {name}: {last['tokens_a_s']:.0f} tokens/s", flush=True)
        return True

    def _granted(self) -> int:
        info = self.engines.ledger()
        return 0 if info is None else info.granted_bytes

    def _given_back(self) -> None:
        """What the elastic one held comes back to the device, by the ledger and by the device."""
        info = self.engines.ledger()
        page = max((each.page_bytes for each in info.members), default=0) if info else 0
        before, used_before = self._granted(), self.nvml.used_bytes()
        begun = time.monotonic()
        seen: list[tuple[float, int]] = []
        while time.monotonic() < begun + _GIVEN_BACK_S:
            held = self._granted()
            if not seen or seen[-1][1] != held >> 20:
                seen.append((round(time.monotonic() - begun, 2), held >> 20))
            if held <= page:
                break
            time.sleep(0.05)
        self.found.figure("elastic_granted_mib_while_idle", seen)
        waited_s = time.monotonic() - begun
        after, used_after = self._granted(), self.nvml.used_bytes()
        self.found.figure("elastic_granted_after_last_turn_mib", before >> 20)
        self.found.figure("elastic_granted_at_rest_mib", after >> 20)
        self.found.figure("page_mib", page >> 20)
        self.found.check(
            "an idle elastic cache holds one page, and what is kept ahead of demand",
            0 < after <= _KEPT_PAGES * page,
            f"{before >> 20} MiB after the last turn, {after >> 20} after {waited_s:.1f} s;"
            f" a page has {page >> 20}",
        )
        if used_before is None or used_after is None:
            return
        freed = used_before - used_after
        self.found.figure("gpu_used_at_rest_mib", used_after >> 20)
        self.found.check(
            "the device has that memory back",
            freed >= 0.9 * (before - after),
            f"{freed >> 20} MiB of {(before - after) >> 20}",
        )

    # --- what it comes to ------------------------------------------------------------------------

    def _conclude(self) -> None:
        whole = min(len(each) for each in self.turns.values())
        self.found.figure("rounds", whole)
        self.found.check(
            "there are whole rounds", whole >= (1 if self.found.quick else 3), f"{whole}"
        )
        self.found.figure("took_s", round(time.monotonic() - self.begun, 1))
        if not whole:
            return
        self._compare_tokens(whole)
        rows = [
            self._row("tokens/s", "tokens_a_s", whole),
            self._row("CPU us a token", "cpu_us_a_token", whole),
            self._row("between tokens, p50, ms", "gap_p50_ms", whole),
            self._row("between tokens, p99, ms", "gap_p99_ms", whole),
            self._row("first token, p50, ms", "first_p50_ms", whole),
        ]
        speeds = {name: [t["tokens_a_s"] for t in self.turns[name][:whole]] for name in ORDER}
        control = _ratio(speeds[STOCK_AGAIN], speeds[STOCK])
        own = _pooled(speeds)
        for name in ORDER:
            self.found.figure(f"{name.replace(' ', '_')}_tokens_a_s", median(speeds[name]))
        self.found.figure("ratio", [own.middle, own.least, own.most])
        self.found.figure("control_ratio", [control.middle, control.least, control.most])
        inverted = own.inverted()
        self.found.figure("verdict", verdict(control, inverted))
        load = self.load
        self.found.table(
            Section(
                f"Tokens a second, {load['count']} prompts of {load['prompt_tokens']} tokens,"
                f" {load['new_tokens']} new: median (least .. most) of {whole} rounds",
                ("figure", *ORDER, "stock again / stock", "elastic / stock (both, pooled)"),
                rows,
                [
                    f"By tokens/s: {verdict(control, inverted)} (elastic / stock {own}, control"
                    f" {control}; a range is of 95 % of other draws of the rounds).",
                    "The prefix cache is off: every prompt is computed in every turn.",
                ],
            )
        )

    def _row(self, title: str, key: str, whole: int) -> tuple[str, ...]:
        samples = {name: [turn[key] for turn in self.turns[name][:whole]] for name in ORDER}
        return (
            title,
            *(
                f"{number(median(each))} ({number(min(each))} .. {number(max(each))})"
                for each in samples.values()
            ),
            str(_ratio(samples[STOCK_AGAIN], samples[STOCK])),
            str(_pooled(samples)),
        )

    def _compare_tokens(self, whole: int) -> None:
        rounds = [self.tokens[turn] for turn in range(whole)]
        control = add_up([differing(each[STOCK_AGAIN], each[STOCK]) for each in rounds])
        own = add_up(
            [
                differing(each[name], each[STOCK])
                for each in rounds
                for name in (ELASTIC, ELASTIC_AGAIN)
            ]
        )
        self.found.figure("differing_control", control)
        self.found.figure("differing_elastic", own)
        self.found.line(f"Stock again beside stock: {said(control)}.")
        self.found.line(f"Elastic beside stock: {said(own)}.")
        mine = own["tokens"] / own["of_tokens"]
        allowed = control["tokens"] / control["of_tokens"]
        self.found.check(
            "elastic differs from stock no more than stock from itself",
            mine <= 1.25 * allowed,
            f"{mine:.4f} of the tokens, the control {allowed:.4f}",
        )
        distinct = len({token for each in rounds for one in each[STOCK] for token in one})
        self.found.check("tokens vary, so a wrong one shows", distinct > 20, f"{distinct} distinct")


def _ratio(samples: Sequence[float], stock: Sequence[float]) -> Ratio:
    return _of([mine / max(other, 1e-12) for mine, other in zip(samples, stock, strict=True)])


def _pooled(samples: dict[str, list[float]]) -> Ratio:
    """Both turns of each round together."""
    rounds = zip(*(samples[name] for name in ORDER), strict=True)
    return _of([(e + e2) / max(s + s2, 1e-12) for s, e, s2, e2 in rounds])


def _of(quotients: list[float]) -> Ratio:
    drawn = bootstrap_range(lambda draw: median(quotients[i] for i in draw), len(quotients))
    return Ratio(median(quotients), *drawn)


if __name__ == "__main__":
    main()
