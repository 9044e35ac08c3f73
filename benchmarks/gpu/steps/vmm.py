"""A part of `scripts/bench vmm` on this device: its tables, and the quotients that decide."""

from __future__ import annotations

import argparse
import importlib
import statistics
from typing import Any

from benchmarks.gpu.driver_calls import DriverCalls
from benchmarks.gpu.findings import Findings
from benchmarks.harness import shortened
from benchmarks.vmm import driver_kinds, part_process
from benchmarks.vmm.section import median_ratio

CYCLE_BAR = 1.2
PARTS = ("call_costs", "page_cycle", "two_processes", "grow_shrink", "beside_kernel", "handover")


def kind_of_device() -> driver_kinds.DriverKind:
    """The simulated driver where that is the one that this process finds."""
    simulated = DriverCalls().has("kvsim_count")
    return driver_kinds.simulated() if simulated else driver_kinds.cuda()


def measure(found: Findings, part: str, **more: Any) -> dict[str, Any] | None:
    """Runs the part and puts its tables down; None where it cannot run here."""
    kind = kind_of_device()
    module = importlib.import_module(f"benchmarks.vmm.{part}")
    options = (module.QUICK if found.quick else module.FULL) | more
    data = part_process.run(part, kind, {}, **options)
    if "skipped" in data:
        found.skip(data["skipped"])
        return None
    found.figure("samples", shortened(data))
    for section in module.sections(data, kind):
        found.table(section)
    return dict(data)


def main() -> None:
    def part(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("part", choices=PARTS)

    with Findings.of_command(__doc__, part) as found:
        name = found.arguments.part
        data = measure(found, name)
        if data is None:
            return
        if name == "call_costs":
            medians = {
                call: {size: statistics.median(us) for size, us in by_size.items()}
                for call, by_size in data["us"].items()
            }
            found.figure("us", medians)
        if name == "page_cycle":
            _cycle(found, data["us"])


def _cycle(found: Findings, us: dict[str, list[float]]) -> None:
    over_bare = median_ratio(us["recycled"], us["bare"])
    found.figure("recycled_over_bare", over_bare)
    found.figure("cold_over_recycled", median_ratio(us["cold"], us["recycled"]))
    found.figure("guarded_over_recycled", median_ratio(us["guarded"], us["recycled"]))
    if kind_of_device().name == driver_kinds.CUDA:
        said = f"{over_bare:.2f}, of which ctypes is a part"
        found.check(
            f"a cycle is within {CYCLE_BAR} of the bare calls", over_bare <= CYCLE_BAR, said
        )


if __name__ == "__main__":
    main()
