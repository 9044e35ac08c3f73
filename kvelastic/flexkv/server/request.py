"""What clients and the server say to each other: every message, each field with its bound.

    client                         server
    RegisterDPClient        ->     Registered            one for each data-parallel client
    RegisterTPClient (+ fds) ->    Registered            one for each rank: its KV cache's memory
    Located                 <-     Locate                where pages of elastic memory lie now
    Done (+ fds)            <-     Export                a GPU's pages, for one copy
    Match, Move, Prefetch   ->     Matched, Started
    Launch, Cancel, Reset   ->     Started, Done
    Wait                    ->     Responses             now, or when it is over
    IsReady, Shutdown       ->     Ready, Done

A connection is its client: what a client holds is given back when its connection ends.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import numpy as np
from msgspec import structs

from kvelastic.errors import InvalidArgumentError
from kvelastic.flexkv.common.arguments import (
    MOST_NAME_CHARACTERS,
    MOST_NAMES,
    MOST_TASKS,
    MOST_TOKENS,
    request_tokens,
)
from kvelastic.flexkv.common.config import ModelConfig
from kvelastic.flexkv.common.memory_handle import MOST_AXES, TensorDescription
from kvelastic.flexkv.common.request import KVResponse, KVResponseStatus
from kvelastic.messages import Message, Meta, Protocol

MOST_TENSORS: Final = 4096
MOST_PAGES: Final = 1 << 16
_MOST_BYTES: Final = 16 << 20

Count = Annotated[int, Meta(ge=0, le=1 << 62)]
ClientId = Annotated[int, Meta(ge=0, le=1 << 20)]
TaskIds = Annotated[list[int], Meta(max_length=MOST_TASKS)]
Name = Annotated[str, Meta(max_length=MOST_NAME_CHARACTERS)]
Tokens = Annotated[bytes, Meta(max_length=1 + 8 * MOST_TOKENS)]
"""A byte that says 4 or 8, and little-endian integers of so many bytes."""
Bits = Annotated[bytes, Meta(max_length=MOST_TOKENS // 8)]
Namespace = Annotated[list[Name], Meta(max_length=MOST_NAMES)]
Axes = Annotated[list[Count], Meta(min_length=1, max_length=MOST_AXES)]


class Shape(Message):
    """A model's KV: both sides must have the same."""

    num_layers: Count
    num_kv_heads: Count
    head_size: Count
    kv_dim: Count
    dtype: Annotated[str, Meta(max_length=64)]
    tp_size: Count
    dp_size: Count
    instance_num: Count
    tokens_per_block: Count
    """0: the client does not say."""

    def is_served_by(self, server: Shape) -> bool:
        """Whether a client of this shape is one of that server's."""
        own = self.tokens_per_block or server.tokens_per_block
        return structs.replace(self, tokens_per_block=own) == server


class RegisterDPClient(Message):
    """This connection is that data-parallel client."""

    dp_client_id: ClientId
    shape: Shape


class Tensor(Message):
    """A tensor in one of the memories whose descriptors have come."""

    memory: Annotated[int, Meta(ge=0, le=MOST_TENSORS)]
    offset: Count
    shape: Axes
    strides_bytes: Axes
    dtype: Annotated[str, Meta(max_length=64)]
    item_bytes: Annotated[int, Meta(ge=1, le=64)]
    block_axis: Annotated[int, Meta(ge=0, lt=MOST_AXES)]


class AddMemory(Message):
    """Descriptors beside it are further memories of the rank that registers next."""

    is_elastic: bool
    """Pages come and go behind the tensors, whose offsets are the rank's own addresses."""


class AddDevice(Message):
    """The tensors of the rank that registers next lie in this range of a GPU."""

    device: Annotated[str, Meta(min_length=1, max_length=64)]
    page_bytes: Annotated[int, Meta(ge=1 << 16, le=1 << 40)]
    pages: Annotated[int, Meta(ge=1, le=1 << 24)]


class Export(Message):
    """The server asks a rank for descriptors of pages, which come beside the answer (`Done`)."""

    pages: Annotated[list[Count], Meta(max_length=16)]


class Locate(Message):
    """The server asks a rank where in an elastic memory's file its pages lie now."""

    memory: Annotated[int, Meta(ge=0, le=MOST_TENSORS)]
    pages: Annotated[list[Count], Meta(max_length=MOST_PAGES)]
    """Addresses in the rank, in units of `process_mappings.PAGE_BYTES`."""


class Located(Message):
    """For each page its offset, or `process_mappings.NOT_MAPPED`."""

    offsets: Annotated[list[int], Meta(max_length=MOST_PAGES)]


class RegisterTPClient(Message):
    """This connection is that rank, and these are its tensors, in the order of a record."""

    dp_client_id: ClientId
    tp_rank: ClientId
    is_device_id: bool
    """`tp_rank` counts the ranks of all clients of a machine."""
    tensors: Annotated[list[Tensor], Meta(min_length=1, max_length=MOST_TENSORS)]


class Registered(Message):
    """It is."""


class IsReady(Message):
    """Whether every rank of every data-parallel client has registered."""


class Ready(Message):
    """Whether it is so."""

    is_ready: bool


class Match(Message):
    """get_match and put_match; with `slots` get_async and put_async, which launch at once."""

    kind: Literal["get", "put"]
    tokens: Tokens
    mask: Bits | None
    """A bit for each token, the first one in the highest bit."""
    namespace: Namespace | None
    layer_granularity: int
    slots: Tokens | None
    cpu_only: bool = False


class Prefetch(Message):
    """prefetch_async."""

    tokens: Tokens
    namespace: Namespace | None


class Matched(Message):
    """A task, and the one span of the tokens that its mask is True for."""

    task_id: int
    count: Count
    start: Count
    stop: Count


class Launch(Message):
    """launch: a task, and its slots, for each."""

    task_ids: TaskIds
    slots: Annotated[list[Tokens], Meta(max_length=MOST_TASKS)]
    as_batch: bool


class Started(Message):
    """What can be waited for."""

    task_ids: TaskIds


class Cancel(Message):
    """cancel."""

    task_ids: TaskIds


class Wait(Message):
    """wait and, with no time, try_wait."""

    task_ids: TaskIds
    timeout_s: Annotated[float, Meta(ge=0, le=1e9)] | None
    """None: try_wait."""
    completely: bool


class Mask(Message):
    """A mask of so many tokens."""

    count: Annotated[int, Meta(ge=0, le=MOST_TOKENS)]
    bits: Bits


class TaskResponse(Message):
    """A KVResponse."""

    task_id: int
    status: Annotated[str, Meta(max_length=32)]
    mask: Mask | None
    batch: Annotated[list[Mask | None], Meta(max_length=MOST_TASKS)]
    """Of tasks that were launched as one: each one's."""


class Responses(Message):
    """Of the tasks that were waited for."""

    responses: Annotated[list[TaskResponse], Meta(max_length=MOST_TASKS)]


class Reset(Message):
    """reset: all tiers forget everything."""


class Shutdown(Message):
    """The server ends, whoever else is there. `Unregister` is for one client."""


class Unregister(Message):
    """This client goes; the connection ends after the answer."""


class Done(Message):
    """It has been done."""


PROTOCOL: Final = Protocol(
    "flexkv",
    version=1,
    messages=(
        RegisterDPClient,
        AddMemory,
        AddDevice,
        Export,
        Locate,
        Located,
        RegisterTPClient,
        Registered,
        IsReady,
        Ready,
        Match,
        Prefetch,
        Matched,
        Launch,
        Started,
        Cancel,
        Wait,
        Responses,
        Reset,
        Shutdown,
        Unregister,
        Done,
    ),
    most_bytes=_MOST_BYTES,
)


def shape_of(model: ModelConfig, tokens_per_block: int) -> Shape:
    """What both sides compare."""
    return Shape(
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_size=model.head_size,
        kv_dim=model.kv_dim,
        dtype=model.dtype_name,
        tp_size=model.tp_size,
        dp_size=model.dp_size,
        instance_num=model.instance_num,
        tokens_per_block=tokens_per_block,
    )


def tensor_message(description: TensorDescription, memory: int, block_axis: int) -> Tensor:
    """A tensor's description on its way."""
    return Tensor(
        memory=memory,
        offset=description.offset,
        shape=list(description.shape),
        strides_bytes=list(description.strides_bytes),
        dtype=description.dtype,
        item_bytes=description.item_bytes,
        block_axis=block_axis,
    )


def description_of(tensor: Tensor) -> TensorDescription:
    """The other way round; nothing of it is checked but its bounds."""
    return TensorDescription(
        tensor.offset,
        tuple(tensor.shape),
        tuple(tensor.strides_bytes),
        tensor.dtype,
        tensor.item_bytes,
    )


def pack_integers(values: Any) -> bytes:
    """Tokens or slots: one axis of integers, NumPy's or torch's.

    Raises `InvalidArgumentError` for anything else, and for more than `MOST_TOKENS`.
    """
    array = request_tokens(values)
    if array.size and array.min() >= -(1 << 31) and array.max() < 1 << 31:
        return b"\4" + array.astype("<i4").tobytes()
    return b"\x08" + array.astype("<i8").tobytes()


def unpack_integers(packed: bytes) -> np.ndarray[Any, np.dtype[np.int64]]:
    """What `pack_integers` made. Raises `InvalidArgumentError` for anything else."""
    width = packed[0] if packed else 0
    if width not in (4, 8) or (len(packed) - 1) % width:
        raise InvalidArgumentError("these bytes are no array of integers")
    return np.frombuffer(packed, f"<i{width}", offset=1).astype(np.int64)


def pack_mask(mask: np.ndarray[Any, np.dtype[np.bool_]] | None) -> bytes | None:
    """A mask of tokens, as bits."""
    return None if mask is None else np.packbits(mask).tobytes()


def unpack_mask(packed: bytes, count: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """What `pack_mask` made of so many tokens. Raises `InvalidArgumentError` for another number."""
    if len(packed) != -(-count // 8):
        raise InvalidArgumentError(f"a mask of {len(packed)} bytes is not one of {count} tokens")
    bits = np.frombuffer(packed, np.uint8)
    return np.unpackbits(bits, count=count).astype(np.bool_)


def span_of(mask: np.ndarray[Any, np.dtype[np.bool_]]) -> tuple[int, int]:
    """From where to where a mask is True that is so on one run, or nowhere."""
    found = np.flatnonzero(mask)
    return (int(found[0]), int(found[-1]) + 1) if found.size else (0, 0)


def mask_of(matched: Matched) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """The other way round."""
    mask = np.zeros(matched.count, np.bool_)
    mask[matched.start : matched.stop] = True
    return mask


def response_message(task_id: int, response: KVResponse) -> TaskResponse:
    """A KVResponse on its way."""
    return TaskResponse(
        task_id=task_id,
        status=response.status.value,
        mask=_packed(response.return_mask),
        batch=[_packed(one) for one in response.return_masks],
    )


def response_of(message: TaskResponse) -> KVResponse:
    """The other way round. Raises `InvalidArgumentError` for an unknown status, or a short mask."""
    try:
        status = KVResponseStatus(message.status)
    except ValueError:
        raise InvalidArgumentError(f"{message.status!r} is no status of a response") from None
    batch = tuple(_unpacked(one) for one in message.batch)
    return KVResponse(status, message.task_id, _unpacked(message.mask), batch)


def _packed(mask: Any) -> Mask | None:
    bits = pack_mask(mask)
    return None if bits is None else Mask(count=len(mask), bits=bits)


def _unpacked(mask: Mask | None) -> np.ndarray[Any, np.dtype[np.bool_]] | None:
    return None if mask is None else unpack_mask(mask.bits, mask.count)
