"""Child processes that query GPUs, engines and Python, because those may crash or hang.

Never raises: a failed child is reported as a fact.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from kvelastic.doctor.facts import Gpu, GpuFacts, ProbeFact, StartupFacts
from kvelastic.engines import Engine

_PATIENCE_S: Final = 20.0
"""Opening eight GPUs takes some seconds if no daemon keeps the driver loaded."""

# Not -m: it would first search the working directory, which may contain unrelated files.
_CHILD: Final = (
    sys.executable,
    "-c",
    "import sys; sys.path[:] = [p for p in sys.path if p];"
    " from kvelastic.doctor.gpu_child import main; main()",
)


def ask_gpus(
    root: Path = Path("/"),
    environ: Mapping[str, str] = os.environ,
    *,
    command: Sequence[str] = _CHILD,
    timeout_s: float = _PATIENCE_S,
) -> GpuFacts:
    """Query the NVIDIA driver and the GPUs in a child process. Never raises.

    Blocks for about `timeout_s` seconds at most. `root` is the folder that contains `proc` and
    `dev`.
    """
    facts = GpuFacts(
        kernel_module=_kernel_module(root),
        has_device_files=any((root / "dev").glob("nvidia[0-9]*")) or (root / "dev/dxg").exists(),
        visible_devices=environ.get("CUDA_VISIBLE_DEVICES"),
    )
    lines, end = _run_child(command, environ, timeout_s)
    for line in lines:
        facts = _with(facts, line)
    return replace(facts, child_end=end or facts.child_end)


def _with(facts: GpuFacts, line: str) -> GpuFacts:
    """Add one line of the child's output to the facts; ignore other output of libraries."""
    try:
        said: dict[str, Any] = json.loads(line)
        if "gpu" in said:
            return replace(facts, gpus=(*facts.gpus, Gpu(**said["gpu"])))
        return replace(facts, **said)
    except (ValueError, TypeError):
        return facts


def _kernel_module(root: Path) -> str:
    """Return the version in `NVRM version: NVIDIA ... Kernel Module  580.82.07  Release ...`."""
    try:
        first = (root / "proc/driver/nvidia/version").read_text(errors="replace").splitlines()[0]
    except (OSError, IndexError):
        return ""
    numbers = [word for word in first.split() if word[0].isdigit() and "." in word]
    return numbers[0] if numbers else "of an unknown version"


_ENGINE_PATIENCE_S: Final = 300.0
"""Timeout of a child that imports an engine: takes minutes from a cold disk."""

# The engine may write to stdout when it starts, so only the last line is read.
_ENGINE_PROGRAM: Final = """
import importlib, json, sys

sys.path[:] = [place for place in sys.path if place]
from kvelastic import engines
from kvelastic.errors import KvelasticError

engine, version = engines.find(sys.argv[1]), sys.argv[2]
hooked, broken, missed = 0, [], []
try:
    engine.plugin().register()
    rooms = engine.rooms(version)
except (KvelasticError, SystemExit) as error:
    rooms, broken = {}, [str(error)]
for room, hooks in rooms.items():
    try:
        importlib.import_module(room)
        hooked += hooks
    except (KvelasticError, SystemExit) as error:
        broken.append(str(error))
    except Exception as error:
        missed.append(f"{room}: {type(error).__name__}: {error}")
print()
print(json.dumps({"hooked": hooked, "broken": broken, "missed": missed}))
"""


def ask_engine(
    engine: Engine,
    version: str,
    environ: Mapping[str, str] = os.environ,
    *,
    program: Sequence[str] = (sys.executable, "-c", _ENGINE_PROGRAM),
    timeout_s: float = _ENGINE_PATIENCE_S,
) -> ProbeFact:
    """Check that an engine's code is as kvelastic expects; takes as long as importing it.

    An unsupported version is checked against the nearest supported series, as with
    `KVELASTIC_STRICT=false`. Never raises.
    """
    own = {"ENABLE_KVELASTIC": "true", "KVELASTIC_STRICT": "false"}
    lines, end = _run_child([*program, engine.name, version], {**environ, **own}, timeout_s)
    try:
        said: dict[str, Any] = json.loads(lines[-1])
        return ProbeFact(
            engine.name, int(said["hooked"]), tuple(said["broken"]), tuple(said["missed"])
        )
    except (IndexError, ValueError, TypeError, KeyError):
        return ProbeFact(engine.name, failure=f"a child that imports it {end or 'said nothing'}")


# First record the state after startup, because the imports below change it.
STARTUP_PROGRAM: Final = """
import sys
startup = sys.modules.get("kvelastic.startup")
sys.path[:] = [place for place in sys.path if place]
failure = startup.failure if startup else None
late_import = sys.modules.get("kvelastic.integration.hooks.late_import")
armed = late_import.armed() if late_import else ()
if not startup:
    try:
        import kvelastic.startup
    except Exception as error:
        failure = error
import json, os, site
user = site.getusersitepackages() if site.ENABLE_USER_SITE else None
folders = [*site.getsitepackages(), *([user] if user else [])]
names = ("kvelastic.pth", "kvelastic.start")
files = [os.path.join(folder, name) for folder in folders for name in names]
print(json.dumps({
    "armed": armed,
    "failure": "" if failure is None else f"{type(failure).__name__}: {failure}",
    "start_files": [file for file in files if os.path.isfile(file)],
    "site_folders": folders,
}))
"""


def ask_startup(
    environ: Mapping[str, str] = os.environ,
    *,
    command: Sequence[str] = (sys.executable, "-c", STARTUP_PROGRAM),
    timeout_s: float = _PATIENCE_S,
) -> StartupFacts:
    """Start Python with ENABLE_KVELASTIC=true and return what its startup has armed.

    Takes as long as Python's startup, at most about `timeout_s` seconds. Never raises.
    """
    lines, end = _run_child(command, {**environ, "ENABLE_KVELASTIC": "true"}, timeout_s)
    # Only the last line: other startup files may have written before it.
    try:
        said: dict[str, Any] = json.loads(lines[-1])
        return StartupFacts(
            armed=tuple(said["armed"]),
            failure=said["failure"],
            start_files=tuple(said["start_files"]),
            site_folders=tuple(said["site_folders"]),
        )
    except (IndexError, ValueError, TypeError, KeyError):
        return StartupFacts(failure=f"a new Python {end or 'said nothing of it'}")


def _run_child(
    command: Sequence[str], environ: Mapping[str, str], timeout_s: float
) -> tuple[list[str], str]:
    """Return the child's lines and how it failed ("" if it succeeded). Never raises.

    Blocks for about `timeout_s` seconds at most.
    """
    try:
        child = subprocess.Popen(
            command,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
    except OSError as error:
        return [], f"could not be started: {error}"
    end = ""
    try:
        said, errors = child.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        end = f"gave no answer within {timeout_s:g} s"
        said, errors = _kill(child)
    except BaseException:  # Ctrl-C
        _kill(child)
        raise
    if not end and child.returncode:
        last = errors.strip().rpartition("\n")[2]
        end = f"{_death(child.returncode)}{': ' if last else ''}{last}"
    return said.splitlines(), end


def _kill(child: subprocess.Popen[str]) -> tuple[str, str]:
    """Kill the child; do not wait for a child that is stuck in the kernel."""
    child.kill()
    with suppress(subprocess.TimeoutExpired):
        return child.communicate(timeout=2.0)
    for stream in (child.stdout, child.stderr):
        if stream is not None:
            stream.close()
    return "", ""


def _death(returncode: int) -> str:
    if returncode > 0:
        return f"ended with exit code {returncode}"
    try:
        return f"died of {signal.Signals(-returncode).name}"
    except ValueError:
        return f"died of signal {-returncode}"
