"""The contract of drivers on this device: the cases that the tests run on every driver."""

from __future__ import annotations

import subprocess
import sys

import battery

from benchmarks.gpu.findings import Findings
from benchmarks.gpu.places import ROOT

CASE_S = 60


def main() -> None:
    with Findings.of_command(__doc__) as found:
        for case in battery.EVERY_CUDA:
            command = [
                sys.executable,
                str(ROOT / "tests" / "programs" / "battery.py"),
                "cuda",
                case,
            ]
            try:
                done = subprocess.run(
                    command, check=False, capture_output=True, text=True, timeout=CASE_S
                )
            except subprocess.TimeoutExpired:
                found.check(case.replace("_", " "), False, f"not done after {CASE_S} s")
                continue
            right = (done.returncode, done.stdout) == (0, "passed\n")
            said = "" if right else f"exit code {done.returncode}: {done.stderr[-1500:].strip()}"
            found.check(case.replace("_", " "), right, said)


if __name__ == "__main__":
    main()
