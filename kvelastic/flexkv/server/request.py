"""The messages between clients and a server. `common.calls` has FlexKV's calls.

    client                         server
    RegisterDPClient        ->     Registered            one for each data-parallel client
    RegisterTPClient (+ fds) ->    Registered            one for each rank: its KV cache's memory
    Located (+ fds of a GPU) <-    Locate                where pages are, before each copy
    Unmapped                ->                           which of them the rank has unmapped
    Match, Launch           ->     Matched, Started
    Cancel, Reset           ->     Done
    Wait                    ->     Responses             now, or when the tasks have ended
    IsReady, Shutdown       ->     Ready, Done

A connection is its client: when it ends, the server releases what the client held.
"""

from __future__ import annotations

from typing import Annotated, Final

from kvelastic.flexkv.common.arguments import MOST_TASKS
from kvelastic.flexkv.common.calls import (
    Cancel,
    Count,
    Done,
    Launch,
    Match,
    Matched,
    Reset,
    Started,
    Wait,
    pack,
    unpack,
)
from kvelastic.flexkv.common.config import ModelConfig
from kvelastic.flexkv.common.memory_handle import MOST_AXES, TensorDescription
from kvelastic.flexkv.common.request import KVResponse
from kvelastic.flexkv.transfer.shared_blocks import DeviceSpan
from kvelastic.messages import Message, Meta, Protocol

__all__ = ["Cancel", "Done", "Launch", "Match", "Matched", "Reset", "Started", "Wait"]

MOST_TENSORS: Final = 4096
MOST_PAGES: Final = 1 << 16
_MOST_BYTES: Final = 16 << 20

_UNKNOWN: Final = ("tokens_per_block", 0)

ClientId = Annotated[int, Meta(ge=0, le=1 << 20)]
_Text = Annotated[str, Meta(max_length=64)]
Shape = Annotated[dict[_Text, Count | _Text], Meta(max_length=16)]


class RegisterDPClient(Message):
    """Registers this connection as that data-parallel client."""

    dp_client_id: ClientId
    shape: Shape


class AddMemory(Message):
    """Adds memories for the rank that registers next. Their descriptors come with the message."""

    is_elastic: bool
    """Pages are mapped and unmapped; the tensors' offsets are addresses in the rank."""


class Unmapped(Message):
    """Exported pages that the rank has unmapped: the server releases them."""

    pages: Annotated[list[Count], Meta(max_length=MOST_PAGES)]


class Locate(Message):
    """The server asks a rank where pages are, before each copy."""

    memory: Annotated[int, Meta(ge=0, le=MOST_TENSORS)]
    pages: Annotated[list[Count], Meta(max_length=MOST_PAGES)]
    """Of a GPU's range, or addresses in the rank in units of `process_mappings.PAGE_BYTES`."""
    generations: Annotated[list[int], Meta(max_length=MOST_PAGES)]
    """Of a GPU's pages as the server has them, or -1."""


class Located(Message):
    """For each page, its offset in the memory's file or `process_mappings.NOT_MAPPED`.

    Of a GPU, its generation, and descriptors of the first pages whose generation differs.
    """

    found: Annotated[list[int], Meta(max_length=MOST_PAGES)]


class RegisterTPClient(Message):
    """Registers this connection as that rank, with its tensors in the order of a record."""

    dp_client_id: ClientId
    tp_rank: ClientId
    is_device_id: bool
    """Whether `tp_rank` counts the ranks of every client of a machine."""
    tensors: Annotated[
        list[tuple[Count, TensorDescription]], Meta(min_length=1, max_length=MOST_TENSORS)
    ]
    """Each with the index of its memory among those that were received."""
    block_axis: Annotated[int, Meta(ge=0, lt=MOST_AXES)]
    span: DeviceSpan | None
    """The range of a GPU with the tensors; None if they are in the memories."""


class Registered(Message):
    """The reply to both registrations."""


class IsReady(Message):
    """Asks whether every rank of every data-parallel client has registered."""


class Ready(Message):
    """The reply to IsReady."""

    is_ready: bool


class Responses(Message):
    """The responses of the tasks in a Wait."""

    responses: Annotated[list[KVResponse], Meta(max_length=MOST_TASKS)]


class Shutdown(Message):
    """Ends the server for all clients. `Unregister` is for one client."""


class Unregister(Message):
    """Ends this client. The connection ends after the reply."""


PROTOCOL: Final = Protocol(
    "flexkv",
    version=4,
    messages=(
        *(RegisterDPClient, RegisterTPClient, AddMemory, Locate, Located, Unmapped),
        *(Registered, IsReady, Ready, Match, Matched, Launch, Started, Cancel, Wait),
        *(Responses, Reset, Shutdown, Unregister, Done),
    ),
    most_bytes=_MOST_BYTES,
    pack=pack,
    unpack=unpack,
)


def shape_of(model: ModelConfig, tokens_per_block: int) -> Shape:
    """Return the shape of a model's KV, which both sides compare.

    A client's `tokens_per_block` may be 0: unknown.
    """
    names = ("num_layers", "num_kv_heads", "head_size", "kv_dim", "tp_size", "dp_size")
    sizes = {name: getattr(model, name) for name in (*names, "instance_num")}
    return {**sizes, "dtype": model.dtype_name, "tokens_per_block": tokens_per_block}


def differences(client: Shape, server: Shape) -> str:
    """Return how a client's shape differs from the server's; empty if it can be served."""
    unlike = [
        f"{name}={client.get(name)} (here {server.get(name)})"
        for name in client | server
        if client.get(name) != server.get(name) and (name, client.get(name)) != _UNKNOWN
    ]
    return ", ".join(unlike)
