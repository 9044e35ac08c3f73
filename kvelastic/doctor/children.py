"""Child processes that the doctor asks about GPUs, engines and Python, and that may die or hang.

What a child cannot say is a fact, too: nothing here raises.
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
"""A first contact with eight GPUs takes some seconds where no daemon keeps the driver awake."""

# Not -m: it would look for kvelastic in the working directory first, where anything may lie.
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
    """What a child finds of NVIDIA's driver and the GPUs; at most `timeout_s` long. Never raises.

    `root` is where `proc` and `dev` are found.
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
    """The facts with one more line; anything else (a library's chatter) is passed over."""
    try:
        said: dict[str, Any] = json.loads(line)
        if "gpu" in said:
            return replace(facts, gpus=(*facts.gpus, Gpu(**said["gpu"])))
        return replace(facts, **said)
    except (ValueError, TypeError):
        return facts


def _kernel_module(root: Path) -> str:
    """The version in `NVRM version: NVIDIA ... Kernel Module  580.82.07  Release Build ...`."""
    try:
        first = (root / "proc/driver/nvidia/version").read_text(errors="replace").splitlines()[0]
    except (OSError, IndexError):
        return ""
    numbers = [word for word in first.split() if word[0].isdigit() and "." in word]
    return numbers[0] if numbers else "of an unknown version"


_ENGINE_PATIENCE_S: Final = 300.0
"""Of a child that imports an engine: from a cold disk that takes minutes."""

# An engine's own start may write to stdout: what counts is the last line.
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
    """Whether that engine is built as kvelastic expects; takes as long as importing it.

    A version that was never tried is probed as the series next to it, as with
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


# What the start has left behind comes first: what is imported below is not of the start.
STARTUP_PROGRAM: Final = """
import sys
startup = sys.modules.get("kvelastic.startup")
sys.path[:] = [place for place in sys.path if place]
failure = startup.failure if startup else None
late_import = sys.modules.get("kvelastic.hooks.late_import")
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
    """Start a Python with ENABLE_KVELASTIC=true, and ask it what its start has armed.

    Takes as long as Python takes to start, at most `timeout_s`. Never raises.
    """
    lines, end = _run_child(command, {**environ, "ENABLE_KVELASTIC": "true"}, timeout_s)
    # Its last word: other start files may have written before it.
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
    """The lines of the child, and how it failed to end well; at most `timeout_s` long.

    Never raises.
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
    """End the child; one that is stuck inside the kernel is left behind, not waited for."""
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
