"""Tries whether a Python that starts here loads kvelastic into engines that have no plugins."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

from kvelastic.doctor.child import run_child
from kvelastic.doctor.facts import StartupFacts

PATIENCE_S: Final = 20.0
"""Of a Python that only starts; others' start files may be slow."""

# What the start has left behind comes first: what is imported below is not of the start.
_PROGRAM: Final = """
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
    command: Sequence[str] = (sys.executable, "-c", _PROGRAM),
    timeout_s: float = PATIENCE_S,
) -> StartupFacts:
    """Start a Python with ENABLE_KVELASTIC=true, and ask it what its start has armed.

    Takes as long as Python takes to start, at most `timeout_s`. Never raises.
    """
    lines, end = run_child(command, {**environ, "ENABLE_KVELASTIC": "true"}, timeout_s)
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
