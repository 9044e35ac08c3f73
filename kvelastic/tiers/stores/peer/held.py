"""Blocks of finished requests that a prefill engine keeps until a decode engine has read them.

    held = HeldRequests(pool.blocks, hold_s=60, block_bytes=...)
    ticket = held.hold("req-1", ids, keys)    # in use or cached; nothing evicts them before
    with held.reading(ticket, keys) as ids:   # pinned while the body runs
        ...
    held.release(ticket)                      # else the hold ends by itself after `hold_s`

The blocks are pinned in the engine's pool. So an alloc, a lower limit and a sleep leave them alone
although the engine has freed them. Once a hold has ended, its ticket is refused. So a late reader
gets no bytes, also if the blocks hold another request's by then.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from kvelastic import _vmm
from kvelastic.errors import DriverError, NotRegisteredError
from kvelastic.tiers.base import each_key
from kvelastic.transfer.node import HeldRequest

TICKET_BYTES: Final = 16


@dataclass
class _Hold:
    request: str
    ids: dict[bytes, int]
    """The block of each key."""
    pin: int
    deadline_s: float
    readers: int = 0
    is_over: bool = False


class HeldRequests:
    """The holds of one pool. Thread-safe. A thread ends those whose time is over."""

    def __init__(
        self,
        blocks: _vmm.Pool,
        *,
        hold_s: float,
        block_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`hold_s` bounds each hold, in seconds. `block_bytes` is a block's size on all ranks."""
        self._blocks = blocks
        self._hold_s = hold_s
        self._block_bytes = block_bytes
        self._clock = clock
        self._changed = threading.Condition()
        self._holds: dict[bytes, _Hold] = {}
        self._is_closed = False
        self._thread: threading.Thread | None = None
        self.expired = 0
        """Number of holds that ended because no reader released them in time."""

    def hold(self, request: str, ids: Sequence[int], keys: bytes) -> bytes:
        """Hold a request's blocks, in use or cached. Return the ticket for their reader.

        `keys` are the keys of the blocks, concatenated. Raises `DriverError` if the thread that
        ends holds cannot be started.
        """
        self._start_thread()  # first, because only the thread ends the pin
        pin = self._blocks.pin(ids)
        ticket = secrets.token_bytes(TICKET_BYTES)
        by_key = dict(zip(each_key(keys), ids, strict=True))
        with self._changed:
            self._holds[ticket] = _Hold(request, by_key, pin, self._clock() + self._hold_s)
            self._changed.notify_all()
        return ticket

    def _start_thread(self) -> None:
        with self._changed:
            if self._thread is None and not self._is_closed:
                thread = threading.Thread(target=self._run, name="kvelastic-holds", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:
                    raise DriverError(
                        "no thread could be started to end holds; raise the limit on threads of"
                        " this user or container"
                    ) from error
                self._thread = thread

    @contextmanager
    def reading(self, ticket: bytes, keys: bytes) -> Iterator[list[int]]:
        """Yield the blocks of these keys. They stay pinned while the body runs.

        Raises `NotRegisteredError` if the hold has ended, or if a key is none of its blocks.
        """
        with self._changed:
            hold = self._holds.get(ticket)
            if hold is None or hold.deadline_s <= self._clock():
                raise NotRegisteredError(
                    "the ticket is unknown: its blocks were read already, or were not read within"
                    f" {self._hold_s:g} s (KVELASTIC_PREFILL_HOLD_SECONDS)"
                )
            try:
                ids = [hold.ids[key] for key in each_key(keys)]
            except KeyError:
                raise NotRegisteredError(
                    f"a block is none of the {len(hold.ids)} that are held for request"
                    f" {hold.request}; send the decode engine the same prompt"
                ) from None
            hold.readers += 1
        try:
            yield ids
        finally:
            with self._changed:
                hold.readers -= 1
                unpins = hold.is_over and not hold.readers
            if unpins:
                self._blocks.unpin(hold.pin)

    def release(self, ticket: bytes) -> bool:
        """End a hold. A running reader keeps the pin until it is done. False: it ended before."""
        return bool(self._end([ticket]))

    def release_all(self) -> int:
        """End all holds; return how many. For contents that must not be read any longer."""
        with self._changed:
            tickets = list(self._holds)
        return self._end(tickets)

    def _end(self, tickets: Sequence[bytes]) -> int:
        with self._changed:
            ended = [hold for one in tickets if (hold := self._holds.pop(one, None)) is not None]
            for hold in ended:
                hold.is_over = True
            unread = [hold for hold in ended if not hold.readers]
        for hold in unread:
            self._blocks.unpin(hold.pin)
        return len(ended)

    def expire(self) -> float | None:
        """End the holds whose time is over. Return the next deadline, or None without a hold."""
        now_s = self._clock()
        with self._changed:
            late = [one for one, hold in self._holds.items() if hold.deadline_s <= now_s]
        ended = self._end(late)
        with self._changed:
            self.expired += ended
            return min((hold.deadline_s for hold in self._holds.values()), default=None)

    def held(self) -> list[HeldRequest]:
        """Return the holds, the one that ends first in front."""
        now_s = self._clock()
        with self._changed:
            holds = sorted(self._holds.values(), key=lambda hold: hold.deadline_s)
        return [
            HeldRequest(
                hold.request, len(hold.ids) * self._block_bytes, max(0.0, hold.deadline_s - now_s)
            )
            for hold in holds
        ]

    def close(self) -> None:
        """End all holds and stop the thread. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        self.release_all()

    def _run(self) -> None:
        while True:
            next_s = self.expire()
            with self._changed:
                if self._is_closed:
                    return
                if next_s is None:
                    self._changed.wait_for(lambda: self._is_closed or bool(self._holds))
                else:
                    self._changed.wait(max(0.0, next_s - self._clock()))
