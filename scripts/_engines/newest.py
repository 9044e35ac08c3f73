"""What kvelastic makes of each engine's newest release: scripts/engines."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import re
import subprocess
import sys
import tempfile
import time
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from overlay import ROOT, NotReachedError, Release, install, packages_of, run
from signatures import signature
from touched import touched

TITLES = {"vllm": "vLLM", "sglang": "SGLang", "transformers": "transformers"}
COLUMNS = {
    "probe": "built as expected",
    "tokens": "stock's tokens",
    "limit": "under a limit",
    "sleep": "after a sleep",
}
"""The probe, the steps of `engine_battery`, and their columns."""
BUDGET_S = 20 * 60.0
ENDING_S = 60.0
"""How long an interrupted battery may take to end its engines."""
FOLDER = ROOT / "build" / "engines"
BEGIN, END = "<!-- written by scripts/engines --newest -->", "<!-- end -->"
_PROBE = """
import sys
from kvelastic.doctor.children import ask_engine
from kvelastic.engines import find
import json, dataclasses
print(json.dumps(dataclasses.asdict(ask_engine(find(sys.argv[1]), sys.argv[2]))))
"""


@dataclass
class Row:
    """What came of one engine."""

    engine: str
    release: str = ""
    passed: list[str] = field(default_factory=list)
    reason: str = ""
    """Why something was not reached, or failed."""

    @property
    def is_green(self) -> bool:
        return not self.reason and list(COLUMNS) == self.passed

    def line(self, day: datetime.date) -> str:
        """Return the line of the table."""
        states = ["yes" if step in self.passed else "not reached" for step in COLUMNS]
        return _line([f"{TITLES[self.engine]} {self.release}".strip(), str(day), *states])


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |\n"


HEAD = _line(["newest release", "on", *COLUMNS.values()]) + "|---" * (len(COLUMNS) + 2) + "|\n"


def with_rows(page: str, rows: list[Row], day: datetime.date) -> str:
    """Return the page with the green rows in the table between its marks; other rows stay.

    Raises ValueError if the page has no marks.
    """
    found = re.search(rf"(?s)(?<={re.escape(BEGIN)}\n).*?(?={re.escape(END)})", page)
    if found is None:
        raise ValueError(f"README.md has no {BEGIN} ... {END}")
    lines = {}
    for engine, title in TITLES.items():
        before = re.search(rf"(?m)^\| {title} .*\n", found[0])
        new = next((row for row in rows if row.engine == engine and row.is_green), None)
        if new is not None or before is not None:
            lines[engine] = new.line(day) if new is not None else before[0] if before else ""
    return page[: found.start()] + HEAD + "".join(lines.values()) + page[found.end() :]


def unpack(wheel: Path, folder: Path) -> Path:
    """Extract only the Python files of a wheel; return their folder."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.endswith(".py"):
                archive.extract(name, folder)
    return folder


def compare(engine: str, ours: Path, theirs: Path) -> list[str]:
    """Return a line for each name that has been removed or changed."""
    lines = []
    for name in touched(engine):
        before, after = signature(ours, name), signature(theirs, name)
        if before == after:
            continue
        if after is None:
            lines.append(f"gone     {name}\n           was {before}")
        elif before is None:
            lines.append(f"new      {name}\n           is  {after}")
        else:
            lines.append(f"changed  {name}\n           was {before}\n           is  {after}")
    return lines


def show_differences(engine: str, release: str, ours: Path, theirs: Path) -> bool:
    """Print the differences; return whether there are any."""
    lines = compare(engine, ours, theirs)
    print(f"{release}: {len(touched(engine))} names looked at, {len(lines)} differ")
    print("".join(f"  {line}\n" for line in lines), end="", flush=True)
    return bool(lines)


def probe(release: Release, end_s: float) -> None:
    """Check every function that is hooked. Raises `NotReachedError` with what differs."""
    command = ["env", *(f"{name}={value}" for name, value in release.environment.items())]
    command += [str(release.python), "-c", _PROBE, release.engine, release.version]
    found = json.loads(run(command, end_s, "the probe").splitlines()[-1])
    for wrong in (*found["broken"], *found["missed"], found["failure"]):
        if wrong:
            raise NotReachedError(f"the probe found: {' '.join(str(wrong).split())}")
    print(f"{release.engine} {release.version}: {found['hooked']} functions hooked", flush=True)


def try_out(release: Release, row: Row, end_s: float) -> None:
    """Run the battery; note in the row what passed. Raises `NotReachedError`."""
    logs = FOLDER / "logs" / release.engine
    command = [sys.executable, str(Path(__file__).with_name("engine_battery.py")), release.engine]
    command += [str(logs), *([str(release.overlay)] if release.overlay else [])]
    logs.mkdir(parents=True, exist_ok=True)
    output = logs / "battery.log"
    with output.open("wb") as log:
        battery = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT)
        try:
            status = battery.wait(max(0.0, end_s - time.monotonic()))
            reason = ""
        except subprocess.TimeoutExpired:
            end(battery)
            status, reason = 1, "the time ended during the battery"
    said = output.read_text(errors="replace").splitlines()
    row.passed += [json.loads(line)["passed"] for line in said if line.startswith('{"passed"')]
    if reason:
        raise NotReachedError(reason)
    if status:
        wrong = next((line for line in said if "Error: " in line), f"exit status {status}")
        raise NotReachedError(f"the battery failed, {wrong} ({output.relative_to(ROOT)})")


def end(battery: subprocess.Popen[bytes]) -> None:
    """Let a battery end its engines; kill them all if it does not."""
    family = psutil.Process(battery.pid).children(recursive=True)
    battery.terminate()
    try:
        battery.wait(ENDING_S)
    except subprocess.TimeoutExpired:
        battery.kill()
        battery.wait()
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def try_newest(engine: str, end_s: float) -> Row:
    """Install, compare, probe and run the newest release of an engine."""
    row = Row(engine)
    try:
        release = install(engine, FOLDER, end_s)
        row.release = release.version
        if release.kernels:
            row.release += f" on the CPU kernels of {release.kernels}"
        packages = packages_of(engine)
        if release.overlay is not None and packages is not None:
            show_differences(engine, f"{engine} {release.version}", packages, release.overlay)
        probe(release, end_s)
        row.passed.append("probe")
        try_out(release, row, end_s)
    except NotReachedError as error:
        row.reason = str(error)
    return row


def newest(engines: list[str], end_s: float) -> list[Row]:
    """Try each engine until `end_s`; print a line about each."""
    rows = []
    for engine in engines:
        begin_s = time.monotonic()
        row = try_newest(engine, end_s)
        took_s = time.monotonic() - begin_s
        state = "passed" if row.is_green else f"not passed: {row.reason}"
        print(f"{engine} {row.release}: {state} ({took_s:.0f} s)", flush=True)
        rows.append(row)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/engines", description=__doc__)
    parser.add_argument("--newest", action="store_true", help="try the newest release")
    parser.add_argument("--wheel", type=Path, help="compare a wheel that is here already")
    parser.add_argument("--engine", choices=list(TITLES), help="one engine (else all)")
    options = parser.parse_args()
    if options.newest == (options.wheel is not None):
        parser.error("give --newest or --wheel")
    if options.wheel is not None:
        if options.engine is None:
            parser.error("--wheel needs --engine")
        ours = packages_of(options.engine)
        if ours is None:
            parser.error(f"{options.engine} is not installed here; run scripts/setup")
        with tempfile.TemporaryDirectory(prefix="kvelastic-engines-") as name:
            theirs = unpack(options.wheel, Path(name))
            return int(show_differences(options.engine, options.wheel.name, ours, theirs))
    begin_s = time.monotonic()
    engines = [options.engine] if options.engine else list(TITLES)
    rows = newest(engines, begin_s + BUDGET_S - ENDING_S)
    day = datetime.date.today()
    print(f"\n{HEAD}{''.join(row.line(day) for row in rows)}")
    print(f"{time.monotonic() - begin_s:.0f} s; README.md has the rows that passed")
    readme = ROOT / "README.md"
    readme.write_text(with_rows(readme.read_text(), rows, day))
    return 0 if all(row.is_green for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
