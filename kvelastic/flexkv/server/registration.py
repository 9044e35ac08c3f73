"""Ranks that register their memory, in a server or in the process of a KVManager.

A registration lasts as long as the rank's connection; then the memory is released. The state
belongs to the thread of the calling endpoint.
"""

from __future__ import annotations

import logging
import os
import select
import stat
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Final

from kvelastic.errors import (
    ChannelClosedError,
    EngineError,
    IntegrityError,
    InvalidArgumentError,
    KvelasticError,
    MessageError,
)
from kvelastic.flexkv.common.memory_handle import MOST_BYTES, Buffer
from kvelastic.flexkv.kvtask import KVTaskEngine
from kvelastic.flexkv.server import request as messages
from kvelastic.flexkv.server.utils import socket_address
from kvelastic.flexkv.transfer.shared_blocks import DeviceBlocks, ForeignBlocks, SharedBlocks
from kvelastic.messages import Connection, Endpoint, Request

_log = logging.getLogger("kvelastic.flexkv")
_MOST_MEMORIES: Final = 512
_MOST_REFUSED: Final = 64
_LOCATE_S: Final = 10.0

Rank = tuple[int, int]
"""(data-parallel client, index in its tensor-parallel group)"""


class Registrations:
    """The registered ranks of the data-parallel clients."""

    def __init__(self, engine: KVTaskEngine) -> None:
        """`engine` copies the ranks' blocks."""
        self._engine = engine
        self._ranks: dict[Rank, tuple[Connection, ForeignBlocks]] = {}
        self._memories: dict[Connection, list[tuple[int, bool]]] = {}
        self._refused: dict[Rank, str] = {}
        """Reasons of refusal by missing rank, the oldest first.

        Empty once all ranks are registered.
        """

    def listen(self, gpu_register_port: str) -> Endpoint:
        """Open an endpoint for ranks only. Raises `ChannelError` if the address is in use."""
        return Endpoint(
            messages.PROTOCOL,
            self._receive_from_ranks,
            listen=[socket_address(gpu_register_port)],
            on_close=self.connection_ended,
            name="flexkv-ranks",
        )

    def _receive_from_ranks(self, request: Request) -> None:
        if not self.receive(request):
            raise MessageError("this engine has no server: only its ranks register here")

    def receive(self, request: Request) -> bool:
        """Handle a rank's message. Returns False for other messages.

        Raises `InvalidArgumentError` for a rank of another model. A rank that is registered already
        is refused, unless its process has ended.
        """
        message, connection = request.message, request.connection
        if isinstance(message, messages.AddMemory):
            kept = self._memories.setdefault(connection, [])
            kept += [(fd, message.is_elastic) for fd in request.take_descriptors()]
            if len(kept) > _MOST_MEMORIES:
                error = MessageError(f"a rank has handed over more than {_MOST_MEMORIES} memories")
                self.connection_ended(connection)
                connection.end(error)
                raise error
        elif isinstance(message, messages.Unmapped):
            for own, blocks in self._ranks.values():
                if own is connection and isinstance(blocks, DeviceBlocks):
                    blocks.release_unmapped(message.pages)
        elif isinstance(message, messages.RegisterTPClient):
            self._register(connection, message)
            request.answer(messages.Registered())
        else:
            return False
        return True

    def __len__(self) -> int:
        """The number of registered ranks."""
        return len(self._ranks)

    def is_ready(self) -> bool:
        """Whether every rank of every client has registered.

        Raises `EngineError` with the reason if a missing rank was refused. A refused rank does not
        retry, but another process can register as that rank.
        """
        if self._engine.is_ready():
            return True
        for (client, rank), reason in self._refused.items():
            raise EngineError(
                f"rank {rank} of client {client} was refused: {reason}. Start that rank again"
            )
        return False

    def _register(self, connection: Connection, message: messages.RegisterTPClient) -> None:
        named = message.dp_client_id, message.tp_rank
        try:
            self._take(connection, message)
        except KvelasticError as error:
            if not self._engine.is_ready():
                self._refused[named] = str(error)
                while len(self._refused) > _MOST_REFUSED:
                    del self._refused[next(iter(self._refused))]
            raise
        self._refused.pop(named, None)
        if self._engine.is_ready():
            self._refused.clear()

    def _take(self, connection: Connection, message: messages.RegisterTPClient) -> None:
        rank = self._rank_of(message)
        if rank in self._ranks:
            other = self._ranks[rank][0]
            if not has_gone(other):
                raise InvalidArgumentError(
                    f"rank {rank[1]} of client {rank[0]} is {other.peer} already; give each rank"
                    " its own device_id"
                )
            self.connection_ended(other)
        if any(own is connection for own, _ in self._ranks.values()):
            raise InvalidArgumentError("this connection is a rank already")
        blocks = self._blocks_of(connection, message)
        try:
            self._engine.transfer_engine.gpu_worker.register(*rank, blocks)
        except BaseException:
            blocks.close()
            raise
        self._ranks[rank] = (connection, blocks)
        _log.info(
            "Rank %d of client %d has registered %d blocks of %d bytes.",
            rank[1],
            rank[0],
            blocks.blocks,
            blocks.record_bytes,
        )

    def connection_ended(self, connection: Connection) -> None:
        """Release what was registered over a connection. Idempotent."""
        _close(fd for fd, _ in self._memories.pop(connection, []))
        for rank, (own, blocks) in list(self._ranks.items()):
            if own is connection:
                del self._ranks[rank]
                blocks.close()  # copies now fail, including running ones
                self._engine.transfer_engine.gpu_worker.unregister(*rank)
                _log.info("Rank %d of client %d has gone.", rank[1], rank[0])

    def check_integrity(self) -> None:
        """Raise `IntegrityError` if memory of an ended connection is still registered."""
        for connection in [*self._memories, *(one for one, _ in self._ranks.values())]:
            if not connection.is_open:
                raise IntegrityError(f"memory of {connection.peer} is held, which has gone")

    def _rank_of(self, message: messages.RegisterTPClient) -> Rank:
        model = self._engine.model_config
        model.check_client(message.dp_client_id)
        at = message.tp_rank
        return message.dp_client_id, at % model.tp_size if message.is_device_id else at

    def _blocks_of(
        self, connection: Connection, message: messages.RegisterTPClient
    ) -> ForeignBlocks:
        """Return the rank's blocks, which own the descriptors.

        On an error, closes the descriptors.
        """
        memories = self._memories.pop(connection, [])
        try:
            blocks: ForeignBlocks
            if message.span is not None:
                if memories:
                    raise InvalidArgumentError(
                        f"a rank gave {len(memories)} memories and the span of a GPU; give one kind"
                    )
                buffers, count = _buffers(message, [message.span.size_bytes])
                own = [buffer for _, buffer in buffers]
                blocks = DeviceBlocks(message.span, own, count, partial(_locate, connection, 0))
            else:
                sizes = [
                    MOST_BYTES << 1 if is_elastic else _size_of(fd) for fd, is_elastic in memories
                ]
                buffers, count = _buffers(message, sizes)
                blocks = SharedBlocks(
                    [(memories[memory][0], buffer) for memory, buffer in buffers],
                    count,
                    owned=[fd for fd, _ in memories],
                    elastic={
                        fd: partial(_locate, connection, memory)
                        for memory, (fd, is_elastic) in enumerate(memories)
                        if is_elastic
                    },
                )
        except BaseException:
            _close(fd for fd, _ in memories)
            raise
        return blocks


def _size_of(fd: int) -> int:
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        raise InvalidArgumentError(
            "what was handed over is no memory: give a memfd, or a file of shared memory"
        )
    return found.st_size


def _buffers(
    message: messages.RegisterTPClient, sizes: Sequence[int]
) -> tuple[list[tuple[int, Buffer]], int]:
    """Return the tensors' buffers, each with its memory, and the number of blocks.

    Raises `InvalidArgumentError` for tensors outside memories of the given sizes.
    """
    buffers: list[tuple[int, Buffer]] = []
    counts = set()
    for memory, tensor in message.tensors:
        if memory >= len(sizes):
            raise InvalidArgumentError(
                f"a tensor lies in memory {memory}, and {len(sizes)} have come"
            )
        tensor.check(sizes[memory])
        buffers += [(memory, one) for one in tensor.buffers(message.block_axis)]
        counts.add(tensor.shape[message.block_axis])
    if len(buffers) > messages.MOST_TENSORS or len(counts) != 1:
        raise InvalidArgumentError(
            f"{len(buffers)} buffers with {sorted(counts)} blocks are not one KV cache"
        )
    return buffers, counts.pop()


def _locate(
    connection: Connection, memory: int, pages: list[int], generations: list[int]
) -> tuple[list[int], tuple[int, ...]]:
    """Ask a rank for its pages. Blocks: do not call in the endpoint's own thread."""
    asked = messages.Locate(memory, pages, generations)
    answer, fds = connection.call_for_descriptors(asked, _LOCATE_S)
    if isinstance(answer, messages.Located) and len(answer.found) == len(pages):
        if generations:
            return answer.found, fds
        _close(fds)  # only a GPU's pages have descriptors
        return answer.found, ()
    _close(fds)
    raise MessageError("a rank has not said where its pages are")


def _close(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)


def has_gone(connection: Connection) -> bool:
    """Whether the peer's process has ended, even if the end of the stream is still unread."""
    if not connection.is_open:
        return True
    look = select.poll()
    try:
        look.register(connection.socket, select.POLLRDHUP)
    except (ValueError, OSError):  # closed on this side
        return True
    gone = bool(look.poll(0))
    if gone:
        connection.end(ChannelClosedError("its process has gone"))
    return gone
