"""The threads that serve one peer, so that no other peer waits for them.

    questions    pins memory and calls the node's user; never waits for a peer
    sends        sends bytes over a stream; waits until the peer has read them
    pushes       reads the peer's memory; waits for a send of the peer, and for its reply

A send never waits for a push, so copies in both directions make progress. A node whose push threads
are all busy still sends what its peers requested.
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
    """Runs work of one kind in order of submission, in up to `most` threads started on demand."""

    def __init__(self, most: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(most, f"kvelastic-{name}")

    def submit(self, work: Callable[[], _T]) -> Future[_T]:
        """Schedule work; it is cancelled if the link ends before it starts. Never blocks.

        Raises `TransferBusyError` if the link has ended or no thread can be started.
        """
        try:
            return self._pool.submit(work)
        except RuntimeError as error:
            raise TransferBusyError(
                f"the peer cannot be served: {error}; if threads are short, raise `ulimit -u`"
            ) from error

    def end(self, *, wait: bool) -> None:
        """Start no further work. With `wait`, block until running work has finished. Idempotent."""
        self._pool.shutdown(wait=wait, cancel_futures=True)


class PeerThreads:
    """The queues of one link. Thread-safe."""

    def __init__(self) -> None:
        self.questions: Final = Queue(QUESTIONS, "questions")
        self.sends: Final = Queue(SENDS, "sends")
        self.pushes: Final = Queue(PUSHES, "pushes")

    def end(self, *, wait: bool = False) -> None:
        """End all three queues; `wait` as in `Queue.end`."""
        for queue in (self.questions, self.sends, self.pushes):
            queue.end(wait=wait)
