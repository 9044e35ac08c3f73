"""Wait for what another thread or process does in its own time.

wait_until(lambda: one.mapped_bytes == 0, "the maintenance thread has given everything back")

with stopped_once(worker, lambda: server.running() == 1, "it runs"):
    ...                 # it is where it was when that came true, however slow this process is

with stopped_during(worker, ask, lambda: server.running() == 1, "it runs") as answer:
    ...                 # likewise, while the request runs that `ask` has started
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from concurrent.futures import Future

    import psutil

Value = TypeVar("Value")

DEADLINE_S = 300.0
"""A guard, not an expectation: only a fault reaches it, on a machine of any speed."""
_INTERVAL_S = 0.001
_MOMENT_S = 0.005
"""How long a process runs that is looked at while it is stopped."""


def wait_until(
    condition: Callable[[], Value],
    what: str | Callable[[], str] = "",
    deadline_s: float = DEADLINE_S,
) -> Value:
    """Call `condition` until it returns a true value, and return that.

    A failure shows `what`, which is called then if it is a function.
    """
    end_s = time.monotonic() + deadline_s
    while not (value := condition()):
        if time.monotonic() >= end_s:
            why = what() if callable(what) else what
            raise AssertionError(why or "it did not come true")
        time.sleep(_INTERVAL_S)
    return value


@contextmanager
def stopped_once(
    process: psutil.Process, condition: Callable[[], object], what: str = ""
) -> Iterator[None]:
    """Let a process run a moment at a time until the condition holds; in the body it is stopped.

    The condition is asked while it is stopped, so the process gets no further than a moment beyond.
    """

    def holds_after_a_moment() -> bool:
        process.resume()
        time.sleep(_MOMENT_S)
        process.suspend()
        return bool(condition())

    try:
        wait_until(holds_after_a_moment, what)
        yield
    finally:
        process.resume()


@contextmanager
def stopped_during(
    process: psutil.Process,
    ask: Callable[[], Future[Value]],
    condition: Callable[[], object],
    what: str = "",
) -> Iterator[Future[Value]]:
    """`stopped_once` while a request runs; yields its answer.

    On a busy machine the process may answer it before the condition is asked. Then `ask` is called
    again.
    """
    answer = ask()

    def holds_while_it_runs() -> bool:
        nonlocal answer
        if answer.done():
            answer = ask()
        return bool(condition())

    with stopped_once(process, holds_while_it_runs, what):
        yield answer
