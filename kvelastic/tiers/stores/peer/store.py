"""A store that reads blocks which another engine holds for this one. Nothing is written to it.

    store = PeerStore(record_bytes, node)
    store.expect("req-1", Ticket(...), keys, peer_keys)    # the engine got a ticket with a request
    store.get(keys, views)                                 # pulled from the engine that holds them
    store.finish("req-1")                                  # its blocks are no longer held there

Without a ticket the store has no record. With one it has those keys, as far as is known here: the
peer is asked when the engine reads. If the peer is gone, or holds the blocks no longer, the read is
a miss, and the engine computes the tokens. After a failure the peer is not asked for a while.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from kvelastic.errors import InvalidArgumentError, KvelasticError, MessageError
from kvelastic.messages import Address
from kvelastic.tiers.base import (
    KEY_BYTES,
    Capacity,
    Selection,
    Store,
    each_key,
)
from kvelastic.tiers.namespace import Namespace
from kvelastic.tiers.stores.circuit_breaker import CircuitBreaker
from kvelastic.tiers.stores.peer.split import (
    FORMAT_VERSION,
    Move,
    Split,
    moves,
    replica_moves,
)
from kvelastic.tiers.stores.peer.wire import MOST_KEYS, PROTOCOL, Read, Reading, Release
from kvelastic.tiers.workers import Workers
from kvelastic.transfer import Link, Node
from kvelastic.transfer.wire import MOST_BYTES

_log = logging.getLogger("kvelastic")

LINK_S: Final = 2.0
"""How long a link may take. A peer on another host that is gone does not refuse it."""
ASK_S: Final = 3.0
"""How long the peer may take to copy records to its staging memory."""
PULL_S: Final = 5.0
_MOST_BACKOFF_S: Final = 10.0
MOST_PEERS: Final = 256
"""How many engines are remembered. A client may invent the node that its request names."""


@dataclass(frozen=True)
class Ticket:
    """Where a request's blocks are held. Comes with the request, so it is not trusted."""

    ticket: bytes
    node_id: int
    address: Address


@dataclass
class _Expected:
    ticket: Ticket
    keys: frozenset[bytes]


@dataclass
class _Peer:
    """What is known of an engine, by its node's id."""

    linking: threading.Lock = field(default_factory=threading.Lock)
    breaker: CircuitBreaker = field(
        default_factory=lambda: CircuitBreaker(time.monotonic, most_s=_MOST_BACKOFF_S)
    )


class PeerStore(Store):
    """The blocks that other engines hold for requests of this one. Thread-safe."""

    name = "peer"
    takes_records = False

    def __init__(
        self, record_bytes: int, node: Node, *, identified: bool, split: Split | None = None
    ) -> None:
        """With `identified`, the contents of the weights are not awaited (`identify`).

        With `split`, the peers may have other ranks.
        """
        super().__init__(record_bytes)
        self._split = split
        self._node = node
        self._lock = threading.Lock()
        self._by_request: dict[str, _Expected] = {}
        self._by_key: dict[bytes, tuple[Ticket, bytes]] = {}
        """The ticket of each key of this engine, and the peer's key."""
        self._peers: dict[int, _Peer] = {}
        self._namespace: Namespace | None = None
        self._weights: str | None = "" if identified else None
        self._changed_weights = ""
        self._problem = ""
        self._notices = Workers("kvelastic-notice")

    # --- identity -------------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        """Whether the weights are identified."""
        return bool(self.identity)

    @property
    def identity(self) -> bytes:
        """What both engines must have: all that changes a block's bytes. Empty: not known yet."""
        namespace, weights = self._namespace, self._weights
        if namespace is None or weights is None:
            return b""
        # A reset of the prefix cache changes the generation, and no contents.
        namespace = replace(namespace, generation=0)
        if self._split is not None:
            layout = f"split {FORMAT_VERSION}: {self._split.over(1)}"
            namespace = replace(namespace, layout=layout, ranks="", record_bytes=0)
        fingerprint = namespace.fingerprint
        text = f"{weights} {self._changed_weights}"
        return hashlib.sha256(fingerprint + text.encode()).digest()[:16]

    def identify(self, fingerprint: str) -> None:
        """Set the fingerprint of the weights. Until then the store has no records."""
        self._weights = fingerprint

    def weights_changed(self) -> None:
        """The weights changed in place: no other engine is known to have the same."""
        self._changed_weights = secrets.token_hex(16)

    def enter(self, namespace: Namespace) -> None:
        """Set the namespace."""
        self._namespace = namespace

    # --- tickets --------------------------------------------------------------------------------

    def expect(self, request: str, ticket: Ticket, keys: bytes, peer_keys: bytes) -> None:
        """A request came with a ticket: `keys` of this engine are `peer_keys` of the peer."""
        pairs = dict(zip(each_key(keys), each_key(peer_keys), strict=True))
        with self._lock:
            self._by_request[request] = _Expected(ticket, frozenset(pairs))
            self._by_key |= {key: (ticket, theirs) for key, theirs in pairs.items()}

    def finish(self, request: str) -> None:
        """The request needs nothing more: the peer is notified, in the background. Idempotent."""
        with self._lock:
            expected = self._by_request.pop(request, None)
            if expected is None:
                return
            for key in expected.keys:
                if self._by_key.get(key, (None,))[0] is expected.ticket:
                    del self._by_key[key]
        self._notices.submit(partial(self._notify, expected.ticket))

    def _notify(self, ticket: Ticket) -> None:
        peer = self._peer(ticket)
        try:
            if peer.breaker.allows_calls:
                self._link(ticket, peer).ask(PROTOCOL.encode(Release(ticket.ticket)), ASK_S)
        except KvelasticError as error:
            if error.code not in _REFUSALS:
                peer.breaker.failed(str(error))  # other notices to it would wait as long
            _log.debug("the prefill engine holds blocks until their time is over: %s", error)

    # --- records --------------------------------------------------------------------------------

    def has(self, keys: bytes) -> list[bool]:
        """Return for each key whether a peer that can be asked holds it for a request."""
        self._count_of(keys)
        with self._lock:
            found = [self._by_key.get(key) for key in each_key(keys)]
            usable: dict[int, bool] = {}
            for one in found:
                if one is not None and (node_id := one[0].node_id) not in usable:
                    peer = self._peers.get(node_id)
                    usable[node_id] = peer is None or peer.breaker.allows_calls
            return [one is not None and usable[one[0].node_id] for one in found]

    def put(
        self, keys: bytes, records: Sequence[memoryview], *, chain_after: bytes | None = None
    ) -> list[bool]:
        """Store nothing."""
        return [False] * self._count_of(keys, records)

    def get(self, keys: bytes, into: Sequence[memoryview]) -> list[bool]:
        """Pull records from the peers that hold them. Blocks for at most some seconds a peer."""
        whole = [False] * self._count_of(keys, into)
        by_ticket: dict[Ticket, list[tuple[int, bytes]]] = {}
        with self._lock:
            for place, key in enumerate(each_key(keys)):
                if (found := self._by_key.get(key)) is not None:
                    by_ticket.setdefault(found[0], []).append((place, found[1]))
        for ticket, wanted in by_ticket.items():
            peer = self._peer(ticket)
            at = 0
            try:
                while at < len(wanted) and peer.breaker.allows_calls:
                    count = self._pull(ticket, peer, wanted[at:], into)
                    for place, _ in wanted[at : at + count]:
                        whole[place] = True
                    at += count
            except KvelasticError as error:
                self._failed(peer, error)
        hits = sum(whole)
        self._count(hits=hits, misses=len(whole) - hits, bytes_read=hits * self.record_bytes)
        return whole

    def _pull(
        self,
        ticket: Ticket,
        peer: _Peer,
        wanted: Sequence[tuple[int, bytes]],
        into: Sequence[memoryview],
    ) -> int:
        """Pull as many of the first records as the peer can stage at once; return how many."""
        most = min(MOST_KEYS, max(1, MOST_BYTES // self.record_bytes))
        asked = b"".join(key for _, key in wanted[:most])
        link = self._link(ticket, peer)
        ranks = 0 if self._split is None else self._split.ranks
        read = Read(ticket.ticket, self.identity, asked, ranks)
        reading = PROTOCOL.decode(link.ask(PROTOCOL.encode(read), ASK_S))
        if not isinstance(reading, Reading):
            raise MessageError(f"a {type(reading).__name__} is no reply to a Read")
        count = len(reading.addresses)
        if not 0 < count <= len(asked) // KEY_BYTES:
            raise InvalidArgumentError(f"the peer offers {count} records of those asked for")
        records = [into[place] for place, _ in wanted[:count]]
        found = self._moves(reading.ranks)
        sources = [(at + one.source, one.size_bytes) for at in reading.addresses for one in found]
        targets = [
            (at + one.target, one.size_bytes) for at in map(_address_of, records) for one in found
        ]
        link.pull(sources, targets, PULL_S, claim=reading.claim)
        if self._split is not None:
            for record in records:
                for one in replica_moves(self._split):
                    record[one.target :][: one.size_bytes] = record[one.source :][: one.size_bytes]
        peer.breaker.worked()
        self._problem = ""
        return count

    def _moves(self, ranks: int) -> Sequence[Move]:
        """Return the copies from a record of a peer with these ranks."""
        if self._split is None:
            return [Move(0, 0, self.record_bytes)]
        return moves(self._split.over(ranks), self._split)

    # --- links ----------------------------------------------------------------------------------

    def _peer(self, ticket: Ticket) -> _Peer:
        with self._lock:
            if ticket.node_id not in self._peers and len(self._peers) >= MOST_PEERS:
                del self._peers[next(iter(self._peers))]
            return self._peers.setdefault(ticket.node_id, _Peer())

    def _link(self, ticket: Ticket, peer: _Peer) -> Link:
        """Return the link to the peer. Links if there is none, for at most `LINK_S`."""
        with peer.linking:
            return self._node.link_with(ticket.node_id, ticket.address, LINK_S)

    def _failed(self, peer: _Peer, error: KvelasticError) -> None:
        if error.code not in _REFUSALS:
            self._count(errors=1)
            peer.breaker.failed(str(error))
        self._problem = str(error)
        _log.warning("blocks were not read from the prefill engine: %s: %s", error.code, error)

    # --- the rest of a store --------------------------------------------------------------------

    def erase(self, keys: bytes) -> int:
        """Erase nothing: the records belong to the peers."""
        self._count_of(keys)
        return 0

    def erase_matching(self, selection: Selection) -> int:
        """Erase nothing."""
        return 0

    def capacity(self) -> Capacity:
        """Return the number of records that requests expect. They use no memory here."""
        with self._lock:
            return Capacity(0, None, len(self._by_key))

    def set_limit(self, limit_bytes: int) -> None:
        """Raise `InvalidArgumentError`: peers hold the records."""
        raise InvalidArgumentError("the peer tier has no limit here: prefill engines hold it")

    def problem(self) -> str:
        """Return why the last peer could not be read; empty after a read that worked."""
        return self._problem

    def check_integrity(self) -> None:
        """Do nothing: an index of tickets cannot disagree with a medium."""

    def close(self) -> None:
        """Stop the thread for notices. Idempotent. The node belongs to the caller."""
        self._notices.close(0.0)


_REFUSALS: Final = frozenset({"NOT_REGISTERED", "UNSUPPORTED", "TRANSFER_BUSY"})
"""Codes of a peer that works and refuses one ticket."""


def _address_of(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
