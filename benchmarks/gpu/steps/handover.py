"""10 GiB of an idle model's cache go to a busy one: its first page, and all of it."""

from __future__ import annotations

import statistics

from benchmarks.gpu.findings import Findings
from benchmarks.gpu.steps.vmm import measure
from benchmarks.vmm.models import GIB


def main() -> None:
    with Findings.of_command(__doc__) as found:
        data = measure(found, "handover")
        if data is None:
            return
        found.figure("moved_gib", data["pages"] * data["page_bytes"] / GIB)
        found.figure("whole_ms", statistics.median(data["whole_ms"]))
        found.figure("first_ms", statistics.median(data["first_ms"]))
        found.check("all of it arrived, each time", len(data["whole_ms"]) > 0)


if __name__ == "__main__":
    main()
