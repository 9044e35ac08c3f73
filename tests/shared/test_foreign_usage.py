"""What other programs hold of a simulated GPU while pages of an instance come and go."""

from __future__ import annotations

import os
from pathlib import Path

from ledger_instance import Instance
from processes import PROGRAMS, run_python
from simulated_machine import SimulatedMachine
from waiting import wait_until

from kvelastic.shared import ledger

FOREIGN_PAGES = 5
PROGRAM = """
from device_ledgers import Machine
from native_pools import HUGE, LAYOUTS
from kvelastic import _vmm
from kvelastic.shared import ledger
from kvelastic.pool.pool import native_geometry

driver = _vmm.CudaDriver("cuda")
driver.use_streams([])
memory = _vmm.Range.reserve(driver, native_geometry(LAYOUTS["paged"], 32))
foreign = driver.create(5 * HUGE)
machine = Machine({"a": 64})
mine, neighbour = machine.join("a").device_set, machine.join("a").device_set

def look(when):
    sight = neighbour.see_devices(lambda: [(driver.total_bytes, driver.free_bytes)])
    (info,) = (info for info in ledger.list_ledgers() if info.group == machine.group)
    print(f"{when}: {sight}, {info.others_bytes // HUGE}")

def changed():
    # The driver has answered, and what counts by then is another sum.
    seen = [(driver.total_bytes, driver.free_bytes)]
    if memory.mapped_pages == 20:
        mine.leaving(20)
        memory.unmap(range(20), destroy=True)
        mine.give_back(20)
    return seen

look("before")
assert mine.grant(20) == 20
look("granted")
memory.map(range(20))
look("mapped")
mine.arrived(20)
look("arrived")
mine.leaving(15)
look("leaving")
memory.unmap(range(5, 20), destroy=True)
look("unmapped")
mine.give_back(15)
look("given back")
assert mine.grant(15) == 15
memory.map(range(5, 20))
mine.arrived(15)
print(neighbour.see_devices(changed))
look("after a change in the middle of a look")
driver.destroy(foreign, 5 * HUGE)
look("without the other program")
machine.close()
"""


def test_pages_in_transit_do_not_affect_foreign_usage(tmp_path: Path) -> None:
    with SimulatedMachine(tmp_path, memory_bytes=256 << 20) as machine:
        done = run_python(
            "-c", PROGRAM, environment={**machine.environment, "PYTHONPATH": str(PROGRAMS)}
        )
    assert done.stdout.splitlines() == [
        f"before: exact, {FOREIGN_PAGES}",
        f"granted: bounded, {FOREIGN_PAGES}",
        f"mapped: bounded, {FOREIGN_PAGES}",
        f"arrived: exact, {FOREIGN_PAGES}",
        f"leaving: bounded, {FOREIGN_PAGES}",
        f"unmapped: bounded, {FOREIGN_PAGES}",
        f"given back: exact, {FOREIGN_PAGES}",
        "exact",
        f"after a change in the middle of a look: exact, {FOREIGN_PAGES}",
        "without the other program: exact, 0",
    ]


def test_used_and_free_memory_come_from_one_call(tmp_path: Path) -> None:
    """What cuDeviceTotalMem says is another sum: once the device is open nothing asks for it."""
    group = f"kvtest-one-call-{os.getpid()}"
    with (
        SimulatedMachine(
            tmp_path,
            memory_bytes=64 << 20,
            KVELASTIC_DEVICE="cuda",
            KVELASTIC_LEDGER=group,
            KVSIM_CONTEXT_BYTES="6M",
            KVSIM_FAIL="cuDeviceTotalMem:2-:CUDA_ERROR_UNKNOWN",
        ) as machine,
        Instance(**machine.environment),
    ):

        def others_bytes() -> int:
            (info,) = (info for info in ledger.list_ledgers() if info.group == group)
            return info.others_bytes

        wait_until(lambda: others_bytes() == 6 << 20, "the context is not counted")
