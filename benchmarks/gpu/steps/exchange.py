"""250 pages go to another process over a socket, contents and all, and stay the same pages."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.gpu.findings import Findings
from benchmarks.gpu.places import ROOT

PROGRAM = ROOT / "tests" / "programs" / "exchange.py"
MARK = "99\n"


def main() -> None:
    with Findings.of_command(__doc__) as found, tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "pages"

        def start(role: str) -> subprocess.Popen[str]:
            return subprocess.Popen(
                [sys.executable, str(PROGRAM), role, str(path)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )  # fmt: skip

        with start("give") as giver:
            assert giver.stdout is not None
            if giver.stdout.readline() != "listening\n":
                found.check("the giver has its pages", False, f"exit code {giver.wait()}")
                return
            begun = time.monotonic()
            with start("take") as taker:
                said, _ = taker.communicate()
            took_s = time.monotonic() - begun
            found.check("the taker sees what is in the pages", said == "the same pages\n", said)
            if taker.returncode != 0:
                giver.kill()
                return
            found.check("it was the taker that came", giver.stdout.readline() == f"{taker.pid}\n")
            seen, _ = giver.communicate("look\n")
            found.check("the giver sees what the taker wrote, which has ended", seen == MARK, seen)
            found.figure("exchange_s", took_s)
            found.line(f"{took_s:.2f} s, with the start of the process that takes.")


if __name__ == "__main__":
    main()
