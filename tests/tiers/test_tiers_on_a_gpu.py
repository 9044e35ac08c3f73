"""The same engine on the simulated GPU: device and host differ, so a host tier keeps blocks."""

from __future__ import annotations

import json
import os
from pathlib import Path

import embedded_engine
import pytest
from processes import run_python
from simulated_machine import SimulatedMachine

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("tiers", ["host", "host and disk"])
def test_host_tier_on_a_gpu_returns_correct_bytes(tmp_path: Path, tiers: str) -> None:
    disk = tmp_path / "disk"
    disk.mkdir(mode=0o700)
    more = ["--disk", str(disk)] if tiers == "host and disk" else []
    with SimulatedMachine(tmp_path, memory_bytes=256 << 20) as machine:
        ran = run_python(
            *(embedded_engine.__file__, f"on_a_gpu_{os.getpid()}", "--gpu", "--seed", "5"),
            *("--steps", "400", "--host-bytes", str(16 << 20), *more),
            environment=machine.environment | {"KVELASTIC_LEDGER": f"gpu-{os.getpid()}"},
        )
        said = json.loads(ran.stdout.splitlines()[-1])
        counts = said["counts"]
        assert counts["loaded"] > 0, counts
        assert counts["demoted"] > 0, counts
        assert said["tiers"]["host"]["used_bytes"] <= 16 << 20
        assert machine.used_bytes() == 0, "pages are left on the GPU"
