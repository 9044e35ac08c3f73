"""Caches on the simulated GPU, whose memory the processor cannot read."""

from __future__ import annotations

import os
from pathlib import Path

import datadist_on_a_gpu
import pytest
from processes import run_python
from simulated_machine import SimulatedMachine

CASES = sorted(name[5:] for name in vars(datadist_on_a_gpu) if name.startswith("case_"))


@pytest.mark.parametrize("case", CASES)
def test_datadist_on_a_gpu(case: str, tmp_path: Path) -> None:
    with SimulatedMachine(tmp_path, memory_bytes=256 << 20, devices=2) as machine:
        environment = machine.environment | {
            "KVELASTIC_LEDGER": f"gpu-{os.getpid()}",
            "KVSIM_CONTEXT_BYTES": "16M",
        }
        ran = run_python(datadist_on_a_gpu.__file__, case, environment=environment)
        assert ran.stdout.strip() == "passed"
        assert [machine.used_bytes(at) for at in range(2)] == [0, 0], "memory is left"
