"""Messages between clusters about caches.

    Find(key) --> Found(cache)                   the location and description of a cache
    Moved(cache, row, tensors) --> Noted         the sender has copied these: keys may be dropped
    Who --> Welcome(role)                        the first question over a link
    Join(group) --> Joined(is_there)             for a group whose members link with each other
    Refused(status, why)                         instead of any reply

`kvelastic.transfer` copies the bytes. A copy carries a *claim*: the cache that the peer intends to
access. The owner checks that the addresses still belong to that cache and holds it during the copy.
Every field is bounded; decoding raises `MessageError` for a value that does not fit its type.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from kvelastic.datadist.descriptors import (
    MAX_TENSORS,
    BlocksCacheKey,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    RowIndex,
)
from kvelastic.datadist.enums import DataType, Placement
from kvelastic.errors import MessageError

MAX_DEVICES: Final = 64

Uint64 = Annotated[int, Meta(ge=0)]
"""An unsigned integer; msgspec refuses integers over 64 bits."""
Text = Annotated[str, Meta(max_length=2048)]


class _Message(Struct, tag=True, forbid_unknown_fields=True, array_like=True):
    """Base of messages. The first field is the kind, which another version may not know."""


class ByRow(_Message):
    """A `CacheKey` without its cluster."""

    is_prefix: bool
    value: Uint64
    model_id: Uint64


class ById(_Message):
    """A `CacheKeyByIdAndIndex` without its cluster."""

    cache_id: Uint64
    row: Uint64


class ByModel(_Message):
    """A `BlocksCacheKey` without its cluster."""

    model_id: Uint64


class Find(_Message):
    """Asks for the cache of a key."""

    key: ByRow | ById | ByModel
    is_write: bool


class Moved(_Message):
    """Reports that these tensors of a row (first, count) were copied entirely."""

    cache_id: Uint64
    row: Uint64
    first_tensor: Annotated[int, Meta(ge=0, le=MAX_TENSORS)]
    tensors: Annotated[int, Meta(ge=0, le=MAX_TENSORS)]


class Who(_Message):
    """Asks for the peer's role."""


class Join(_Message):
    """Asks whether the peer is in the group of this token."""

    token: Annotated[str, Meta(max_length=64)]


class Cache(_Message, dict=True):
    """A cache found by a key: description, the key's row, and addresses in the owner's process.

    The row is 0 for a blocks cache. Addresses are by device, then by tensor.
    """

    cache_id: Uint64
    is_blocks: bool
    row: Uint64
    num_tensors: Annotated[int, Meta(ge=1, le=MAX_TENSORS)]
    shape: Annotated[list[Uint64], Meta(min_length=1, max_length=16)]
    data_type: Annotated[int, Meta(ge=0, le=255)]
    is_device: bool
    batch_dim_index: Annotated[int, Meta(ge=0, le=15)]
    addrs: Annotated[
        list[Annotated[list[Uint64], Meta(max_length=MAX_TENSORS)]],
        Meta(min_length=1, max_length=MAX_DEVICES),
    ]

    @cached_property
    def desc(self) -> CacheDesc:
        """The cache's description. Raises `TypeError` or `ValueError` if it is invalid."""
        return CacheDesc(
            self.num_tensors,
            self.shape,
            DataType(self.data_type),
            Placement.DEVICE if self.is_device else Placement.HOST,
            self.batch_dim_index,
        )


class Found(_Message):
    """Reply to `Find`."""

    cache: Cache


class Noted(_Message):
    """Reply to `Moved`."""


class Welcome(_Message):
    """Reply to `Who`: the cluster's role."""

    role: Annotated[int, Meta(ge=1, le=3)]


class Joined(_Message):
    """Reply to `Join`: whether the peer is in the group; false if not yet."""

    is_there: bool


class Refused(_Message):
    """Reply to a failed request: a status code and the reason."""

    status: int
    why: Text


Question = Find | Moved | Who | Join
Answer = Found | Noted | Welcome | Joined | Refused

_encoder: Final = msgspec.msgpack.Encoder()
_questions: Final = msgspec.msgpack.Decoder(Question)
_answers: Final = msgspec.msgpack.Decoder(Answer)


def encode(message: Question | Answer) -> bytes:
    """Return the bytes of a message."""
    return _encoder.encode(message)


def decode_question(body: bytes) -> Question:
    """Decode a peer's question. Raises `MessageError`."""
    with _as_message_error():
        message: Question = _questions.decode(body)
        return message


def decode_answer(body: bytes) -> Answer:
    """Decode a peer's reply. Raises `MessageError`."""
    with _as_message_error():
        message: Answer = _answers.decode(body)
        return message


@contextmanager
def _as_message_error() -> Iterator[None]:
    try:
        yield
    except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        raise MessageError(
            f"a peer message something that this version does not know: {error}"
        ) from None


# --- claims: of fixed size, because each copy carries one -----------------------------------------

_CLAIM: Final = struct.Struct("<cQ")
_OF_CACHE: Final = b"c"
_OF_ADDRESSES: Final = b"a"
CLAIM_OF_ADDRESSES: Final = _CLAIM.pack(_OF_ADDRESSES, 0)
"""Claim of a copy to raw addresses: they must be in any caches that peers can access."""


def claim_of(cache_id: int) -> bytes:
    """Return the claim of a copy from or to this cache."""
    return _CLAIM.pack(_OF_CACHE, cache_id)


def claimed_cache(claim: bytes) -> int | None:
    """Return the cache that a claim names; None for raw addresses. Raises `MessageError`."""
    if len(claim) != _CLAIM.size or claim[:1] not in {_OF_CACHE, _OF_ADDRESSES}:
        raise MessageError("a claim that this version does not know")
    kind, cache_id = _CLAIM.unpack(claim)
    return cache_id if kind == _OF_CACHE else None


# --- keys -----------------------------------------------------------------------------------------


def message_of_key(key: CacheKey | CacheKeyByIdAndIndex | BlocksCacheKey) -> ByRow | ById | ByModel:
    """Return a key as a message, without its cluster."""
    if isinstance(key, CacheKey):
        index = key.index
        return ByRow(index.kind == "prefix", index.value, index.model_id)
    if isinstance(key, CacheKeyByIdAndIndex):
        return ById(key.cache_id, key.batch_index)
    return ByModel(key.model_id)


def row_index(key: ByRow) -> RowIndex:
    """Return the lookup key of a row."""
    return RowIndex("prefix" if key.is_prefix else "request", key.value, key.model_id)
