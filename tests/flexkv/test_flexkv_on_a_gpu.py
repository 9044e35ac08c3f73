"""GPU-CPU, CPU-SSD and CPU-remote workers on the simulated GPU: device and host differ there."""

from __future__ import annotations

import os
from pathlib import Path

import flexkv_on_a_gpu
import pytest
from processes import run_python
from simulated_machine import SimulatedMachine

pytestmark = pytest.mark.slow


def test_gpu_blocks_round_trip_through_every_tier(tmp_path: Path) -> None:
    with SimulatedMachine(tmp_path, memory_bytes=64 << 20) as machine:
        environment = machine.environment | {"KVELASTIC_LEDGER": f"gpu-{os.getpid()}"}
        ran = run_python(flexkv_on_a_gpu.__file__, tmp_path, environment=environment)
        assert ran.stdout.strip() == "moved"
