"""The threads that serve one peer: no other peer waits for them.

    questions    pins memory, and what the node's user is asked: waits for no peer
    sends        bytes over a stream: waits until the peer has read them
    pushes       reads the peer's memory: waits for a send of the peer's, and for its reply

A send waits for no push, so copies in both directions always go on: a node whose push threads are
all busy still sends what its peers have asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, TypeVar

from kvelastic.errors import TransferBusyError

QUESTIONS: Final = 2
SENDS: Final = 4
PUSHES: Final = 4
_T = TypeVar("_T")


class Queue:
    """Work of one kind, done in its order by `most` threads. They start with the work."""

    def __init__(self, most: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(most, f"kvelastic-{name}")

    def submit(self, work: Callable[[], _T]) -> Future[_T]:
        """Have it done; it is cancelled if the link ends before it begins. Never blocks.

        Raises `TransferBusyError` after the end of the link, and where no thread can be started.
        """
        try:
            return self._pool.submit(work)
        except RuntimeError as error:
            raise TransferBusyError(
                f"the peer cannot be served: {error}; if threads are short, raise `ulimit -u`"
            ) from error

    def end(self, *, wait: bool) -> None:
        """Begin no further work; `wait` for that which runs. Safe to repeat."""
        self._pool.shutdown(wait=wait, cancel_futures=True)


class PeerThreads:
    """Of one link. Any thread."""

    def __init__(self) -> None:
        self.questions: Final = Queue(QUESTIONS, "questions")
        self.sends: Final = Queue(SENDS, "sends")
        self.pushes: Final = Queue(PUSHES, "pushes")

    def end(self, *, wait: bool = False) -> None:
        """End all three queues; `wait` as in `Queue.end`."""
        for queue in (self.questions, self.sends, self.pushes):
            queue.end(wait=wait)
