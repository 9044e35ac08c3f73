"""How large pages are where nobody has said: the rule, and what is measured for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.vmm.prices import PROFILES
from kvelastic import _vmm, config, page_size
from kvelastic.device import Device

MIB = 1 << 20
GIB = 1 << 30
SIM_BUILD = Path(__file__).parents[1] / "sim" / "build"


def gpu(handle_us: float, capacity_bytes: int = 72 * GIB) -> Device:
    return Device("GPU-x", capacity_bytes, _vmm.HostDriver, page_price_us=handle_us)


@pytest.mark.parametrize(
    ("handle_us", "mib"),
    [(0, 2), (5, 2), (6, 4), (46, 16), (47, 32), (135, 64), (280, 128), (5000, 128)],
)
def test_a_dear_driver_gets_large_pages(handle_us: float, mib: int) -> None:
    assert page_size.for_price(handle_us, 72 * GIB) == mib * MIB


@pytest.mark.parametrize(
    ("capacity_bytes", "mib"), [(72 * GIB, 128), (4 * GIB, 64), (200 * MIB, 2), (MIB, 2)]
)
def test_a_small_device_has_pages_enough(capacity_bytes: int, mib: int) -> None:
    assert page_size.for_price(5000, capacity_bytes) == mib * MIB


@pytest.mark.parametrize("profile", PROFILES)
def test_growing_and_shrinking_is_not_slower_than_kvcached(profile: str) -> None:
    """8 GiB at published prices, memory kept, against its contiguous pages of 128 MiB."""
    prices = PROFILES[profile]
    size_bytes = page_size.for_price(prices.own_us(2 * MIB, given_back=True), 72 * GIB)
    own_us = 8 * GIB / size_bytes * prices.own_us(size_bytes, given_back=False)
    assert own_us <= 8 * GIB / (128 * MIB) * prices.kvcached_us(128 * MIB)


def test_what_is_set_counts_and_the_host_has_its_own() -> None:
    host = Device("host", GIB, _vmm.HostDriver)
    assert page_size.of(config.load({"KVELASTIC_PAGE_SIZE_MB": "4"}), [gpu(280)]) == 4 * MIB
    assert page_size.of(config.load({}), [host]) == 2 * MIB
    assert page_size.of(config.load({}), [gpu(5), gpu(280)]) == 128 * MIB
    assert page_size.of(config.load({}), [gpu(280), gpu(280, 2 * GIB)]) == 32 * MIB
    per_buffer = config.load({"KVELASTIC_CONTIGUOUS_LAYOUT": "false"})
    assert page_size.of(per_buffer, [gpu(280)]) == 2 * MIB, "a page is dozens of these"


def on_simulator(program: str, tmp_path: Path, **environment: str) -> str:
    built = subprocess.run([SIM_BUILD], check=True, capture_output=True, text=True).stdout.strip()
    simulated = {"LD_LIBRARY_PATH": built, "KVSIM_MACHINE": str(tmp_path / "machine")}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | simulated | environment,
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout


MEASURE = """
from kvelastic import _vmm, page_size
driver = _vmm.CudaDriver("cuda")
print(page_size.measured_price_us(driver), driver.total_bytes - driver.free_bytes)
"""


@pytest.mark.parametrize("profile", PROFILES)
def test_a_drivers_price_is_measured_and_leaves_nothing(profile: str, tmp_path: Path) -> None:
    price_us, left_bytes = on_simulator(MEASURE, tmp_path, KVSIM_PROFILE=profile).split()
    assert float(price_us) >= PROFILES[profile].own_us(2 * MIB, given_back=True)
    assert left_bytes == "0"


@pytest.mark.parametrize("call", ["AddressReserve", "Create", "Map", "SetAccess"])
def test_where_it_cannot_be_measured_a_known_price_counts(call: str, tmp_path: Path) -> None:
    plan = f"cuMem{call}:1-:CUDA_ERROR_OUT_OF_MEMORY"
    told = on_simulator(MEASURE, tmp_path, KVSIM_FAIL=plan)
    assert told.split() == [str(page_size.UNKNOWN_US), "0"]


def test_an_embedded_cache_on_a_gpu_follows_the_prices(tmp_path: Path) -> None:
    program = """
from kvelastic import embedded
embedded.init("vLLM", tp_rank=0, world_size=1, pp_rank=0, device="cuda")
print(embedded.required().page_size_bytes >> 20)
embedded.shutdown_kvelastic()
"""
    more = {"KVSIM_MEMORY": "12G", "KVELASTIC_LEDGER": f"page-{os.getpid()}"}
    assert on_simulator(program, tmp_path, KVSIM_PROFILE="a100", **more) == "128\n"
    assert on_simulator(program, tmp_path, KVELASTIC_PAGE_SIZE_MB="6", **more) == "6\n"
