"""The doctor's judgement: every check in each of its states."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
from doctor_cases import (
    BROKEN_GPU,
    GOOD,
    GPU,
    MIB,
    TABLE,
    kernel,
    limits,
    memory,
    on_host,
    segment,
    shm,
    with_config,
    with_gpus,
    with_packages,
)

from kvelastic.doctor.facts import Facts
from kvelastic.doctor.finding import Finding
from kvelastic.doctor.judge import judge
from kvelastic.engines import ENGINES

ROOT = Path(__file__).parents[2]


def of_check(facts: Facts, check: str) -> list[Finding]:
    return [finding for finding in judge(facts) if finding.check == check]


@pytest.mark.parametrize(
    ("check", "state", "facts", "seen"),
    TABLE,
    ids=[f"{check}-{state}-{number}" for number, (check, state, *_) in enumerate(TABLE)],
)
def test_check_returns_the_expected_state(check: str, state: str, facts: Facts, seen: str) -> None:
    fitting = [finding for finding in of_check(facts, check) if seen in finding.what]
    assert [finding.state for finding in fitting] == [state], of_check(facts, check)
    for finding in judge(facts):
        assert bool(finding.do) == (finding.state != "ok"), finding
        assert finding.what
        assert "\n" not in finding.what + finding.do


def test_healthy_machine_has_only_ok_findings() -> None:
    assert {finding.state for finding in judge(GOOD)} == {"ok"}


def test_one_fault_affects_one_check() -> None:
    good = {finding.check for finding in judge(GOOD)}
    for facts in (shm(size_bytes=MIB), segment("dead"), with_packages(python=(3, 9, 0))):
        faulty = [finding for finding in judge(facts) if finding.state != "ok"]
        assert len(faulty) == 1
        assert good == {finding.check for finding in judge(facts)}


def test_every_check_state_is_tested_and_documented() -> None:
    tested = defaultdict(set)
    for check, state, _, _ in TABLE:
        tested[check].add(state)
    sources = "".join(path.read_text() for path in (ROOT / "kvelastic/doctor").glob("judge_*.py"))
    topics = "gpu|host|limits|shm|segments|ledgers|instances|permissions|config|engines|python"
    named = set(re.findall(rf'"((?:{topics})\.[a-z]+)"', sources))
    assert set(tested) == named | {f"engines.{engine.name}" for engine in ENGINES}
    documented = {}
    for line in (ROOT / "docs/doctor.md").read_text().splitlines():
        found = re.match(r"\| `([a-z]+\.[a-z]+)` \| ([a-z, ]+) \|", line)
        if found:
            documented[found[1]] = set(found[2].split(", "))
    assert documented == dict(tested)


def test_advice_names_the_cause() -> None:
    for error in ("the CUDA driver is too old: it has no cuInit", "the driver is older than 11.3"):
        (gpu,) = of_check(with_gpus(gpus=(replace(GPU, error=error),)), "gpu.vmm")
        assert gpu.do == "see gpu.driver"
    (memory_limit,) = of_check(on_host(limits=limits(max_map_count=1)), "limits.mappings")
    assert "vm.max_map_count=40960" in memory_limit.do
    (small,) = of_check(shm(size_bytes=64 * MIB, free_bytes=64 * MIB), "shm.size")
    assert "--shm-size" in small.do
    assert "--ipc=host" in small.do


def test_faulty_check_has_no_ok_finding() -> None:
    for status in ("dead", "unreadable"):
        assert len(of_check(segment(status, problem="x"), f"segments.{status}")) == 1
    assert of_check(GOOD, "gpu.driver")[0].what.endswith(", 1 GPU")


def test_each_gpu_and_variable_has_a_finding() -> None:
    two = with_gpus(count=2, gpus=(GPU, BROKEN_GPU))
    assert [finding.state for finding in of_check(two, "gpu.vmm")] == ["ok", "problem"]
    config = with_config(errors=(("A", "A='' is bad"), ("B", "B='' is bad")))
    assert len(of_check(config, "config.value")) == 2


def test_host_memory_faults_are_notes_on_gpu_machines() -> None:
    slow = memory(page_is_huge=False, thp_shmem="deny", thp_enabled=None, page_error="none")
    old = replace(GOOD, memory=slow, system=kernel("4.4.0"))
    assert {finding.state for finding in judge(old)} == {"ok", "note"}
    assert "problem" in {finding.state for finding in judge(with_config(old, device="host"))}
