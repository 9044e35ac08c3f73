"""Loads kvelastic into each engine that is installed, in a child process, and asks what it found.

Nothing is served: a child imports the modules that kvelastic hooks, which has them probed first.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

from kvelastic.doctor.child import run_child
from kvelastic.doctor.facts import ProbeFact
from kvelastic.engines import Engine

PATIENCE_S: Final = 300.0
"""Of a child that imports an engine: from a cold disk that takes minutes."""

# An engine's own start may write to stdout: what counts is the last line.
_PROGRAM: Final = """
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
    program: Sequence[str] = (sys.executable, "-c", _PROGRAM),
    timeout_s: float = PATIENCE_S,
) -> ProbeFact:
    """Whether that engine is built as kvelastic expects; takes as long as importing it.

    A version that was never tried is probed as the series next to it, as with
    `KVELASTIC_STRICT=false`. Never raises.
    """
    own = {"ENABLE_KVELASTIC": "true", "KVELASTIC_STRICT": "false"}
    lines, end = run_child([*program, engine.name, version], {**environ, **own}, timeout_s)
    try:
        said: dict[str, Any] = json.loads(lines[-1])
        return ProbeFact(
            engine.name, int(said["hooked"]), tuple(said["broken"]), tuple(said["missed"])
        )
    except (IndexError, ValueError, TypeError, KeyError):
        return ProbeFact(engine.name, failure=f"a child that imports it {end or 'said nothing'}")
