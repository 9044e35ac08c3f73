"""Messages between clusters about caches.

    Find(key) --> Cache                          the location and description of a cache
    Moved(cache, row, tensors) --> Told          the sender has copied these: keys may be dropped
    Who --> Told(role)                           the first question over a link
    Join(group) --> Told(is_there)               for a group whose members link with each other
    Refused(status, why)                         instead of any reply

`kvelastic.transfer` copies the bytes. A copy carries a *claim*: the cache that the peer intends to
access. The owner checks that the addresses still belong to that cache and holds it during the copy.
Every field is bounded; decoding raises `MessageError` for a value that does not fit its type.
"""

from __future__ import annotations

import struct
from typing import Annotated, Final, Literal

from msgspec import Meta

from kvelastic.datadist.descriptors import MAX_TENSORS, CacheDesc
from kvelastic.errors import MessageError
from kvelastic.messages import Message, Protocol

MAX_DEVICES: Final = 64

Uint64 = Annotated[int, Meta(ge=0)]
"""An unsigned integer; msgspec refuses integers over 64 bits."""


class Find(Message):
    """Asks for the cache of a key: the fields of its `Index`, and whether to write to the cache."""

    kind: Literal["request", "prefix", "row", "blocks"]
    value: Uint64
    detail: Uint64
    is_write: bool


class Moved(Message):
    """Reports that these tensors of a row (first, count) were copied entirely."""

    cache_id: Uint64
    row: Uint64
    first_tensor: Annotated[int, Meta(ge=0, le=MAX_TENSORS)]
    tensors: Annotated[int, Meta(ge=0, le=MAX_TENSORS)]


class Who(Message):
    """Asks for the peer's role."""


class Join(Message):
    """Asks whether the peer is in the group of this token."""

    token: Annotated[str, Meta(max_length=64)]


class Cache(Message):
    """Reply to `Find`: a cache, the key's row, and addresses in the owner's process.

    The row is 0 for a blocks cache. Addresses are by device, then by tensor.
    """

    cache_id: Uint64
    is_blocks: bool
    row: Uint64
    desc: CacheDesc
    addrs: Annotated[
        tuple[Annotated[tuple[Uint64, ...], Meta(max_length=MAX_TENSORS)], ...],
        Meta(min_length=1, max_length=MAX_DEVICES),
    ]

    def __post_init__(self) -> None:
        tensors = self.desc.num_tensors
        if self.row >= self.desc.batch_size or any(len(one) != tensors for one in self.addrs):
            raise ValueError("a cache without the row, or without all of its addresses")


class Told(Message):
    """Reply to the other questions: the cluster's role, or whether it is in the group yet."""

    number: Annotated[int, Meta(ge=0, le=3)]


class Refused(Message):
    """Reply to a failed request: a status code and the reason."""

    status: int
    why: Annotated[str, Meta(max_length=2048)]


PROTOCOL: Final = Protocol(
    "caches", version=2, messages=(Find, Moved, Who, Join, Cache, Told, Refused)
)


# --- claims: of fixed size, because each copy carries one -----------------------------------------

_CLAIM: Final = struct.Struct("<Q")
_ANY: Final = (1 << 64) - 1


def claim_of(cache_id: int | None) -> bytes:
    """Return the claim of a copy from or to this cache; None: to raw addresses in any caches."""
    return _CLAIM.pack(_ANY if cache_id is None else cache_id)


def claimed_cache(claim: bytes) -> int | None:
    """Return the cache that a claim names; None for raw addresses. Raises `MessageError`."""
    if len(claim) != _CLAIM.size:
        raise MessageError("a claim that this version does not know")
    (cache_id,) = _CLAIM.unpack(claim)
    return None if cache_id == _ANY else int(cache_id)
