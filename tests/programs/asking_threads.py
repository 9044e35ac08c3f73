"""Threads that ask a server all the time, until the test has seen enough.

with beside(ask_until):     # ask_until(is_over) in a thread: it ends soon after is_over is set
    ...
"""

from __future__ import annotations

import random
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager


@contextmanager
def beside(work: Callable[[threading.Event], None]) -> Iterator[None]:
    """In the body a thread is at work; it is told of the body's end, and waited for."""
    is_over = threading.Event()
    thread = threading.Thread(target=work, args=(is_over,))
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


class AskingThreads(ABC):
    """Use it as a context manager: its end is the end of every thread's last request.

    A subclass says how many threads there are, by their `seeds`, and what each does in `_send`, as
    long as `_done` is not set.
    """

    _done: threading.Event
    _threads: list[threading.Thread]

    @abstractmethod
    def seeds(self) -> Iterable[int]:
        """Of the threads' own random numbers."""

    @abstractmethod
    def _send(self, pick: random.Random) -> None:
        """One thread's work, with its own random numbers."""

    def __enter__(self):
        self._done = threading.Event()
        self._threads = [
            threading.Thread(target=self._send, args=(random.Random(seed),))
            for seed in self.seeds()
        ]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        for thread in self._threads:
            thread.join()
