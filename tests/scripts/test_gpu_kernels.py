"""Decode attention over a paged cache: its answers, what it reads, and that wrong ones are seen.

The Triton kernels run in Triton's interpreter, in processes of their own, for a torch for the CPU
cannot bear Triton among its packages. There pages are the host's: a stray read is a SIGSEGV.
"""

from __future__ import annotations

import copy
import importlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import needs
import pytest
from simulated_machine import SimulatedMachine

from benchmarks.gpu.kernels import schedule
from benchmarks.gpu.kernels.schedule import Schedule, Sequence
from kvelastic.shared import ledger, segment

pytestmark = pytest.mark.slow


ROOT = Path(__file__).parents[2]
PROGRAMS = ROOT / "tests" / "programs"
CHILD_S = 300


def start(command: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", f"benchmarks.gpu.kernels.{command}", *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=CHILD_S,
    )


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    kept = tmp_path_factory.mktemp("kernels") / "answers.json"
    done = start("attention", "--interpret", "--json", kept)
    assert done.returncode == 0, done.stdout
    return json.loads(kept.read_text())


@needs.torch
@needs.triton
def test_kernel_matches_torch_for_any_block_placement(answers: dict[str, Any]) -> None:
    assert answers["wrong_answers"] == []
    assert max(answers["error_beside_torch"].values()) < 0.001
    layouts = answers["by_layout"]
    assert {"paged, 2 MiB", "paged, 4 MiB", "per block", "per layer"} == set(layouts)
    for told in layouts.values():
        assert told["by_batch"] == {"2": {"stored": True, "same_answer": True}}
        assert told["highest_element"] > 2**31, "offsets of 32 bits would do"


@needs.torch
@needs.triton
def test_wrong_result_is_named(answers: dict[str, Any]) -> None:
    attention = importlib.import_module("benchmarks.gpu.kernels.attention")
    wrong = copy.deepcopy(answers)
    wrong["by_layout"]["per block"]["by_batch"]["2"]["same_answer"] = False
    wrong["by_layout"]["per layer"]["by_batch"]["2"]["stored"] = False
    wrong["error_beside_torch"]["2"] = float("nan")
    assert [each.split(",")[0] for each in attention.wrong_answers(wrong)] == [
        "per block",
        "per layer",
        "dense",
    ]


@needs.torch
@needs.triton
def test_kernels_compile_with_16_byte_async_reads(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, PROGRAMS / "compile_kernels.py"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=CHILD_S,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert set(found) == {"attend_splits", "merge_splits", "store_tokens"}
    attention = found["attend_splits"]
    # K and V come past the registers, ahead of their use, and are multiplied by tensor cores.
    assert attention["cp.async.cg.shared.global"] >= 16
    assert any(name.startswith("mma.sync") and ".bf16." in name for name in attention)


@needs.torch
@needs.triton
def test_read_ahead_faults_without_guard_pages() -> None:
    from benchmarks.gpu.kernels import stale_columns

    ahead, guarded = (
        stale_columns.start_case(case, interpret=True, under="")
        for case in (stale_columns.READ_AHEAD, stale_columns.GUARDED)
    )
    assert ahead["as_it_should"], ahead
    assert ahead["status"] == -signal.SIGSEGV
    assert "read-ahead: masked: the answer is that of a dense cache" in ahead["output"]
    assert guarded["as_it_should"], guarded
    assert "guarded: read-ahead: the answer is that of a dense cache" in guarded["output"]
    assert "KVELASTIC_GUARD_PAGES is on" in guarded["output"]


def test_unexpected_exit_of_a_case_is_detected() -> None:
    from benchmarks.gpu.kernels.stale_columns import GUARDED, MASKED, READ_AHEAD, ended_as_it_should

    fault = "CUDA error: an illegal memory access was encountered"
    assert ended_as_it_should(READ_AHEAD, 86, fault)
    assert ended_as_it_should(READ_AHEAD, 86, "Invalid __global__ read of size 16 bytes")
    assert not ended_as_it_should(READ_AHEAD, 0, fault)
    assert not ended_as_it_should(READ_AHEAD, 1, "ImportError")
    assert not ended_as_it_should(READ_AHEAD, -signal.SIGKILL, "")
    for case in (MASKED, GUARDED):
        assert ended_as_it_should(case, 0, "")
        assert not ended_as_it_should(case, 86, fault)


@needs.torch
@pytest.mark.parametrize(
    "command", ["attention", "stale_columns", "decode --graphs", "decode --control no-fences"]
)
def test_step_without_a_gpu_exits_77(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    name = command.split(maxsplit=1)[0]
    monkeypatch.setattr(sys, "argv", command.split())
    assert importlib.import_module(f"benchmarks.gpu.kernels.{name}").main() == 77
    assert capsys.readouterr().out.startswith("needs a GPU: ")


def decode_with_late_kernels(
    machine: SimulatedMachine, *arguments: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, PROGRAMS / "late_decode.py", "100", *arguments],
        env={**os.environ, **machine.readable_environment(), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=CHILD_S,
    )


@needs.torch
def test_fences_protect_pages_of_late_kernels(tmp_path: Path) -> None:
    from benchmarks.gpu.kernels import decode

    with SimulatedMachine(tmp_path) as machine:
        done = decode_with_late_kernels(machine)
        assert done.returncode == 0, done.stderr
        assert machine.used_bytes() == 0
    fenced = json.loads(done.stdout)
    assert fenced["tokens"] >= 100
    assert decode.problems(fenced) == []


@needs.torch
def test_without_fences_late_kernels_read_wrong_memory(tmp_path: Path) -> None:
    """They read scratch, or, between the page and the scratch, nothing at all."""
    with SimulatedMachine(tmp_path) as machine:
        done = decode_with_late_kernels(machine, "no-fences")
    if done.returncode == -signal.SIGSEGV:
        segment.reap()
        ledger.reap()
        return
    assert done.returncode == 0, done.stderr
    unfenced = json.loads(done.stdout)
    assert unfenced["pages_unmapped"] > 0
    assert unfenced["differing_tokens"] > 0
    assert unfenced["differing_states"] > 0


@needs.torch
def test_stale_block_table_changes_the_tokens(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    import torch

    from benchmarks.gpu.kernels import decode

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    kept = tmp_path / "told.json"
    arguments = ["--tokens", "60", "--control", "stale-table", "--json", str(kept)]
    monkeypatch.setattr(sys, "argv", ["decode", *arguments])
    assert decode.main() == 0
    assert "control stale-table: seen" in capsys.readouterr().out
    told = json.loads(kept.read_text())
    assert told["differing_tokens"] > 0
    assert told["differing_states"] > 0


@needs.torch
def test_run_without_events_is_a_problem() -> None:
    from benchmarks.gpu.kernels import decode

    told = {
        "tokens": 100, "differing_tokens": 0, "differing_states": 0, "distinct_tokens": 60,
        "limits_applied": 5, "pages_unmapped": 3, "pages_poisoned": 4,
    }  # fmt: skip
    assert decode.problems(told) == []
    for name in ("limits_applied", "pages_unmapped", "pages_poisoned"):
        assert len(decode.problems({**told, name: 0})) == 1
    assert len(decode.problems({**told, "distinct_tokens": 3})) == 1
    assert len(decode.problems({**told, "differing_states": 1})) == 1


class Blocks:
    """A pool with so many blocks, which may be lowered."""

    def __init__(self, count: int) -> None:
        self.free = set(range(1, count + 1))

    def alloc(self, count: int) -> list[int] | None:
        return [self.free.pop() for _ in range(count)] if count <= len(self.free) else None

    def release(self, ids: list[int]) -> None:
        assert not self.free.intersection(ids)
        self.free.update(ids)


def test_every_sequence_finishes_with_little_memory() -> None:
    sequences = schedule.draw(400, (3, 30), (5, 40))
    longest = max(-(-each.tokens // 4) for each in sequences)
    blocks = Blocks(longest + 2)
    under_test = Schedule(sequences, 6, 4, blocks.alloc, blocks.release)
    computed: dict[int, int] = {}
    steps = 0
    while not under_test.is_done:
        running = under_test.plan(over_limit=steps % 7 == 0)
        assert running, "nobody computes although there is memory for the first"
        assert len({each.slot for each in running}) == len(running)
        ids = [block for each in running for block in each.ids]
        assert len(set(ids)) == len(ids)
        for each in running:
            assert each.position < 4 * len(each.ids)
            computed[each.index] = each.position
        under_test.advance()
        steps += 1
        assert steps < 20_000
    assert under_test.preemptions > 0
    assert computed == {each.index: each.tokens - 2 for each in sequences}
    assert len(blocks.free) == longest + 2


def test_first_sequence_is_not_preempted() -> None:
    blocks = Blocks(3)
    sequences = [Sequence(index, 1, 9) for index in range(2)]
    under_test = Schedule(sequences, 2, 4, blocks.alloc, blocks.release)
    for _ in range(8):
        assert under_test.plan(over_limit=False)[0] is sequences[0]
        under_test.advance()
    assert under_test.preemptions > 0
    assert sequences[0].is_done
