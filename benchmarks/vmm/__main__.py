"""`scripts/bench vmm`: what drivers charge, and what kvelastic's sequences of calls make of it.

    scripts/bench vmm                      host, simulated CUDA, and the GPU where there is one
    scripts/bench vmm --driver cuda        one of them
    scripts/bench vmm --quick              a smoke run of seconds; its figures are no evidence

Each part runs in a process of its own; one that fails says so, and the others go on.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness import end_by_exception
from benchmarks.vmm import driver_kinds, part_process, plot, prices, results
from benchmarks.vmm.driver_kinds import CUDA, HOST, SIMULATED, DriverKind
from benchmarks.vmm.section import Section

EVERY_DRIVER = (HOST, SIMULATED, CUDA)
TIMED_PROFILE = "a100"


@dataclass(frozen=True)
class Part:
    """A module with `measure`, `sections`, `FULL` and `QUICK`, and where it can run."""

    module: str
    kinds: tuple[str, ...]
    elsewhere: str = ""
    """Why it cannot be run on the other kinds."""
    timed: bool = True
    """Whether the simulator is to wait as a GPU would."""
    profiles: tuple[str, ...] = field(default=(TIMED_PROFILE,))

    def runs(self, kind: DriverKind) -> list[tuple[str, dict[str, str], dict[str, str]]]:
        """For each run a name, its environment, and what `sections` wants beside the data."""
        if kind.name != SIMULATED or not self.timed:
            return [(self.module, {}, {})]
        if len(self.profiles) == 1:
            return [(self.module, {"KVSIM_PROFILE": self.profiles[0]}, {})]
        return [
            (f"{self.module} {profile}", {"KVSIM_PROFILE": profile}, {"profile": profile})
            for profile in self.profiles
        ]


NEEDS_GPU = "needs a GPU that runs kernels"
PARTS = (
    Part("call_costs", EVERY_DRIVER),
    Part("page_cycle", EVERY_DRIVER),
    Part("counted_calls", (SIMULATED,), "only the simulator has a trace of calls", timed=False),
    Part("two_processes", EVERY_DRIVER),
    Part(
        "grow_shrink", (SIMULATED, CUDA), "kvcached has no host memory to compare with",
        profiles=tuple(prices.PROFILES),
    ),
    Part(
        "handover", (SIMULATED, CUDA), "the host's memory is measured by scripts/bench ledger",
        profiles=tuple(prices.PROFILES),
    ),
    Part("waiting_unmap", (SIMULATED,), "only the simulator holds a kernel as long as is wanted"),
    Part("beside_kernel", (CUDA,), NEEDS_GPU),
    Part("decode_attention", (CUDA,), NEEDS_GPU),
)  # fmt: skip


def bench(kind: DriverKind, folder: Path | None, *, quick: bool) -> bool:
    """Measures, prints and keeps everything of one driver; False if a part failed."""
    told = results.facts(kind)
    parts: dict[str, Any] = {}
    sections: list[Section] = []
    skipped: dict[str, str] = {}
    failed = False
    for part in PARTS:
        module = importlib.import_module(f"benchmarks.vmm.{part.module}")
        if kind.name not in part.kinds:
            skipped[part.module] = part.elsewhere
            continue
        for name, environment, more in part.runs(kind):
            options = module.QUICK if quick else module.FULL
            try:
                data = part_process.run(part.module, kind, environment, **options)
            except part_process.PartFailedError as error:
                failed = True
                skipped[name] = f"FAILED: {error}"
                print(f"{name} FAILED: {error}\n", flush=True)
                continue
            if "skipped" in data:
                skipped[name] = data["skipped"]
                continue
            parts[name] = data
            for section in module.sections(data, kind, **more):
                sections.append(section)
                print(section.text() + "\n", flush=True)
    for name, why in skipped.items():
        print(f"skipped on {kind.name}: {name}: {why}")
    picture = results.write(kind, told, parts, sections, skipped, is_whole=not quick, folder=folder)
    plot.draw(picture, kind, told, parts)
    print(f"plot: {picture}\n")
    return not failed


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench vmm", description=__doc__.split("\n")[0])
    parser.add_argument("--driver", choices=EVERY_DRIVER, help="only this one (default: all)")
    parser.add_argument("--quick", action="store_true", help="few rounds; kept in build/bench/")
    parser.add_argument("--results", type=Path, help="the folder for page, samples and plot")
    given = parser.parse_args()
    fine = True
    for kind in driver_kinds.all_kinds():
        if given.driver not in (None, kind.name):
            continue
        if kind.missing:
            alone = [part.module for part in PARTS if part.kinds == (kind.name,)]
            print(f"-- {kind.name}: skipped: {kind.missing}")
            if alone:
                print(f"   so not measured at all: {', '.join(alone)}")
            fine = fine and given.driver is None
            continue
        print(f"-- {kind.label}\n")
        fine = bench(kind, given.results, quick=given.quick) and fine
    return 0 if fine else 1


if __name__ == "__main__":
    end_by_exception()
    sys.exit(main())
