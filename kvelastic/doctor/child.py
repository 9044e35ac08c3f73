"""A child process that the doctor asks, and that may die or hang."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress


def run_child(
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
