"""One battery over every driver: the host, the simulated CUDA, and CUDA where there is a GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import battery
import needs
import pytest
from battery import EVERY_CUDA, EVERY_DRIVER
from processes import run_python

HERE = Path(__file__).parent
BATTERY = HERE.parent / "programs" / "battery.py"
SIM_BUILD = HERE.parent / "sim" / "build"

SIMULATED = {
    "recycled_page_costs_three_calls": {},
    "batches_of_handles_grow": {},
    "failures_leave_nothing_behind": {},
    "guard_failures_leave_nothing_behind": {},
    "every_failure_of_a_worker_start_is_clean": {},
    "guarded_kernel_overread_hits_scratch": {},
    "guarded_cycle_costs_six_calls": {},
    "not_ready_is_retried": {},
    "copies_are_queued_beside_each_other": {},
    "out_of_memory_returns_none": {"KVSIM_MEMORY": "10M"},
    "pages_are_unmapped_after_use": {},
    "mapping_cap_raises_out_of_memory": {"KVSIM_MAX_MAPPINGS": "5"},
    "full_device_copies_and_unmaps": {"KVSIM_MEMORY": "32M", "KVSIM_CONTEXT_GROWTH": "2M"},
}


def simulated(tmp_path: Path, **more: str) -> dict[str, str]:
    built = subprocess.run([SIM_BUILD], check=True, capture_output=True, text=True).stdout.strip()
    return {
        "LD_LIBRARY_PATH": built,
        "KVSIM_MACHINE": str(tmp_path / "machine"),
        "KVSIM_STRICT_CONTEXT": "1",
        "KVSIM_UNREADABLE": "1",
        "KVSIM_LAG": "3",
        **more,
    }


def run(driver: str, case: str, environment: dict[str, str]) -> None:
    assert run_python(BATTERY, driver, case, environment=environment).stdout == "passed\n"


def test_every_case_is_run() -> None:
    cases = {name[5:] for name in vars(battery) if name.startswith("case_")}
    assert cases == {*EVERY_CUDA, *SIMULATED}


@pytest.mark.slow
@pytest.mark.parametrize("case", EVERY_DRIVER)
def test_host(case: str) -> None:
    run("host", case, {})


@pytest.mark.slow
@pytest.mark.parametrize("case", [*EVERY_CUDA, *SIMULATED])
def test_simulated_cuda(case: str, tmp_path: Path) -> None:
    held = str(tmp_path / "held")
    run("cuda", case, simulated(tmp_path, KVSIM_HOLD=held, **SIMULATED.get(case, {})))


@pytest.mark.slow
@pytest.mark.parametrize("poison", ["0", "1"])
@pytest.mark.parametrize("case", EVERY_CUDA)
def test_cuda_device_shared_with_another_process(case: str, poison: str, tmp_path: Path) -> None:
    """The same library without the simulator's own functions, on a device that others use too."""
    environment = simulated(tmp_path, KVSIM_POISON=poison, KVSIM_CONTEXT_BYTES="64M")
    environment["LD_LIBRARY_PATH"] += "/foreign"
    other = "from kvelastic import _vmm; d = _vmm.CudaDriver('cuda')\n"
    other += "print('there', flush=True)\n"
    other += "while True: d.destroy(d.create(d.granularity_bytes), d.granularity_bytes)\n"
    with subprocess.Popen(
        [sys.executable, "-c", other], env=os.environ | environment, stdout=subprocess.PIPE
    ) as neighbour:
        try:
            assert neighbour.stdout is not None
            assert neighbour.stdout.readline() == b"there\n"
            run("cuda", case, environment)
        finally:
            neighbour.kill()


@needs.gpu
@pytest.mark.parametrize("case", EVERY_CUDA)
def test_real_cuda(case: str) -> None:
    run("cuda", case, {})


@pytest.mark.parametrize(
    ("device", "environment", "match"),
    [
        ("cuda", {"KVSIM_NO_DEVICE": "1"}, "NO_DEVICE|there is none"),
        ("cuda", {"KVSIM_NO_VMM": "1"}, "no virtual memory management"),
        ("cuda:7", {}, "there is no device cuda:7 .* there are: cuda:0 .GPU-"),
        ("GPU-00000000-0000-0000-0000-000000000000", {}, "there is no device GPU-0000"),
        ("MIG-00000000-0000-0000-0000-000000000000", {}, "there is no device MIG-0000"),
        ("cuda:x", {}, "is not accepted; .* GPU-<uuid> or MIG-<uuid>"),
    ],
)
def test_unavailable_device_error_names_the_cause(
    device: str, environment: dict[str, str], match: str, tmp_path: Path
) -> None:
    program = f"from kvelastic import _vmm; _vmm.CudaDriver({device!r})"
    environment = simulated(tmp_path, **environment)
    done = run_python("-c", program, environment=environment, exit_code=1)
    assert re.search(match, done.stderr), done.stderr


MIG_PROGRAM = """
from kvelastic import _vmm, config
from kvelastic.device import selection
drivers = [_vmm.CudaDriver(f"cuda:{i}") for i in range(4)]
names = [driver.uuid for driver in drivers]
assert len(set(names)) == 4, names
assert all(name.startswith(PREFIX) for name in names), names
assert [_vmm.CudaDriver(name).ordinal for name in names] == [0, 1, 2, 3]
settings = config.load()
assert [selection.resolve(name, settings).name for name in names] == names
assert selection.means_host(names[3]) is False
drivers[1].create(drivers[1].granularity_bytes)
free = [driver.free_bytes for driver in drivers]
assert free[1] < free[0] == free[2] == free[3]
print("passed")
"""


@pytest.mark.parametrize(
    ("environment", "prefix"),
    [
        ({"KVSIM_MIG": "2"}, "MIG-"),
        ({}, "GPU-"),
        # From before CUDA could tell instances apart.
        ({"KVSIM_DRIVER_VERSION": "11030"}, "GPU-"),
    ],
)
def test_mig_instances_are_separate_devices(
    environment: dict[str, str], prefix: str, tmp_path: Path
) -> None:
    done = run_python(
        *("-c", MIG_PROGRAM.replace("PREFIX", repr(prefix))),
        environment=simulated(tmp_path, KVSIM_DEVICES="4", **environment),
    )
    assert done.stdout == "passed\n"


@needs.no_gpu
def test_missing_driver_falls_back_to_host_memory() -> None:
    program = (
        "import logging; logging.basicConfig(level=logging.INFO)\n"
        "from kvelastic import config\nfrom kvelastic.device import selection\n"
        "print(selection.resolve('auto', config.load()).name)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "host\n"
    assert done.stderr.count("Using the host's memory") == 1
