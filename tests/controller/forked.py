"""Programs forked from one process that has imported their modules: 0.1 s of a processor, not 1 s.

    process = Forked("controller", ["--config", path], os.environ)
    process.stdout.readline(); process.send_signal(signal.SIGTERM); assert process.wait(60) == 0

A `Forked` behaves as `python -m kvelastic.controller` or `python tests/fakes/engine.py` does. Only
its command line and its `/proc/PID/environ` are those of the process that forks. It ends with the
test run, however that ends.
"""

from __future__ import annotations

import atexit
import importlib
import io
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

FAKES = Path(__file__).parent.parent / "fakes"

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        "kvelastic.controller.__main__",
        "kvelastic.controller.server",
        "uvloop",
        "encodings.idna",
        "aiohttp.web",
        "argparse",
    ]
)


class Forked:
    """A running program, with that part of `subprocess.Popen` that tests use."""

    def __init__(
        self, program: str, arguments: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        reader, writer = os.pipe()
        self.stdout = io.TextIOWrapper(os.fdopen(reader, "rb"))
        with Connection(writer, readable=False) as output:
            self._process = _CONTEXT.Process(
                target=_run,
                args=(program, list(arguments), dict(environment), output),
                daemon=True,
            )
            self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout_s: float | None = None) -> int:
        self._process.join(timeout_s)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout_s or 0.0)
        return code


def _run(
    program: str, arguments: list[str], environment: dict[str, str], output: Connection
) -> None:
    sys.path.insert(0, str(FAKES))
    from mortal import die_with_parent

    die_with_parent()
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    output.close()
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # TMPDIR is read again
    sys.argv = [program, *arguments]
    try:
        name = "kvelastic.controller.__main__" if program == "controller" else program
        importlib.import_module(name).main()
    finally:
        atexit._run_exitfuncs()  # multiprocessing ends without
