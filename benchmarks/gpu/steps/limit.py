"""A limit set from outside: until the instance acknowledges it, and until it holds.

As `kvctl limit` sets it. The memory is seen to be free at the device, not at the instance alone.
"""

from __future__ import annotations

import importlib.util
import statistics
import subprocess
import sys
import time

from benchmarks.gpu.driver_calls import DriverCalls
from benchmarks.gpu.findings import Findings
from benchmarks.gpu.instances import Group
from benchmarks.ledger.instance import BLOCKS_PER_PAGE, Instance
from benchmarks.vmm.section import Section, median_p99, p99
from kvelastic.shared import segment

PAGE_MIB, PAGES = 16, 64
PAGE_BYTES = PAGE_MIB << 20
KEPT_PAGES = 16
BAR_MS = 5.0
FREED_WITHIN = 0.9
"""Others use the device too: so much of what was given back must be seen."""


def main() -> None:
    with Findings.of_command(__doc__) as found, Group() as group:
        rounds = 2 if found.quick else 50
        cuda = DriverCalls()
        with group.instance(PAGES, PAGE_MIB) as one:
            name = one.read()["name"]
            seen_ms: list[float] = []
            holds_ms: list[float] = []
            freed: list[int] = []
            for _ in range(rounds):
                _fill(one)
                with segment.open_writable(name) as instance, instance.writing() as control_block:
                    before = cuda.free_bytes()
                    begun = time.perf_counter()
                    revision = control_block.write_request(limit_bytes=KEPT_PAGES * PAGE_BYTES)
                    assert control_block.wait_ack(revision, 10.0)
                    seen_ms.append((time.perf_counter() - begun) * 1000)
                    assert control_block.wait_ack(revision, 10.0, settled=True)
                    holds_ms.append((time.perf_counter() - begun) * 1000)
                    freed.append(cuda.free_bytes() - before)
                    lifted = control_block.write_request(limit_bytes=PAGES * PAGE_BYTES)
                    assert control_block.wait_ack(lifted, 10.0, settled=True)
            given_back = (PAGES - 1 - KEPT_PAGES) * PAGE_BYTES
            found.table(
                Section(
                    f"A limit lowered by {given_back >> 20} MiB of cached blocks, ms, median (p99)",
                    ("", "ms", "bar"),
                    [
                        ("acknowledged", median_p99(seen_ms), f"<= {BAR_MS:g}"),
                        ("holds", median_p99(holds_ms), ""),
                    ],
                )
            )
            found.figure("acknowledged_ms", statistics.median(seen_ms))
            found.figure("acknowledged_p99_ms", p99(seen_ms))
            found.figure("holds_ms", statistics.median(holds_ms))
            found.check(
                "the device has it back when the limit holds",
                min(freed) >= FREED_WITHIN * given_back,
                f"{min(freed) >> 20} MiB at least of {given_back >> 20}",
            )
            if not found.quick and not cuda.has("kvsim_count"):
                worst = p99(seen_ms)
                found.check("acknowledged within 5 ms (p99)", worst <= BAR_MS, f"{worst:.2f} ms")
            _kvctl(found, one, name)


def _fill(one: Instance) -> None:
    one.ask("take_changes")
    one.ask("clear")
    one.ask("take_changes")
    ids = one.ask("alloc", (PAGES - 1) * BLOCKS_PER_PAGE)["result"]
    assert ids is not None
    one.ask("cache", ids)


def _kvctl(found: Findings, one: Instance, name: str) -> None:
    """The command itself, where what it needs is installed."""
    lacking = [each for each in ("click", "rich") if importlib.util.find_spec(each) is None]
    if lacking:
        found.line(f"kvctl itself was not tried: there is no {' and no '.join(lacking)}.")
        return
    _fill(one)
    limit = KEPT_PAGES * PAGE_BYTES
    command = [sys.executable, "-m", "kvelastic.cli", "limit", name, str(limit), "--wait", "10"]
    begun = time.perf_counter()
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=30)
    took_ms = (time.perf_counter() - begun) * 1000
    held = one.ask("stats")["result"]["pages_mapped"] * PAGE_BYTES
    said = " ".join((done.stdout + done.stderr).split())
    found.check("kvctl limit --wait", done.returncode == 0 and held <= limit, said)
    found.line(f"kvctl limit --wait took {took_ms:.0f} ms, its own start included.")


if __name__ == "__main__":
    main()
