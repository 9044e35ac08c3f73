"""Ranks that register their memory: who has done so, and what becomes of it when they go.

One owner of this state: the thread of the endpoint that calls. A rank's connection is its
registration; when it ends, whatever the reason, the memory is let go of.
"""

from __future__ import annotations

import logging
import os
import select
import stat
from collections.abc import Callable, Sequence
from typing import Final

from kvelastic.errors import (
    ChannelClosedError,
    EngineError,
    IntegrityError,
    InvalidArgumentError,
    KvelasticError,
    MessageError,
)
from kvelastic.flexkv.common.config import CacheConfig, ModelConfig
from kvelastic.flexkv.common.memory_handle import MOST_BYTES, Buffer
from kvelastic.flexkv.server import request as messages
from kvelastic.flexkv.transfer.shared_blocks import (
    DeviceBlocks,
    DeviceSpan,
    PageFinder,
    SharedBlocks,
)
from kvelastic.flexkv.transfer.worker import GPUCPUTransferWorker
from kvelastic.messages import Connection, Request

_log = logging.getLogger("kvelastic.flexkv")
_MOST_MEMORIES: Final = 512
"""Descriptors that one rank may hand over."""

_MOST_REFUSED: Final = 64
_LOCATE_S: Final = 10.0

Rank = tuple[int, int]
"""Data-parallel client, and place in its tensor-parallel group."""


class Registrations:
    """The ranks of all data-parallel clients of one server."""

    def __init__(
        self,
        model: ModelConfig,
        cache: CacheConfig,
        worker: Callable[[], GPUCPUTransferWorker],
    ) -> None:
        """`worker` is who copies the ranks' blocks, once there is one."""
        self._model = model
        self._block_bytes = (
            model.token_size_in_bytes * cache.tokens_per_block // model.ranks_in_a_record
        )
        self._worker = worker
        self._ranks: dict[Rank, tuple[Connection, SharedBlocks | DeviceBlocks]] = {}
        self._spans: dict[Connection, DeviceSpan] = {}
        self._memories: dict[Connection, list[tuple[int, bool]]] = {}
        self._refused: dict[Rank, str] = {}
        """Why ranks that are missing were refused, the oldest first. Empty once all are there."""

    def __len__(self) -> int:
        """How many ranks there are now."""
        return len(self._ranks)

    @property
    def is_complete(self) -> bool:
        """Whether every rank of every client has registered."""
        clients = self._model.dp_size * self._model.instance_num
        return len(self._ranks) == clients * self._model.tp_size

    def check_refused(self) -> None:
        """Raise `EngineError` with the reason if a rank that is missing was refused.

        A refused rank does not try again, so waiting alone makes nothing complete. Another process
        can still register as that rank.
        """
        if self._refused:
            (client, rank), reason = next(iter(self._refused.items()))
            raise EngineError(
                f"rank {rank} of client {client} was refused: {reason}. Start that rank again"
            )

    def add_memory(self, request: Request, message: messages.AddMemory) -> None:
        """Keep the descriptors until the rank registers."""
        kept = self._memories.setdefault(request.connection, [])
        kept += [(fd, message.is_elastic) for fd in request.take_descriptors()]
        if len(kept) > _MOST_MEMORIES:
            error = MessageError(f"a rank has handed over more than {_MOST_MEMORIES} memories")
            self.connection_ended(request.connection)
            request.connection.end(error)
            raise error

    def add_device(self, request: Request, message: messages.AddDevice) -> None:
        """The rank's tensors lie in a GPU's pages."""
        self._spans[request.connection] = DeviceSpan(
            message.device, message.page_bytes, message.pages
        )

    def register(self, request: Request, message: messages.RegisterTPClient) -> None:
        """Take up a rank. Raises `InvalidArgumentError` for what is not this server's model's.

        A rank that is there already is refused, unless its process has gone.
        """
        named = message.dp_client_id, message.tp_rank
        try:
            self._take(request, message)
        except KvelasticError as error:
            if not self.is_complete:
                self._refused[named] = str(error)
                while len(self._refused) > _MOST_REFUSED:
                    del self._refused[next(iter(self._refused))]
            raise
        self._refused.pop(named, None)
        if self.is_complete:
            self._refused.clear()

    def _take(self, request: Request, message: messages.RegisterTPClient) -> None:
        rank = self._rank_of(message)
        if rank in self._ranks:
            other = self._ranks[rank][0]
            if not has_gone(other):
                raise InvalidArgumentError(
                    f"rank {rank[1]} of client {rank[0]} is {other.peer} already; give each rank"
                    " its own device_id"
                )
            self.connection_ended(other)
        if any(connection is request.connection for connection, _ in self._ranks.values()):
            raise InvalidArgumentError("this connection is a rank already")
        blocks = self._blocks_of(request.connection, message)
        try:
            self._worker().register(*rank, blocks)
        except BaseException:
            blocks.close()
            raise
        self._ranks[rank] = (request.connection, blocks)
        _log.info(
            "Rank %d of client %d has registered %d blocks of %d bytes.",
            rank[1],
            rank[0],
            blocks.blocks,
            blocks.record_bytes,
        )

    def connection_ended(self, connection: Connection) -> None:
        """Let go of what came over it. Safe to repeat."""
        for fd, _ in self._memories.pop(connection, []):
            os.close(fd)
        self._spans.pop(connection, None)
        for rank, (own, blocks) in list(self._ranks.items()):
            if own is connection:
                del self._ranks[rank]
                # Its copies, and those that run, fail from now on.
                blocks.close()
                self._worker().unregister(*rank)
                _log.info("Rank %d of client %d has gone.", rank[1], rank[0])

    def check_integrity(self) -> None:
        """Raises `IntegrityError` for memory of a connection that has ended."""
        for connection in [*self._memories, *(one for one, _ in self._ranks.values())]:
            if not connection.is_open:
                raise IntegrityError(f"memory of {connection.peer} is held, which has gone")

    def _rank_of(self, message: messages.RegisterTPClient) -> Rank:
        clients = self._model.dp_size * self._model.instance_num
        if message.dp_client_id >= clients:
            raise InvalidArgumentError(
                f"dp_client_id={message.dp_client_id} is none of {clients} data-parallel clients"
            )
        tp_rank = message.tp_rank
        if message.is_device_id:
            tp_rank %= self._model.tp_size
        if tp_rank >= self._model.tp_size:
            raise InvalidArgumentError(
                f"tp_rank={tp_rank} is none of {self._model.tp_size} tensor-parallel ranks"
            )
        return message.dp_client_id, tp_rank

    def _blocks_of(
        self, connection: Connection, message: messages.RegisterTPClient
    ) -> SharedBlocks | DeviceBlocks:
        """The rank's blocks, which own the descriptors; those are closed on an error."""
        memories = self._memories.pop(connection, [])
        span = self._spans.pop(connection, None)
        try:
            blocks: SharedBlocks | DeviceBlocks
            if span is not None:
                buffers, count = _buffers(message, [span.size_bytes])
                own = [buffer for _, buffer in buffers]
                blocks = DeviceBlocks(span, own, count, _exporter(connection))
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
                        fd: _finder(connection, memory)
                        for memory, (fd, is_elastic) in enumerate(memories)
                        if is_elastic
                    },
                )
            if blocks.record_bytes != self._block_bytes:
                raise InvalidArgumentError(
                    f"a block of these tensors has {blocks.record_bytes} bytes, and of this"
                    f" server's model {self._block_bytes} in a rank: num_layers, num_kv_heads,"
                    " head_size, dtype, tp_size and tokens_per_block have to be the engine's"
                )
        except BaseException:
            for fd, _ in memories:
                os.close(fd)
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
    """Where the tensors' blocks lie, each with its memory, and how many there are.

    Raises `InvalidArgumentError` for tensors that do not lie in memories of these sizes.
    """
    buffers: list[tuple[int, Buffer]] = []
    counts = set()
    for tensor in message.tensors:
        if tensor.memory >= len(sizes):
            raise InvalidArgumentError(
                f"a tensor lies in memory {tensor.memory}, and {len(sizes)} have come"
            )
        described = messages.description_of(tensor)
        described.check(sizes[tensor.memory])
        buffers += [(tensor.memory, one) for one in described.buffers(tensor.block_axis)]
        counts.add(described.shape[tensor.block_axis])
    if len(buffers) > messages.MOST_TENSORS or len(counts) != 1:
        raise InvalidArgumentError(
            f"{len(buffers)} buffers with {sorted(counts)} blocks are not one KV cache"
        )
    return buffers, counts.pop()


def _exporter(connection: Connection) -> PageFinder:
    """Asks a rank for its pages; never from the endpoint's own thread."""

    def find(pages: list[int]) -> tuple[int, ...]:
        answer, fds = connection.call_for_descriptors(messages.Export(pages=pages), _LOCATE_S)
        if isinstance(answer, messages.Done) and len(fds) == len(pages):
            return fds
        for fd in fds:
            os.close(fd)
        raise MessageError("a rank has not handed its pages over")

    return find


def _finder(connection: Connection, memory: int) -> PageFinder:
    """Asks a rank where its pages lie; never from the endpoint's own thread."""

    def find(pages: list[int]) -> list[int]:
        offsets: list[int] = []
        for first in range(0, len(pages), messages.MOST_PAGES):
            asked = messages.Locate(memory=memory, pages=pages[first : first + messages.MOST_PAGES])
            answer = connection.call(asked, _LOCATE_S)
            if not isinstance(answer, messages.Located) or len(answer.offsets) != len(asked.pages):
                raise MessageError("a rank has not said where its pages lie")
            offsets += answer.offsets
        return offsets

    return find


def has_gone(connection: Connection) -> bool:
    """Whether the process at the other end has, also where nothing has been read of that yet."""
    if not connection.is_open:
        return True
    look = select.poll()
    try:
        look.register(connection.socket, select.POLLRDHUP)
    except (ValueError, OSError):  # closed here
        return True
    gone = bool(look.poll(0))
    if gone:
        connection.end(ChannelClosedError("its process has gone"))
    return gone
