"""Ends the engine core's process when the process that started it has ended.

vLLM's front end normally ends its engine core. If the front end is killed, stock vLLM leaves the
engine core running: it serves no one, keeps its memory, and blocks its name for the next start.
Here a thread of the engine core's process waits for the end of its parent:

    parent has ended -> SIGTERM to this process, which shuts down as usual
                     -> SIGKILL to its workers and to itself, if it has not ended in `grace_s`
                     -> SIGALRM from the kernel a second later, if no thread runs any more

The thread waits on a pidfd. `PR_SET_PDEATHSIG` would follow the parent's thread, not its process,
and other children could inherit a pipe.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import select
import signal
import threading
from collections.abc import Callable
from typing import Any, Final

from kvelastic import config
from kvelastic.shared.liveness import start_time_ticks

_log = logging.getLogger("kvelastic.vllm")

CLOSE_S: Final = 15.0
"""How long an engine core may take to end; with tiers plus `KVELASTIC_TIER_EXIT_SECONDS`.

It waits for hanging workers several times, four seconds each, and then kills them. If it were
killed before that, it would leave them behind.
"""
_STARTING_S: Final = 3.0
"""This bound during start, when vLLM only notes SIGTERM and continues to load."""

_LAST_S: Final = 1.0
"""After the grace: while the interpreter finalizes, no thread of Python's can kill the process."""

_vllms_own: Callable[..., None] | None = None
"""vLLM's `EngineCoreProc.run_engine_core`, while `start_engine_cores` has replaced it with ours.
A forked child inherits this value; a spawned one uses vLLM's class attribute."""


_has_started = False


def note_start() -> None:
    """The engine core of this process has loaded its model and now reacts to SIGTERM."""
    global _has_started
    _has_started = True


def grace_s(settings: config.Config) -> float:
    """Return the seconds that a started engine core may take to end before it is killed."""
    return CLOSE_S + (settings.tier_exit_s if settings.tiers else 0.0)


def _grace_now_s() -> float:
    return grace_s(config.load()) if _has_started else _STARTING_S


def start_engine_cores(original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Make `original` start engine cores that run this module's `run_engine_core`.

    A spawned child finds its function by module and name, so it must be a module's function.
    """
    from vllm.v1.engine.core import EngineCoreProc

    global _vllms_own
    _vllms_own = EngineCoreProc.run_engine_core
    EngineCoreProc.run_engine_core = run_engine_core
    try:
        original(*args, **kwargs)
    finally:
        EngineCoreProc.run_engine_core = staticmethod(_vllms_own)


def run_engine_core(*args: Any, **kwargs: Any) -> None:
    """Run vLLM's engine core, the main function of its process, tied to its parent's life."""
    end_with_starter(_grace_now_s)
    from vllm.v1.engine.core import EngineCoreProc

    (_vllms_own or EngineCoreProc.run_engine_core)(*args, **kwargs)


def end_with_starter(grace_s: Callable[[], float]) -> None:
    """End this process, a multiprocessing child, when its parent has ended. Never blocks.

    The process gets SIGTERM first. `grace_s()` seconds later its own multiprocessing children and
    then the process itself get SIGKILL. Also works if the parent has already ended. A stopped
    parent does not count as ended.
    """
    threading.Thread(
        target=_end_with_starter, args=(grace_s,), name="kvelastic-starter", daemon=True
    ).start()


def _end_with_starter(grace_s: Callable[[], float]) -> None:
    starter = multiprocessing.parent_process()
    assert starter is not None
    _wait_for_end_of(starter)
    # Before anything that logs: the log's reader may be gone.
    most_s = grace_s()
    killer = threading.Timer(most_s, _kill)
    killer.daemon = True
    killer.start()
    signal.setitimer(signal.ITIMER_REAL, most_s + _LAST_S)  # nothing handles SIGALRM: it kills
    os.kill(os.getpid(), signal.SIGTERM)
    _log.warning(
        "Process %d, which started this engine core, has ended without stopping it. The engine core"
        " now ends within %g s.",
        starter.pid,
        most_s,
    )


def _wait_for_end_of(starter: Any) -> None:
    try:
        fd = os.pidfd_open(starter.pid)
    except ProcessLookupError:
        return
    except OSError:  # unsupported by the kernel or a sandbox, or no file descriptor is left
        starter.join()
        return
    try:
        # A dying process loses its children before its pidfd becomes readable.
        if os.getppid() != starter.pid and _is_younger(starter.pid):
            return  # the pid was reused
        waiting = select.poll()
        waiting.register(fd, select.POLLIN)
        waiting.poll()
    finally:
        os.close(fd)


def _is_younger(pid: int) -> bool:
    """Whether a process began after this one. False if that is unknown."""
    ticks, own_ticks = start_time_ticks(pid), start_time_ticks(os.getpid())
    return ticks is not None and own_ticks is not None and ticks > own_ticks


def _kill() -> None:
    for child in multiprocessing.active_children():
        child.kill()
    os.kill(os.getpid(), signal.SIGKILL)
