"""What clusters ask one another about caches, over links: messages of LLM-DataDist's interface.

    Find(key) --> Found(cache)                   where a cache lies, and what it is
    Moved(cache, row, tensors) --> Noted         these were had: the row's keys may go
    Who --> Welcome(role)                        a link's first question
    Join(group) --> Joined(is_there)             of a group whose members link with one another
    Refused(status, why)                         in place of an answer

Bytes are `kvelastic.transfer`'s. A copy comes with a *claim*: the cache that the copier means. Its
owner looks whether the addresses are still that cache's, and keeps it while the copy takes. Every
field is bounded, and what does not fit its type is refused: `decode` raises `MessageError`.
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
"""Of msgspec, integers are of 64 bits: what is larger is refused."""
Text = Annotated[str, Meta(max_length=2048)]


class _Said(Struct, tag=True, forbid_unknown_fields=True, array_like=True):
    """A message; the first field is its kind, which a peer of another version does not know."""


class ByRow(_Said):
    """A `CacheKey`."""

    is_prefix: bool
    value: Uint64
    model_id: Uint64


class ById(_Said):
    """A `CacheKeyByIdAndIndex`."""

    cache_id: Uint64
    row: Uint64


class ByModel(_Said):
    """A `BlocksCacheKey`."""

    model_id: Uint64


class Find(_Said):
    """Where is the cache of a key?"""

    key: ByRow | ById | ByModel
    is_write: bool


class Moved(_Said):
    """These tensors of a row (first, count) were had as a whole."""

    cache_id: Uint64
    row: Uint64
    first_tensor: Annotated[int, Meta(ge=0, le=MAX_TENSORS)]
    tensors: Annotated[int, Meta(ge=0, le=MAX_TENSORS)]


class Who(_Said):
    """Who is there?"""


class Join(_Said):
    """Are you in the group of this token?"""

    token: Annotated[str, Meta(max_length=64)]


class Cache(_Said, dict=True):
    """A cache as a key led to it: its description, the key's row, and its addresses in its process.

    The row is 0 for a blocks cache; addresses are of each device, of each tensor.
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
        """Its description. Raises `TypeError`, `ValueError` where it is none."""
        return CacheDesc(
            self.num_tensors,
            self.shape,
            DataType(self.data_type),
            Placement.DEVICE if self.is_device else Placement.HOST,
            self.batch_dim_index,
        )


class Found(_Said):
    """A cache."""

    cache: Cache


class Noted(_Said):
    """It was noted."""


class Welcome(_Said):
    """The cluster's role."""

    role: Annotated[int, Meta(ge=1, le=3)]


class Joined(_Said):
    """Whether it is; not yet is no."""

    is_there: bool


class Refused(_Said):
    """A status code, and why."""

    status: int
    why: Text


Question = Find | Moved | Who | Join
Answer = Found | Noted | Welcome | Joined | Refused

_encoder: Final = msgspec.msgpack.Encoder()
_questions: Final = msgspec.msgpack.Decoder(Question)
_answers: Final = msgspec.msgpack.Decoder(Answer)


def encode(said: Question | Answer) -> bytes:
    """The bytes of a message."""
    return _encoder.encode(said)


def decode_question(body: bytes) -> Question:
    """What a peer asks. Raises `MessageError`."""
    with _as_message_error():
        said: Question = _questions.decode(body)
        return said


def decode_answer(body: bytes) -> Answer:
    """What a peer answers. Raises `MessageError`."""
    with _as_message_error():
        said: Answer = _answers.decode(body)
        return said


@contextmanager
def _as_message_error() -> Iterator[None]:
    try:
        yield
    except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        raise MessageError(
            f"a peer said something that this version does not know: {error}"
        ) from None


# --- claims: fixed records, for each comes with every copy ----------------------------------------

_CLAIM: Final = struct.Struct("<cQ")
_OF_CACHE: Final = b"c"
_OF_ADDRESSES: Final = b"a"
CLAIM_OF_ADDRESSES: Final = _CLAIM.pack(_OF_ADDRESSES, 0)
"""Of a copy to raw addresses: they lie in caches that peers reach, whichever."""


def claim_of(cache_id: int) -> bytes:
    """Of a copy from or to this cache."""
    return _CLAIM.pack(_OF_CACHE, cache_id)


def claimed_cache(claim: bytes) -> int | None:
    """The cache that a claim names; None: raw addresses. Raises `MessageError`."""
    if len(claim) != _CLAIM.size or claim[:1] not in {_OF_CACHE, _OF_ADDRESSES}:
        raise MessageError("a claim that this version does not know")
    kind, cache_id = _CLAIM.unpack(claim)
    return cache_id if kind == _OF_CACHE else None


# --- keys -----------------------------------------------------------------------------------------


def key_said(key: CacheKey | CacheKeyByIdAndIndex | BlocksCacheKey) -> ByRow | ById | ByModel:
    """A key as it travels, without the cluster that is asked."""
    if isinstance(key, CacheKey):
        index = key.index
        return ByRow(index.kind == "prefix", index.value, index.model_id)
    if isinstance(key, CacheKeyByIdAndIndex):
        return ById(key.cache_id, key.batch_index)
    return ByModel(key.model_id)


def row_index(key: ByRow) -> RowIndex:
    """What a row's key is looked up by."""
    return RowIndex("prefix" if key.is_prefix else "request", key.value, key.model_id)
