"""The manager of blocks of transformers 5.17 over a native pool, with nothing of an engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import needs
import pytest
from transformers_process import environment_of

pytestmark = [pytest.mark.slow, needs.transformers]
PROGRAM = Path(__file__).parents[1] / "programs" / "block_manager_steps.py"


def test_random_requests_and_limits_keep_contents_consistent() -> None:
    run_steps(seed=1, steps=300)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(2, 12))
def test_random_requests_for_longer(seed: int) -> None:
    run_steps(seed=seed, steps=2000)


def run_steps(*, seed: int, steps: int) -> None:
    done = subprocess.run(
        [sys.executable, PROGRAM, str(seed), str(steps)],
        env=environment_of("5.17", KVELASTIC_LEDGER=f"test-{os.getpid()}-blocks"),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    happened = json.loads(done.stdout)
    for what in ("found", "forked", "grew", "evicted", "did not fit"):
        assert happened[what] > 0, happened
