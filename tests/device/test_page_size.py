"""How large pages are where nobody has said: the rule, and what is measured for it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from processes import LineProgram

from benchmarks.vmm.prices import PROFILES
from kvelastic import _vmm, config
from kvelastic.device import page_size
from kvelastic.device.selection import Device
from kvelastic.shared import device_set, ledger

MIB = 1 << 20
GIB = 1 << 30
SIM_BUILD = Path(__file__).parents[1] / "sim" / "build"


def gpu(handle_us: float, capacity_bytes: int = 72 * GIB, name: str = "GPU-x") -> Device:
    return Device(name, capacity_bytes, _vmm.HostDriver, page_price_us=handle_us)


H100_US = (15 + 2.3 + 32 + 21 + 11, 15 + 2.3 + 32 + 21 + 21)
"""A handle of 2 MiB, and of 32: medians on 2026-11-26."""
RTX_PRO_6000_US = (71.0, 72.0)


@pytest.mark.parametrize(
    ("handle_us", "mib"),
    [(0, 2), (0.9, 2), (1, 8), (3.9, 8), (4, 32), (15.6, 32), (15.7, 128), (5000, 128)],
)
def test_page_size_grows_with_driver_cost(handle_us: float, mib: int) -> None:
    assert page_size.for_price(handle_us, 72 * GIB) == mib * MIB


@pytest.mark.parametrize("prices_us", [H100_US, RTX_PRO_6000_US])
def test_twofold_measurement_noise_keeps_the_page_size(prices_us: tuple[float, float]) -> None:
    sizes = {
        page_size.for_price(
            page_size.fixed_us(prices_us[0] * small, prices_us[1] * large), 72 * GIB
        )
        for small in (0.5, 1, 2)
        for large in (0.5, 1, 2)
    }
    assert sizes == {128 * MIB}


def test_growing_8_gib_on_h100_matches_kvcached() -> None:
    size_bytes = page_size.for_price(page_size.fixed_us(*H100_US), 72 * GIB)
    create_us, map_us, set_access_us = 18, 2.3, 40
    assert 8 * GIB / size_bytes * (create_us + map_us + set_access_us) <= 7900


def test_per_byte_cost_is_excluded_from_handle_cost() -> None:
    assert page_size.fixed_us(10 + 12, 10 + 16 * 12) == pytest.approx(10)
    assert page_size.fixed_us(22, 20) == 22, "the larger size was not dearer: no price for bytes"
    assert page_size.fixed_us(12, 16 * 12 + 90) == 0, "noise"


@pytest.mark.parametrize(
    ("capacity_bytes", "mib"), [(72 * GIB, 128), (4 * GIB, 64), (200 * MIB, 2), (MIB, 2)]
)
def test_small_device_gets_smaller_pages(capacity_bytes: int, mib: int) -> None:
    assert page_size.for_price(5000, capacity_bytes) == mib * MIB


@pytest.mark.parametrize("profile", PROFILES)
def test_growing_and_shrinking_is_no_slower_than_kvcached(profile: str) -> None:
    """8 GiB at published prices, memory kept, against its contiguous pages of 128 MiB."""
    prices = PROFILES[profile]
    size_bytes = page_size.for_price(prices.own_us(2 * MIB, given_back=True), 72 * GIB)
    own_us = 8 * GIB / size_bytes * prices.own_us(size_bytes, given_back=False)
    assert own_us <= 8 * GIB / (128 * MIB) * prices.kvcached_us(128 * MIB)


@pytest.fixture
def group() -> Iterator[str]:
    name = f"page-{os.getpid()}"
    yield name
    for path in ledger.SHM_DIR.glob(f".kvelastic_ledger_{name}_*"):
        path.unlink()


def chosen(devices: list[Device], group: str, **environment: str) -> int:
    """In MiB."""
    settings = config.load({"KVELASTIC_LEDGER": group} | environment)
    return device_set.page_size_bytes(settings, devices) // MIB


def test_configured_page_size_overrides_and_host_uses_default(group: str) -> None:
    host = Device("host", GIB, _vmm.HostDriver)
    assert chosen([gpu(280)], group, KVELASTIC_PAGE_SIZE_MB="4") == 4
    assert chosen([host], group) == 2
    per_buffer = {"KVELASTIC_CONTIGUOUS_LAYOUT": "false"}
    assert chosen([gpu(280)], group, **per_buffer) == 2, "a page is dozens of these"
    assert list(ledger.SHM_DIR.glob(f".kvelastic_ledger_{group}_*")) == []


def test_slowest_gpu_decides_and_smallest_gpu_bounds(group: str) -> None:
    assert chosen([gpu(5, name="GPU-a"), gpu(280, name="GPU-b")], group) == 128
    assert chosen([gpu(280, name="GPU-b"), gpu(280, 2 * GIB, name="GPU-c")], group) == 32


def test_first_measured_cost_decides_per_device(group: str) -> None:
    assert chosen([gpu(10)], group) == 32
    assert chosen([gpu(280)], group) == 32
    assert chosen([gpu(280, name="GPU-y")], group) == 128


def test_unreadable_ledger_does_not_share_page_size(group: str) -> None:
    ledger.ledger_path(group, "GPU-x").write_bytes(b"a ledger of another version")
    assert [chosen([gpu(price_us)], group) for price_us in (10, 280)] == [32, 128]


DECIDE = """
import sys
from kvelastic import config
from kvelastic.device import selection, page_size
from kvelastic.shared import device_set
page_size.measured_price_us = lambda driver: float(sys.argv[1])
settings = config.load()
found = selection.resolve("cuda", settings)
sys.stdin.readline()
print(device_set.page_size_bytes(settings, [found]) >> 20, flush=True)
sys.stdin.readline()
"""


def test_processes_with_different_costs_share_one_page_size(group: str, tmp_path: Path) -> None:
    """On one simulated GPU, all at once; the decision goes with the last of them."""
    environment = {**simulated(tmp_path), "KVSIM_MEMORY": "12G", "KVELASTIC_LEDGER": group}
    with ExitStack() as stack:
        processes = [
            stack.enter_context(LineProgram("-c", DECIDE, price_us, environment=environment))
            for price_us in ("2", "10", "280")
        ]
        for process in processes:
            process.send("decide")
        sizes = [process.read() for process in processes]
        assert len(set(sizes)) == 1
        assert sizes[0] in {"8", "32", "128"}
        for process in processes:
            process.send("end")
            process.process.wait()
    assert list(ledger.SHM_DIR.glob(f".kvelastic_ledger_{group}_*")) == []


def simulated(folder: Path) -> dict[str, str]:
    built = subprocess.run([SIM_BUILD], check=True, capture_output=True, text=True).stdout.strip()
    return {"LD_LIBRARY_PATH": built, "KVSIM_MACHINE": str(folder / "machine")}


def on_simulator(program: str, tmp_path: Path, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | simulated(tmp_path) | environment,
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout


MEASURE = """
from kvelastic import _vmm
from kvelastic.device import page_size
driver = _vmm.CudaDriver("cuda")
print(page_size.measured_price_us(driver), driver.total_bytes - driver.free_bytes)
"""


@pytest.mark.parametrize("profile", PROFILES)
def test_measuring_driver_cost_leaves_no_memory(profile: str, tmp_path: Path) -> None:
    price_us, left_bytes = on_simulator(MEASURE, tmp_path, KVSIM_PROFILE=profile).split()
    assert page_size.for_price(float(price_us), 72 * GIB) == 128 * MIB
    assert left_bytes == "0"


@pytest.mark.parametrize("call", ["AddressReserve", "Create", "Map", "SetAccess"])
def test_failed_measurement_uses_the_default_cost(call: str, tmp_path: Path) -> None:
    plan = f"cuMem{call}:1-:CUDA_ERROR_OUT_OF_MEMORY"
    told = on_simulator(MEASURE, tmp_path, KVSIM_FAIL=plan)
    assert told.split() == [str(page_size.UNKNOWN_US), "0"]


def test_embedded_gpu_cache_page_size_follows_driver_cost(tmp_path: Path) -> None:
    program = """
from kvelastic.kvcached import embedded
embedded.init("vLLM", tp_rank=0, world_size=1, pp_rank=0, device="cuda")
print(embedded.required().page_size_bytes >> 20)
embedded.shutdown_kvelastic()
"""
    more = {"KVSIM_MEMORY": "12G", "KVELASTIC_LEDGER": f"page-{os.getpid()}"}
    assert on_simulator(program, tmp_path, KVSIM_PROFILE="a100", **more) == "128\n"
    assert on_simulator(program, tmp_path, KVELASTIC_PAGE_SIZE_MB="6", **more) == "6\n"
