"""Messages between nodes, and the pieces of memory in them.

Pieces are *packed*: pairs of address and size, little-endian. Native code packs and reads them.
"""

from __future__ import annotations

from typing import Annotated, Final

from kvelastic.messages import Message, Meta, Protocol

Piece = tuple[int, int]
"""An address and a size in bytes."""

MOST_PIECES: Final = 16384
"""Maximum pieces per lease; a larger copy uses several leases."""
MOST_BYTES: Final = 64 << 20
"""Maximum bytes per lease, so that a copy finishes long before the lease expires."""
_PIECE_BYTES: Final = 16

MOST_BODY_BYTES: Final = 512 << 10
TOKEN_BYTES: Final = 32
MOST_TIMEOUT_MS: Final = 3_600_000

Number = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Body = Annotated[bytes, Meta(max_length=MOST_BODY_BYTES)]
Claim = Annotated[bytes, Meta(max_length=256)]
Pieces = Annotated[bytes, Meta(max_length=MOST_PIECES * _PIECE_BYTES)]
Milliseconds = Annotated[int, Meta(ge=0, le=MOST_TIMEOUT_MS)]


class Hello(Message):
    """The first message of the connecting node, and the reply to it."""

    node_id: int
    """At most 64 bits, by MessagePack. The node refuses negative ids."""
    start: Annotated[bytes, Meta(min_length=16, max_length=16)]
    """Random bytes that identify a start of the node; a restarted node has others."""
    data_port: Annotated[int, Meta(ge=0, le=65535)] = 0
    """The sender's port for data streams; 0 if none."""


class Ask(Message):
    """A question between the nodes' users."""

    body: Body


class Told(Message):
    """The reply to `Ask`."""

    body: Body


class Begin(Message):
    """Requests a hold of `pieces`."""

    pieces: Pieces
    claim: Claim
    timeout_ms: Milliseconds


class Begun(Message):
    """The reply to `Begin`: the pieces are held under this lease."""

    lease: Number


class Settle(Message):
    """The sender has finished with a lease."""

    lease: Number


class Settled(Message):
    """The reply to `Settle`: whether the lease held all the time, and the checksum, if sent."""

    is_whole: bool
    checksum: int | None = None


class Send(Message):
    """Requests the bytes under a lease, over the token's stream or the passed descriptor."""

    lease: Number
    token: Annotated[bytes, Meta(max_length=TOKEN_BYTES)]
    timeout_ms: Milliseconds


class Push(Message):
    """Requests that the receiver reads `sources`, held under the lease, into its `targets`."""

    lease: Number
    sources: Pieces
    targets: Pieces
    claim: Claim
    timeout_ms: Milliseconds


class Unlink(Message):
    """Ends the link on both sides."""


class Done(Message):
    """An empty reply; also the reply to `Check`."""


class Check(Message):
    """Checks that the peer is alive."""


PROTOCOL: Final = Protocol(
    "kvelastic transfer",
    version=2,  # 1: checksums over runs of 1 MiB
    messages=(
        Hello,
        Ask,
        Told,
        Begin,
        Begun,
        Settle,
        Settled,
        Send,
        Push,
        Unlink,
        Done,
        Check,
    ),
)
