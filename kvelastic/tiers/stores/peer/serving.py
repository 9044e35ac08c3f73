"""The owner's side: copies held blocks to staging memory, from which a decode engine pulls them.

    owner (prefill)                                             reader (decode)
    read(ticket, keys): blocks -> staging slots  <------------  asks
                        claim, addresses         ------------>
    is the claim in force?                       <------------  pulls, under a lease
    slots are free again                         <------------  settles

A worker has the blocks in its memory, and the engine core has staging memory, so this needs nothing
from a worker but the copies that tiers use. Slots of a reader that does not come are taken away
after `READ_S`. A pull that is late then fails, because its claim is gone.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from kvelastic import _vmm
from kvelastic.errors import (
    InvalidArgumentError,
    MessageError,
    NotRegisteredError,
    TransferBusyError,
    UnsupportedError,
)
from kvelastic.tiers.base import KEY_BYTES
from kvelastic.tiers.staging import StagingSlots
from kvelastic.tiers.stores.peer.held import HeldRequests
from kvelastic.tiers.stores.peer.split import Split, moves
from kvelastic.tiers.stores.peer.wire import PROTOCOL, Read, Reading, Release
from kvelastic.transfer import Link, Piece
from kvelastic.transfer.wire import MOST_PIECES

READ_S: Final = 5.0
"""How long a reader may take between the reply and the end of its pull."""
_BUSY_S: Final = 1.0
"""How long a question waits for slots that other readers use."""
_CLAIM_BYTES: Final = 16


@dataclass
class _Reading:
    link: Link
    slots: list[int]
    pieces: frozenset[Piece]
    left_bytes: int
    deadline_s: float


class Serving:
    """Serves the held blocks of one pool. Thread-safe; called by threads of the node."""

    def __init__(
        self,
        held: HeldRequests,
        copies: _vmm.Pool,
        staging: _vmm.Staging,
        identity: Callable[[], bytes],
        split: Split | None = None,
    ) -> None:
        """`identity` returns what a reader must have too; empty if it is not known yet.

        With `split`, readers may have other ranks.
        """
        self._held = held
        self._copies = copies
        self._staging = staging
        self._identity = identity
        self._split = split
        self._slots = StagingSlots(staging.slots)
        self._lock = threading.Lock()
        self._readings: dict[bytes, _Reading] = {}

    def answer(self, link: Link, body: bytes) -> bytes:
        """Answer a question of a peer. Blocks for a copy of the pool, and up to 1 s for slots."""
        asked = PROTOCOL.decode(body)
        if isinstance(asked, Read):
            return PROTOCOL.encode(self._read(link, asked))
        if not isinstance(asked, Release):
            raise MessageError(f"a {type(asked).__name__} is no question about held blocks")
        self._held.release(asked.ticket)
        return b""

    def _read(self, link: Link, asked: Read) -> Reading:
        if len(asked.keys) % KEY_BYTES or not asked.keys:
            raise InvalidArgumentError(f"{len(asked.keys)} bytes are no keys of {KEY_BYTES} each")
        identity = self._identity()
        if not identity:
            raise TransferBusyError("the weights of this engine are still being identified")
        if asked.identity != identity:
            raise UnsupportedError(
                "the engines differ in model, weights, dtype, block size, vLLM version or layout,"
                " or in a tensor parallel size that must be equal here; start both with the same"
            )
        pieces = self._pieces(asked.ranks)
        most = max(1, min(self._slots.count // 2, MOST_PIECES // len(pieces)))
        with self._held.reading(asked.ticket, asked.keys) as ids:
            slots = self._take(min(len(ids), most))
            try:
                self._copies.copy_out(ids[: len(slots)], self._staging, slots)
            except BaseException:
                self._slots.give_back(slots)
                raise
        addresses = [self._staging.address(slot) for slot in slots]
        claim = secrets.token_bytes(_CLAIM_BYTES)
        read = frozenset((address + at, size) for address in addresses for at, size in pieces)
        left_bytes = len(slots) * sum(size for _, size in pieces)
        with self._lock:
            self._readings[claim] = _Reading(
                link, slots, read, left_bytes, time.monotonic() + READ_S
            )
        if not link.is_open:
            self.ended(link)
        return Reading(claim, addresses, 0 if self._split is None else self._split.ranks)

    def _pieces(self, ranks: int) -> list[tuple[int, int]]:
        """Return offset and size of all that a reader with these ranks pulls of a record.

        Raises `UnsupportedError` if these ranks cannot divide the heads equally.
        """
        if self._split is None:
            return [(0, self._staging.record_bytes)]
        return [(one.source, one.size_bytes) for one in moves(self._split, self._split.over(ranks))]

    def _take(self, count: int) -> list[int]:
        deadline_s = time.monotonic() + _BUSY_S
        while True:
            self._expire()
            slots = self._slots.take(count, timeout_s=_BUSY_S / 10)
            if slots is not None:
                return slots
            if time.monotonic() >= deadline_s:
                raise TransferBusyError(
                    f"other engines use the {self._slots.count} staging slots; raise"
                    " KVELASTIC_TIER_STAGING"
                )

    def claim(self, link: Link, claim: bytes, pieces: Sequence[Piece]) -> _Claimed:
        """Check a pull of records. Raises `NotRegisteredError` unless they are its reader's."""
        with self._lock:
            reading = self._readings.get(claim)
            if reading is None or reading.link is not link:
                raise NotRegisteredError("the records were not read in time; ask for them again")
            if not reading.pieces.issuperset(pieces):
                raise NotRegisteredError("a piece is none of the records that were asked for")
        return _Claimed(self, claim, sum(size for _, size in pieces))

    def is_whole(self, claim: bytes) -> bool:
        """Return whether the records are still those that the claim was made for."""
        with self._lock:
            return claim in self._readings

    def pulled(self, claim: bytes, size_bytes: int) -> None:
        """A pull has ended. The slots are free once everything was pulled."""
        with self._lock:
            reading = self._readings.get(claim)
            if reading is None:
                return
            reading.left_bytes -= size_bytes
            if reading.left_bytes > 0:
                return
            del self._readings[claim]
        self._slots.give_back(reading.slots)

    def ended(self, link: Link) -> None:
        """A link has ended: nobody pulls the records that were copied for it."""
        self._drop(lambda reading: reading.link is link)

    def _expire(self) -> None:
        now_s = time.monotonic()
        self._drop(lambda reading: reading.deadline_s <= now_s)

    def _drop(self, which: Callable[[_Reading], bool]) -> None:
        with self._lock:
            dropped = {claim: one for claim, one in self._readings.items() if which(one)}
            for claim in dropped:
                del self._readings[claim]
        for reading in dropped.values():
            self._slots.give_back(reading.slots)


class _Claimed:
    """The hold of one pull."""

    def __init__(self, serving: Serving, claim: bytes, size_bytes: int) -> None:
        self._serving = serving
        self._claim = claim
        self._size_bytes = size_bytes

    def is_whole(self) -> bool:
        """Return whether the slots were not given to another reader."""
        return self._serving.is_whole(self._claim)

    def release(self) -> None:
        """The pull has ended."""
        self._serving.pulled(self._claim, self._size_bytes)
