"""The bytes of a link board: what a node says of its links, and what operators ask of it.

Where cells lie and what seals them is in `board_layout`. In a cell stand its number, the size of
its body, and the body as MessagePack, which msgspec reads into the types below and refuses where a
value is not of them. `unpack_*` answers None for what no writer of ours writes.
"""

from __future__ import annotations

import struct
from typing import Annotated, Final, Literal, TypeVar

import msgspec
from msgspec import Meta

from kvelastic.board_layout import CELL_BYTES, MOST_REVISION, BoardLayout

MOST_LINKS: Final = 512
MOST_ENDED: Final = 16
MOST_TEXT: Final = 64
"""Characters of a text."""
MOST_ADDRESS: Final = 128
_NUMBER: Final = struct.Struct("<QI")
_SUM_BYTES: Final = 4

LAYOUT: Final = BoardLayout("link board", b"KVLINKS\0", version=1, snapshot_bytes=192 << 10)

Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Id = Annotated[int, Meta(ge=0)]
"""Of a node; of msgspec, integers are of 64 bits: what is larger is refused."""
Way = Literal["memory", "unix stream", "tcp"]
Text = Annotated[str, Meta(max_length=MOST_TEXT)]


class _Shown(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    pass


class LinkFigures(_Shown, frozen=True):
    """One link, as its node sees it. Counts are since it was made."""

    number: Count
    """Of the links of this node, in the order in which they were made; what a request names."""
    peer_id: Id
    peer: Text
    """The peer's process on this host, or its address."""
    side: Literal["client", "server"]
    """client: this node has made the link."""
    way: Way
    """How bytes travel here: read by the kernel, or over streams."""
    state: Literal["linked", "ended"]
    reason: Text
    """Why it has ended: "unlinked", "cut" (by an operator), or a code of kvelastic/errors.py."""
    since_realtime_ns: Count
    """When it was made."""
    pulled_bytes: Count
    """That this node has read from the peer."""
    pushed_bytes: Count
    """That this node has had the peer take."""
    peer_pulled_bytes: Count
    """That the peer has read from here."""
    peer_pushed_bytes: Count
    """That the peer has had this node take."""
    leases: Count
    """That the peer has now: copies that it makes of memory here."""
    retries: Count
    """Copies that lost a race and were made again."""
    failures: Count
    """Copies of this node's that failed."""

    @property
    def in_bytes(self) -> int:
        """All that came here over it."""
        return self.pulled_bytes + self.peer_pushed_bytes

    @property
    def out_bytes(self) -> int:
        """All that left over it."""
        return self.pushed_bytes + self.peer_pulled_bytes


class NodeFigures(_Shown, frozen=True):
    """A node, and its links: those that stand, and the last ones that have ended."""

    node_id: Id
    pid: Count
    role: Text
    """What it is to its users; "" where they have not said."""
    addresses: Annotated[
        tuple[Annotated[str, Meta(max_length=MOST_ADDRESS)], ...], Meta(max_length=8)
    ]
    """Where it listens."""
    data_port: Annotated[int, Meta(ge=0, le=65535)]
    """Where it takes data streams; 0: nowhere."""
    published_realtime_ns: Count
    started_realtime_ns: Count
    answered_revision: Count
    """Of the last request that was answered."""
    ranges: Count
    """That peers may reach."""
    registered_bytes: Count
    leases: Count
    """In force."""
    leases_expired: Count
    """Ended by their time, as a peer was late."""
    copies_lost: Count
    """By peers, of memory that was not the same all the time."""
    strangers_refused: Count
    """Who did not get in."""
    links: Annotated[tuple[LinkFigures, ...], Meta(max_length=MOST_LINKS + MOST_ENDED)]


class LinkRequest(_Shown, frozen=True):
    """What an operator asks."""

    kind: Literal["cut"]
    link: Count
    """Its number."""
    peer_id: Id


class LinkAnswer(_Shown, frozen=True):
    """What the node says to a request."""

    revision: Count
    state: Literal["done", "refused"]
    reason: Annotated[str, Meta(max_length=200)] = ""


_S = TypeVar("_S", bound=_Shown)
_encoder: Final = msgspec.msgpack.Encoder()
_snapshots: Final = msgspec.msgpack.Decoder(NodeFigures)
_requests: Final = msgspec.msgpack.Decoder(LinkRequest)
_answers: Final = msgspec.msgpack.Decoder(LinkAnswer)


def text_of(text: object, most: int = MOST_TEXT) -> str:
    """A text as it may stand on a board: printable, and cut to its bound."""
    return "".join(one if one.isprintable() else "?" for one in str(text)[:most])


def pack_snapshot(number: int, node: NodeFigures) -> bytes:
    """One snapshot; the newer one has the higher number."""
    return _packed(b"snapshot", number, node, LAYOUT.snapshot_bytes)


def unpack_snapshot(raw: bytes) -> tuple[int, NodeFigures] | None:
    """Its number and what it says; None: it is not whole."""
    return _unpacked(b"snapshot", raw, LAYOUT.snapshot_bytes, _snapshots)


def pack_request(revision: int, request: LinkRequest) -> bytes:
    """The cell of a request."""
    return _packed(b"request", revision, request, CELL_BYTES)


def unpack_request(raw: bytes) -> tuple[int, LinkRequest] | None:
    """Its revision and what it asks; None: it is not whole."""
    found = _unpacked(b"request", raw, CELL_BYTES, _requests)
    return found if found is not None and 0 < found[0] < MOST_REVISION else None


def pack_answer(answer: LinkAnswer) -> bytes:
    """The cell of an answer."""
    return _packed(b"answer", answer.revision, answer, CELL_BYTES)


def unpack_answer(raw: bytes) -> LinkAnswer | None:
    """What was answered; None: it is not whole."""
    found = _unpacked(b"answer", raw, CELL_BYTES, _answers)
    return None if found is None or found[0] != found[1].revision else found[1]


def _packed(what: bytes, number: int, value: _Shown, size: int) -> bytes:
    body = _encoder.encode(value)
    return LAYOUT.sealed(what, _NUMBER.pack(number, len(body)) + body, size)


def _unpacked(
    what: bytes, raw: bytes, size: int, decoder: msgspec.msgpack.Decoder[_S]
) -> tuple[int, _S] | None:
    cell = LAYOUT.opened(what, raw, size)
    if cell is None:
        return None
    number, length = _NUMBER.unpack_from(cell)
    if length > size - _SUM_BYTES - _NUMBER.size:
        return None
    try:
        return number, decoder.decode(memoryview(cell)[_NUMBER.size : _NUMBER.size + length])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
