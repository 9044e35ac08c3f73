"""What nodes say to each other."""

from __future__ import annotations

from typing import Annotated, Final

from kvelastic.messages import Message, Meta, Protocol
from kvelastic.transfer.pieces import MOST_PIECES, PIECE_BYTES

MOST_BODY_BYTES: Final = 512 << 10
TOKEN_BYTES: Final = 32
MOST_TIMEOUT_MS: Final = 3_600_000

Number = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Body = Annotated[bytes, Meta(max_length=MOST_BODY_BYTES)]
Claim = Annotated[bytes, Meta(max_length=256)]
Pieces = Annotated[bytes, Meta(max_length=MOST_PIECES * PIECE_BYTES)]
Milliseconds = Annotated[int, Meta(ge=0, le=MOST_TIMEOUT_MS)]


class Hello(Message):
    """The first message of who has connected; the reply is one, too."""

    node_id: int
    """MessagePack has 64 bits for it; that it is none below 0 the node looks at."""
    start: Annotated[bytes, Meta(min_length=16, max_length=16)]
    """Random: a node that was started anew is another one."""
    data_port: Annotated[int, Meta(ge=0, le=65535)] = 0
    """Where the sender takes data streams; 0: nowhere."""


class Ask(Message):
    """Something between the nodes' users."""

    body: Body


class Told(Message):
    """The reply."""

    body: Body


class Begin(Message):
    """Hold these pieces for me."""

    pieces: Pieces
    claim: Claim
    timeout_ms: Milliseconds


class Begun(Message):
    """They are held under this lease."""

    lease: Number


class Settle(Message):
    """I am done with a lease."""

    lease: Number


class Settled(Message):
    """Whether it held all the time; and the checksum of what was sent under it."""

    is_whole: bool
    checksum: int | None = None


class Send(Message):
    """Send what the lease holds over the stream of this token, or the descriptor beside it."""

    lease: Number
    token: Annotated[bytes, Meta(max_length=TOKEN_BYTES)]
    timeout_ms: Milliseconds


class Push(Message):
    """Read these pieces of mine, which I hold under the lease, into those of yours."""

    lease: Number
    sources: Pieces
    targets: Pieces
    claim: Claim
    timeout_ms: Milliseconds


class Unlink(Message):
    """The link ends on both sides."""


class Done(Message):
    """The reply where there is nothing to say; also to a check of the link."""


class Check(Message):
    """Are you there?"""


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
