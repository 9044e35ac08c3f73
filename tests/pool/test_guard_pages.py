"""KVELASTIC_GUARD_PAGES: who reads a block that was not allocated reads scratch, and lives."""

from __future__ import annotations

import os
import signal
import subprocess

import needs
import pytest
from processes import run_python

from kvelastic.shared import ledger, segment

pytestmark = pytest.mark.slow


READ_TOO_FAR = """
import torch
from kvelastic.integration.vllm import interfaces as kvi

kvi.init_kvelastic(device="cpu")
kv = kvi.alloc_kv_cache((2, 8000, 16, 4, 64), 16, torch.bfloat16, "cpu", num_layers=8)
manager = kvi.get_kv_cache_manager(8000, 16, cell_size=4 * 64 * 2, num_layers=8)
ids = manager.alloc(4)
keys = kv[0][0]
keys[ids] = 3
print(float(keys[7000].abs().sum()), flush=True)
keys[7000] = 5  # lands in scratch
print(sorted(keys[ids].unique().tolist()), flush=True)
kvi.shutdown_kvelastic()
print(float(keys[ids[0]][0, 0, 0]) in (0.0, 3.0, 5.0))
"""


def read_too_far(**environment: str) -> subprocess.CompletedProcess[str]:
    own = {
        "KVELASTIC_IPC_NAME": f"kvguard_{os.getpid()}",
        "KVELASTIC_LEDGER": f"kvguard-{os.getpid()}",
        "KVELASTIC_HOST_MEMORY": "1G",
    }
    return run_python("-c", READ_TOO_FAR, environment=own | environment, exit_code=None)


@needs.torch
@pytest.mark.parametrize("layout", ["true", "false"], ids=["paged", "per buffer"])
def test_out_of_range_read_hits_a_guard_page(layout: str) -> None:
    done = read_too_far(KVELASTIC_GUARD_PAGES="true", KVELASTIC_CONTIGUOUS_LAYOUT=layout)
    assert (done.returncode, done.stdout) == (0, "0.0\n[3.0]\nTrue\n"), done.stderr[-2000:]
    assert "KVELASTIC_GUARD_PAGES is on" in done.stderr


@needs.torch
def test_out_of_range_read_without_guards_faults() -> None:
    done = read_too_far()
    segment.reap()
    ledger.reap()
    assert (done.returncode, done.stdout) == (-signal.SIGSEGV, ""), done.stderr[-2000:]
