"""The engine core's process ends when the process that started it has ended.

vLLM's front end ends its engine core in the ordinary way. If the front end is killed, stock vLLM
leaves the engine core behind: it serves nobody, keeps its memory, and its name is taken for the
next start. Here a thread of the engine core's process waits for the end of its parent:

    parent has ended -> SIGTERM to this process, which ends as if vLLM had told it to
                     -> SIGKILL to its workers and to itself, if it has not ended in `grace_s`

The thread waits on a pidfd: of the process, not of the thread that forked (`PR_SET_PDEATHSIG`
follows that thread), and not of a pipe that other children may have inherited.
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

_log = logging.getLogger("kvelastic.vllm")

CLOSE_S: Final = 15.0
"""How long an engine core may take to end, with tiers beside `KVELASTIC_TIER_EXIT_SECONDS`.

It waits several times four seconds for workers that do not answer, and then kills them. Killed
before that, it would leave them behind.
"""
_STARTING_S: Final = 3.0
"""The same while it starts. vLLM's only takes note of SIGTERM then, and goes on to load."""

_ENDS_MS: Final = 1000
"""A process that ends has lost its children a moment before its pidfd says so."""

_vllms_own: Callable[..., None] | None = None
"""`EngineCoreProc.run_engine_core` of vLLM, where `start_engine_cores` has put ours in its place.
A forked child inherits this; in a spawned one vLLM's is in its place."""


_has_started = False


def note_start() -> None:
    """The engine core of this process has loaded its model: from now on it ends at SIGTERM."""
    global _has_started
    _has_started = True


def grace_s(settings: config.Config) -> float:
    """How long an engine core that has started may take to end, in seconds, until it is killed."""
    return CLOSE_S + (settings.tier_exit_s if settings.tiers else 0.0)


def _grace_now_s() -> float:
    return grace_s(config.load()) if _has_started else _STARTING_S


def start_engine_cores(original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Let `original` start engine cores that run `run_engine_core` of this module.

    A spawned child looks its function up by module and name, so it has to be one of a module.
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
    """Run vLLM's engine core, the whole of its process, which ends with the one that started it."""
    end_with_starter(_grace_now_s)
    from vllm.v1.engine.core import EngineCoreProc

    (_vllms_own or EngineCoreProc.run_engine_core)(*args, **kwargs)


def end_with_starter(grace_s: Callable[[], float]) -> None:
    """End this process, a child of multiprocessing's, when its parent has ended. Never blocks.

    It gets SIGTERM then, and SIGKILL after the seconds that `grace_s` returns at that moment, after
    its own children of multiprocessing. A parent that has ended already counts, one that is stopped
    does not.
    """
    threading.Thread(
        target=_end_with_starter, args=(grace_s,), name="kvelastic-starter", daemon=True
    ).start()


def _end_with_starter(grace_s: Callable[[], float]) -> None:
    starter = multiprocessing.parent_process()
    assert starter is not None
    _wait_for_end_of(starter)
    # Before anything that writes to a log: nobody may be reading it any more.
    most_s = grace_s()
    killer = threading.Timer(most_s, _kill)
    killer.daemon = True
    killer.start()
    os.kill(os.getpid(), signal.SIGTERM)
    _log.warning(
        "Process %d, which started this engine core, has ended without ending it. The engine core"
        " ends now, in at most %g s.",
        starter.pid,
        most_s,
    )


def _wait_for_end_of(starter: Any) -> None:
    try:
        fd = os.pidfd_open(starter.pid)
    except ProcessLookupError:
        return
    except OSError:  # a kernel or a sandbox without it, or no descriptor is left
        starter.join()
        return
    try:
        waiting = select.poll()
        waiting.register(fd, select.POLLIN)
        if os.getppid() != starter.pid and not waiting.poll(_ENDS_MS):
            # Another process has its number by now, or a fork server is in between.
            starter.join()
            return
        waiting.poll()
    finally:
        os.close(fd)


def _kill() -> None:
    for child in multiprocessing.active_children():
        child.kill()
    os.kill(os.getpid(), signal.SIGKILL)
