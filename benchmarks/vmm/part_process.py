"""A part measured in a process of its own, since a CUDA driver reads its environment once.

    run("call_costs", kind, {"KVSIM_PROFILE": "a100"}, rounds=100)      # call_costs.measure(...)

As a program it is the other end: it imports the part and writes what `measure` returns as JSON.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.vmm.driver_kinds import DriverKind

ROOT = Path(__file__).parents[2]
LONGEST_S = 540


class PartFailedError(Exception):
    """The process of a part ended badly; the text has the end of what it said."""


def environment_of(kind: DriverKind, more: dict[str, str]) -> dict[str, str]:
    """This process's environment without what steers a simulator, and the kind's own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KVSIM_")}
    return kept | {"PYTHONDONTWRITEBYTECODE": "1"} | kind.environment | more


def run(part: str, kind: DriverKind, environment: dict[str, str], **options: Any) -> Any:
    """What `benchmarks.vmm.<part>.measure(kind.name, **options)` returns.

    Raises `PartFailedError` if it fails, or takes longer than `LONGEST_S`.
    """
    with TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        command = [sys.executable, "-m", "benchmarks.vmm.part_process"]
        try:
            done = subprocess.run(
                [*command, part, kind.name, json.dumps(options), str(answer)],
                check=False,
                cwd=ROOT,
                env=environment_of(kind, environment),
                stderr=subprocess.PIPE,
                text=True,
                timeout=LONGEST_S,
            )
        except subprocess.TimeoutExpired as error:
            raise PartFailedError(f"not done after {LONGEST_S} s") from error
        if done.returncode != 0:
            raise PartFailedError(f"exit {done.returncode}: {done.stderr[-2000:].strip()}")
        return json.loads(answer.read_text())


if __name__ == "__main__":
    _, part_name, kind_name, text, path = sys.argv
    measure = importlib.import_module(f"benchmarks.vmm.{part_name}").measure
    Path(path).write_text(json.dumps(measure(kind_name, **json.loads(text))))
