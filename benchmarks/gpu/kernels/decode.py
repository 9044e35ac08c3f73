"""Tokens of a decoder whose cache loses and gains pages while it runs, beside a dense cache's.

    python -m benchmarks.gpu.kernels.decode                       10,000 tokens, eagerly
    python -m benchmarks.gpu.kernels.decode --graphs              as CUDA graph replays
    python -m benchmarks.gpu.kernels.decode --control stale-table shows that a wrong block is seen
    python -m benchmarks.gpu.kernels.decode --control no-fences   the same of a page unmapped early

Two decoders with the same weights take the same steps, one over a pool of kvelastic's, the other
over plain tensors, and each feeds itself its own tokens. Meanwhile the pool's limit goes down and
up, sequences are preempted and begin again, and blocks are overwritten before they are freed. The
host runs ahead of the GPU, so that blocks are freed before the kernels that read them have begun.
Without a GPU, attention is torch's own, on host memory, where every kernel is done at once;
tests/programs/late_decode.py makes them late, on the simulated driver. Controls run with guard
pages, so that a stale block is read, and not faulted on.

Tokens must be equal, and so must every bit of the states they were chosen by.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks import harness
from benchmarks.gpu.kernels import runtime, schedule
from benchmarks.gpu.kernels.decoder import VOCABULARY, Decoder, Layers, Trajectory
from benchmarks.gpu.kernels.elastic_cache import BESIDE_BLOCKS, ElasticCache
from benchmarks.gpu.kernels.paged_attention import EagerAttention, PagedAttention
from benchmarks.gpu.kernels.pressure import ANSWER_S, Pressure
from benchmarks.gpu.kernels.runtime import NEEDS_GPU, NeedsGpuError, Runtime
from benchmarks.gpu.kernels.schedule import Schedule, Sequence
from benchmarks.vmm.models import Model

if TYPE_CHECKING:
    import torch

    from kvelastic.device.selection import Device

STALE_TABLE: Final = "stale-table"
NO_FENCES: Final = "no-fences"
SPLITS: Final = 4
STEPS_AHEAD: Final = 32
"""How far the host runs ahead of the GPU at most."""
ARRIVAL_S: Final = 1.0
MOST_EMPTY_LOOKS: Final = 60


@dataclass(frozen=True)
class Work:
    """The shape of the run; lengths are of tokens, from and to."""

    model: Model
    slots: int
    prompt: tuple[int, int]
    generated: tuple[int, int]
    steps_a_limit: int
    lag_cycles: int = 0
    """A kernel that only waits, every eighth step: the GPU falls behind the host."""

    @property
    def most_tokens(self) -> int:
        return self.prompt[1] + self.generated[1]

    @property
    def columns(self) -> int:
        """Of a block table."""
        return -(-self.most_tokens // self.model.tokens_per_block)


ON_GPU: Final = Work(
    Model("tiny", layers=4, query_heads=32, kv_heads=8, head_dim=128),
    slots=16, prompt=(16, 256), generated=(32, 256), steps_a_limit=48, lag_cycles=10_000_000,
)  # fmt: skip
ON_HOST: Final = Work(
    Model("tiny", layers=2, query_heads=8, kv_heads=8, head_dim=128),
    slots=6, prompt=(24, 64), generated=(8, 24), steps_a_limit=10,
)  # fmt: skip
LAG_EVERY: Final = 8
LONGER_WITHOUT_FENCES: Final = 10
"""So that pages are unmapped under kernels in any case."""


class Inputs:
    """What a step reads, always at the same addresses: a graph finds it there."""

    def __init__(self, work: Work, device: str) -> None:
        import torch

        self._work = work
        self._pins = device != "cpu"
        self.rows = torch.zeros((work.slots, 4), dtype=torch.int64, device=device)
        self.table = torch.zeros((work.slots, work.columns), dtype=torch.int32, device=device)

    def prepare(self, running: list[Sequence], no_sequence: int) -> Callable[[], None]:
        """What writes it, to be queued. Behind a row's own blocks is the null block."""
        rows = [[no_sequence, 0, 0, 0] for _ in range(self._work.slots)]
        table = [[0] * self._work.columns for _ in range(self._work.slots)]
        for each in running:
            rows[each.slot] = [each.index, each.position, each.prompt_tokens, 1]
            table[each.slot][: len(each.ids)] = each.ids

        def write() -> None:
            self.copy(self.rows, rows)
            self.copy(self.table, table)

        return write

    def copy(self, target: torch.Tensor, values: list[Any]) -> None:
        """Without waiting: from pinned memory, which torch keeps as long as the copy lasts."""
        import torch

        source = torch.tensor(values, dtype=target.dtype, pin_memory=self._pins)
        target.copy_(source, non_blocking=True)


class Run:
    """Both decoders, and the pool under one of them."""

    _answer_s = ANSWER_S

    def __init__(self, where: Runtime, work: Work, tokens: int, control: str | None) -> None:
        import torch

        self._where, self._work, self._control = where, work, control
        self._device = where.device
        self._streams = [torch.cuda.Stream() for _ in range(2)] if where.is_gpu else []
        own = self._open([each.cuda_stream for each in self._streams])
        sequences = schedule.draw(tokens, work.prompt, work.generated)
        self._prompts = [each.prompt_tokens for each in sequences]
        self._ends = [each.tokens for each in sequences]
        self._no_sequence = len(sequences)
        # No more than are used: else no limit would be felt by a few sequences.
        blocks = min(work.slots, len(sequences)) * work.columns
        with contextlib.ExitStack() as opened, self.on_stream():
            self._cache = ElasticCache(
                work.model, own, blocks, where.dtype, guard_pages=control is not None
            )
            opened.callback(self._cache.close)
            self._neighbour = ElasticCache(work.model, own, blocks, where.dtype)
            opened.callback(self._neighbour.close)
            self._schedule = Schedule(
                sequences,
                work.slots,
                work.model.tokens_per_block,
                self._cache.pool.blocks.alloc,
                self._release,
            )
            self._build()
            self._opened = opened.pop_all()

    def _open(self, streams: list[int]) -> Device:
        """Where the pools lie; its driver is told of these streams, or, as a control, of none."""
        from kvelastic.config import load
        from kvelastic.device.selection import resolve

        own = resolve("cuda" if streams else "host", load())
        if streams:
            own.driver().use_streams([] if self._control == NO_FENCES else streams)  # type: ignore[attr-defined]
        return own

    def _queue(self, kernels: Callable[[], None]) -> None:
        """Kernels, in the order of the decoders' stream."""
        kernels()

    def _change_limit(self, under: Pressure) -> None:
        """The new limit holds some time later, while steps go on."""
        under.next()

    def _wait_for_kernels(self) -> None:
        self._where.synchronize()

    def _build(self) -> None:
        import torch

        work = self._work
        shape = (work.slots * work.columns, *work.model.block_shape)
        dense: Layers = [
            tuple(torch.zeros(shape, dtype=self._where.dtype, device=self._device) for _ in "kv")
            for _ in range(work.model.layers)
        ]
        self._dense_table = (
            torch.arange(shape[0], device=self._device).view(work.slots, -1).int().contiguous()
        )
        generator = torch.Generator().manual_seed(11)
        log = torch.randint(
            VOCABULARY, (self._no_sequence + 1, work.most_tokens + 1), generator=generator
        ).to(self._device)
        decoder = Decoder(work.model, work.most_tokens, self._device, self._where.dtype)
        self._elastic, self._dense = (
            Trajectory(decoder, layers, self._attention(), log)
            for layers in (self._cache.layers, dense)
        )
        self._inputs = Inputs(work, self._device)
        self._differing_states = torch.zeros((), dtype=torch.int64, device=self._device)
        self._freed: list[int] = []
        self._stale: tuple[int, int] | None = None
        self.steps = 0
        self._inputs.prepare([], self._no_sequence)()
        self._where.synchronize()

    def _attention(self) -> Any:
        work = self._work
        if not self._where.has_triton:
            return EagerAttention(work.model)
        return PagedAttention(
            requests=work.slots, model=work.model, splits=SPLITS, device=self._device
        )

    def on_stream(self) -> Any:
        """Kernels of the decoders are queued in here."""
        import torch

        return torch.cuda.stream(self._streams[0]) if self._streams else contextlib.nullcontext()

    def _release(self, ids: list[int]) -> None:
        """Blocks that a sequence has done with; kernels that read them may not have begun."""
        import torch

        def poison() -> None:
            device_ids = torch.empty(len(ids), dtype=torch.int64, device=self._device)
            self._inputs.copy(device_ids, ids)
            self._cache.poison(device_ids)

        self._queue(poison)
        self._cache.pool.blocks.free(ids)
        self._freed = ids

    def _both(self) -> None:
        """One step of both decoders, and how many slots differ; no address changes."""
        import torch

        rows, table = self._inputs.rows, self._inputs.table
        states = (
            self._elastic.step(rows, table).view(torch.int32),
            self._dense.step(rows, self._dense_table).view(torch.int32),
        )
        differs = (states[0] != states[1]).any(1) & (rows[:, 3] == 1)
        self._differing_states += differs.sum()

    def _captured(self) -> Callable[[], None]:
        """The step as a graph. Before it, once without: kernels and workspaces are made then."""
        import torch

        self._both()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._streams[0]):
            self._both()
        return graph.replay

    def all_tokens(self, *, graphs: bool) -> dict[str, Any]:
        """Generates everything, and answers what came of it."""
        with self.on_stream():
            step = self._captured() if graphs else self._both
            under = Pressure(
                self._cache,
                self._neighbour,
                self._work.columns + BESIDE_BLOCKS,
                self._streams[1] if self._streams else None,
                self._answer_s,
            )
            try:
                self._loop(step, under)
            finally:
                under.stop()
            self._wait_for_kernels()
            return self._outcome(under)

    def _loop(self, step: Callable[[], None], under: Pressure) -> None:
        import torch

        blocks, ahead, empty_looks = self._cache.pool.blocks, deque[Any](), 0
        lag_cycles = self._work.lag_cycles
        if self._control == NO_FENCES:
            lag_cycles *= LONGER_WITHOUT_FENCES
        while not self._schedule.is_done:
            seen = blocks.availability_epoch
            running = self._schedule.plan(over_limit=blocks.is_over_limit)
            if not running:
                empty_looks += 1
                if empty_looks > MOST_EMPTY_LOOKS:
                    raise RuntimeError(f"no block has come for {MOST_EMPTY_LOOKS} s")
                self._change_limit(under)
                blocks.wait_for_epoch(seen, ARRIVAL_S)
                continue
            empty_looks = 0
            self._queue(self._inputs.prepare(self._shown(running), self._no_sequence))
            if self._where.is_gpu and self.steps % LAG_EVERY == 0:
                torch.cuda._sleep(lag_cycles)
            self._queue(step)
            self._schedule.advance()
            self.steps += 1
            if self.steps % self._work.steps_a_limit == 0:
                self._change_limit(under)
            if self._where.is_gpu:
                ahead.append(self._streams[0].record_event())
                if len(ahead) > STEPS_AHEAD:
                    ahead.popleft().synchronize()

    def _shown(self, running: list[Sequence]) -> list[Sequence]:
        """What the block table says: the truth, but for the control that has one stale block."""
        if self._control != STALE_TABLE:
            return running
        held = {block for each in running for block in each.ids}
        if self._stale is None and self._freed and self._freed[0] not in held:
            # Of one that has long to go, so that many tokens come after it.
            victim = max(running, key=lambda each: each.tokens - each.position)
            self._stale = (victim.index, self._freed[0])
        if self._stale is None:
            return running
        index, block = self._stale
        return [
            Sequence(each.index, each.prompt_tokens, each.tokens, each.slot, each.position,
                     [block, *each.ids[1:]])
            if each.index == index and len(each.ids) > 1 else each
            for each in running
        ]  # fmt: skip

    def _outcome(self, under: Pressure) -> dict[str, Any]:
        logs = [each.log.cpu() for each in (self._elastic, self._dense)]
        pairs = [
            (logs[0][index, begin:end], logs[1][index, begin:end])
            for index, (begin, end) in enumerate(zip(self._prompts, self._ends, strict=True))
        ]
        stats = self._cache.pool.blocks.stats()
        return {
            "tokens": sum(len(mine) for mine, _ in pairs),
            "differing_tokens": sum(int((mine != right).sum()) for mine, right in pairs),
            "differing_states": int(self._differing_states),
            "distinct_tokens": len({token for _, right in pairs for token in right.tolist()}),
            "sequences": len(pairs),
            "steps": self.steps,
            "preemptions": self._schedule.preemptions,
            "limits_requested": under.requests,
            "limits_applied": under.applied,
            "pages_mapped": stats["pages_mapped_ever"],
            "pages_unmapped": stats["pages_unmapped_ever"],
            "pages_poisoned": under.pages_poisoned,
        }

    def close(self) -> None:
        """All memory back."""
        self._opened.close()

    def abandon(self) -> None:
        """The same where the GPU's context is lost: only what others see goes."""
        for each in (self._cache, self._neighbour):
            with contextlib.suppress(Exception):
                each.pool.segment.close()


def problems(told: dict[str, Any]) -> list[str]:
    """Why the run is no proof that nothing was corrupted; empty: it is one."""
    wrong, needed = ("tokens", "states"), ("limits_applied", "pages_unmapped", "pages_poisoned")
    found = [
        f"{told[f'differing_{name}']} differing {name}"
        for name in wrong
        if told[f"differing_{name}"]
    ]
    found += [
        f"no {name.replace('_', ' ')}: nothing happened under the decoder"
        for name in needed
        if not told[name]
    ]
    if told["distinct_tokens"] * 20 < told["tokens"]:
        found.append(f"only {told['distinct_tokens']} distinct tokens: a wrong one may not show")
    return found


def run(
    where: Runtime,
    work: Work,
    tokens: int,
    *,
    graphs: bool = False,
    control: str | None = None,
    kind: type[Run] = Run,
) -> dict[str, Any]:
    """Generates at least `tokens` tokens. With `control`, `seen` says whether it was noticed."""
    told: dict[str, Any] = {**where.facts(), "graphs": graphs, "control": control}
    this = kind(where, work, tokens, control)
    try:
        told |= this.all_tokens(graphs=graphs)
    except Exception as fault:
        if control != NO_FENCES:
            this.close()
            raise
        this.abandon()
        said = f"{type(fault).__name__}: {fault}".split("\n")[0]
        return told | {"seen": True, "fault": said}
    this.close()
    if control is not None:
        told["seen"] = bool(told["differing_tokens"] and told["differing_states"])
    return told


def lines(told: dict[str, Any]) -> list[str]:
    """For people."""
    how = "CUDA graphs" if told["graphs"] else "eager"
    said = [f"{told['device']}, {how}"]
    if "tokens" in told:
        said += [
            f"  {told['differing_tokens']} differing of {told['tokens']} tokens"
            f" ({told['distinct_tokens']} distinct), {told['differing_states']} differing states",
            f"  {told['sequences']} sequences in {told['steps']} steps,"
            f" {told['preemptions']} preemptions",
            f"  {told['limits_applied']} of {told['limits_requested']} limits applied,"
            f" {told['pages_mapped']} pages mapped, {told['pages_unmapped']} unmapped,"
            f" {told['pages_poisoned']} poisoned by the neighbour",
        ]
    if "fault" in told:
        said.append(f"  the kernels ended with {told['fault']}")
    if told["control"]:
        said.append(f"  control {told['control']}: {'seen' if told['seen'] else 'NOT SEEN'}")
    return said + [f"  NO PROOF: {problem}" for problem in told.get("problems", ())]


def _where(*, graphs: bool, control: str | None) -> Runtime:
    try:
        return runtime.compiled()
    except NeedsGpuError as reason:
        if graphs:
            raise NeedsGpuError(f"{reason}, and the processor has no CUDA graphs") from None
        if control == NO_FENCES:
            raise NeedsGpuError(f"{reason}, and on the processor no kernel is late") from None
        return runtime.eager()


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.kernels.decode", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--json", type=Path, help="keep all figures in this file")
    parser.add_argument("--tokens", type=int, default=10_000, help="to generate (default 10000)")
    parser.add_argument("--graphs", action="store_true", help="as replays of a CUDA graph")
    parser.add_argument(
        "--control", choices=(STALE_TABLE, NO_FENCES), help="break it, and see that it is noticed"
    )
    given = parser.parse_args()
    try:
        where = _where(graphs=given.graphs, control=given.control)
    except NeedsGpuError as reason:
        print(f"needs a GPU: {reason}")
        return NEEDS_GPU
    work = ON_GPU if where.is_gpu else ON_HOST
    told = harness.facts() | run(
        where, work, given.tokens, graphs=given.graphs, control=given.control
    )
    if given.control is None:
        told["problems"] = problems(told)
    print("\n".join(lines(told)), flush=True)
    if given.json:
        given.json.write_text(json.dumps(told, indent=1) + "\n")
    status = 0 if told.get("seen", not told.get("problems")) else 1
    if "fault" in told:
        os._exit(status)  # a lost context fails whatever would be ended in order
    return status


if __name__ == "__main__":
    sys.exit(main())
