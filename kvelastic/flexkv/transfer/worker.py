"""What moves blocks: between the engine's tensors and the CPU tier, and between tiers.

A worker says how an operation becomes two steps of the executor: one that fills a staging slot, one
that empties it. The steps run in the executor's threads, one for the engine's copies and one for
each store, so a store that hangs holds up nothing else.

    worker               operations                fills            empties
    GPU-CPU              D2H, H2D                  copy out, get    put, copy in
    CPU-SSD              H2DISK, DISK2H            get              put
    CPU-remote           H2REMOTE, REMOTE2H        get              put
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

from kvelastic import _vmm
from kvelastic.errors import InvalidArgumentError, NotInitializedError, UnsupportedError
from kvelastic.flexkv.common.transfer import ENDS, DeviceType, TransferType
from kvelastic.tiers.graph import NO_TIER, Kind

_CLIENT_SHIFT: Final = 40
"""A block of data-parallel client c has c above these bits of its id, where one transfer is of
several clients' blocks."""
MOST_BLOCKS: Final = 1 << _CLIENT_SHIFT


class Step(NamedTuple):
    """One kind of operation of the executor, and the tier that it is of."""

    kind: Kind
    tier: int = NO_TIER


class TransferWorker(ABC):
    """Turns operations of its types into steps."""

    transfer_types: frozenset[TransferType]

    def __init__(self, tiers: Mapping[DeviceType, int]) -> None:
        """`tiers` says which place each device has among the executor's stores."""
        self._tiers = tiers

    @abstractmethod
    def fill(self, transfer_type: TransferType) -> Step:
        """How a block comes from its source into staging."""

    @abstractmethod
    def empty(self, transfer_type: TransferType) -> Step:
        """How it goes on to its target."""


class _TierWorker(TransferWorker):
    """Between two tiers."""

    def fill(self, transfer_type: TransferType) -> Step:
        """As `TransferWorker.fill`."""
        return Step(Kind.GET, self._tiers[ENDS[transfer_type][0]])

    def empty(self, transfer_type: TransferType) -> Step:
        """As `TransferWorker.empty`."""
        return Step(Kind.PUT, self._tiers[ENDS[transfer_type][1]])


class CPUSSDDiskTransferWorker(_TierWorker):
    """Between the CPU tier and disks."""

    transfer_types = frozenset((TransferType.DISK2H, TransferType.H2DISK))


class CPURemoteTransferWorker(_TierWorker):
    """Between the CPU tier and a shared folder, or a Mooncake Store."""

    transfer_types = frozenset((TransferType.REMOTE2H, TransferType.H2REMOTE))


class Blocks(Protocol):
    """What is copied of a rank: `_vmm.EngineBlocks`, or `SharedBlocks` of another process."""

    @property
    def blocks(self) -> int:
        """How many there are."""

    @property
    def record_bytes(self) -> int:
        """Of one."""

    def copy_out(
        self, ids: Sequence[int], staging: Any, slots: Sequence[int], offset_bytes: int = 0
    ) -> None:
        """Blocks to slots, from that byte of each on."""

    def copy_in(
        self, staging: Any, slots: Sequence[int], ids: Sequence[int], offset_bytes: int = 0
    ) -> None:
        """The other way round."""


@dataclass(frozen=True)
class RankBlocks:
    """One rank's tensors."""

    blocks: Blocks
    keep: Any
    """What keeps their memory."""


class GPUCPUTransferWorker(TransferWorker):
    """Between the engine's tensors and the CPU tier; the executor's `Copies`.

    A record has the parts of all ranks, in their order. Ranks that all have the same rows (MLA)
    share one part: the first one's is stored, and all are loaded from it. Any thread.
    """

    transfer_types = frozenset((TransferType.H2D, TransferType.D2H))

    def __init__(
        self, tiers: Mapping[DeviceType, int], *, part_bytes: int, tp_size: int, is_shared: bool
    ) -> None:
        """`part_bytes` is one rank's; `is_shared` says that all ranks have the same rows."""
        super().__init__(tiers)
        self._part_bytes = part_bytes
        self._tp_size = tp_size
        self._is_shared = is_shared
        self._lock = threading.Lock()
        self._ranks: dict[int, dict[int, RankBlocks]] = {}

    def fill(self, transfer_type: TransferType) -> Step:
        """As `TransferWorker.fill`."""
        if transfer_type is TransferType.D2H:
            return Step(Kind.COPY_OUT)
        return Step(Kind.GET, self._tiers[DeviceType.CPU])

    def empty(self, transfer_type: TransferType) -> Step:
        """As `TransferWorker.empty`."""
        if transfer_type is TransferType.H2D:
            return Step(Kind.COPY_IN)
        return Step(Kind.PUT, self._tiers[DeviceType.CPU])

    def register(self, dp_client_id: int, tp_rank: int, blocks: Blocks, keep: Any = None) -> None:
        """A rank's tensors are there. `keep` is held until `unregister`.

        Of ranks with unequal numbers of blocks, those ids can be used that all of them have. Raises
        `InvalidArgumentError` for a rank that is not expected or is there already, and for blocks
        of another size.
        """
        if not 0 <= tp_rank < self._tp_size or dp_client_id < 0:
            raise InvalidArgumentError(
                f"rank {tp_rank} of client {dp_client_id} is not one of {self._tp_size} ranks"
            )
        if blocks.record_bytes != self._part_bytes:
            raise InvalidArgumentError(
                f"tensors with {blocks.record_bytes} bytes a block were registered for a model with"
                f" {self._part_bytes} on each rank; ModelConfig and the tensors must agree"
            )
        if blocks.blocks > MOST_BLOCKS:
            raise InvalidArgumentError(f"{blocks.blocks} blocks; register fewer than {MOST_BLOCKS}")
        with self._lock:
            ranks = self._ranks.setdefault(dp_client_id, {})
            if tp_rank in ranks:
                raise InvalidArgumentError(
                    f"rank {tp_rank} of client {dp_client_id} is registered already; unregister it"
                )
            ranks[tp_rank] = RankBlocks(blocks, keep)

    def unregister(self, dp_client_id: int, tp_rank: int | None = None) -> None:
        """Let go of the tensors of one rank of a client, or of all (None).

        The caller has seen to it that nothing copies them.
        """
        with self._lock:
            if tp_rank is None:
                self._ranks.pop(dp_client_id, None)
            else:
                self._ranks.get(dp_client_id, {}).pop(tp_rank, None)

    def is_registered(self, dp_client_id: int) -> bool:
        """Whether all ranks of a client are there."""
        with self._lock:
            return len(self._ranks.get(dp_client_id, {})) == self._tp_size

    def block_count(self, dp_client_id: int) -> int:
        """How many blocks all ranks of a client have.

        Raises `NotInitializedError` where a rank is missing.
        """
        return min(rank.blocks.blocks for _, rank in self._of(dp_client_id))

    def _of(self, client: int) -> list[tuple[int, RankBlocks]]:
        with self._lock:
            ranks = self._ranks.get(client, {})
            if len(ranks) != self._tp_size:
                raise NotInitializedError(
                    f"{len(ranks)} of {self._tp_size} ranks of client {client} have registered"
                    " their tensors; register all of them before a launch"
                )
            return sorted(ranks.items())

    @staticmethod
    def engine_ids(dp_client_id: int, block_ids: Sequence[int]) -> list[int]:
        """Ids of a client's blocks as `copy_out` and `copy_in` take them."""
        base = dp_client_id << _CLIENT_SHIFT
        return [base + block for block in block_ids]

    def copy_out(self, ids: Sequence[int], staging: _vmm.Staging, slots: Sequence[int]) -> None:
        """As `tiers.pool_side.Copies.copy_out`."""
        for client, blocks, places in _by_client(ids, slots):
            for rank, own in self._of(client):
                if self._is_shared and rank:
                    break
                own.blocks.copy_out(blocks, staging, places, rank * self._part_bytes)

    def copy_in(self, staging: _vmm.Staging, slots: Sequence[int], ids: Sequence[int]) -> None:
        """As `tiers.pool_side.Copies.copy_in`."""
        for client, blocks, places in _by_client(ids, slots):
            for rank, own in self._of(client):
                offset_bytes = 0 if self._is_shared else rank * self._part_bytes
                own.blocks.copy_in(staging, places, blocks, offset_bytes)


def _by_client(
    ids: Sequence[int], slots: Sequence[int]
) -> list[tuple[int, list[int], Sequence[int]]]:
    clients = {block >> _CLIENT_SHIFT for block in ids}
    if len(clients) == 1:
        (client,) = clients
        base = client << _CLIENT_SHIFT
        return [(client, [block - base for block in ids], slots)]
    found: list[tuple[int, list[int], Sequence[int]]] = []
    for client in sorted(clients):
        pairs = [(b, s) for b, s in zip(ids, slots, strict=True) if b >> _CLIENT_SHIFT == client]
        base = client << _CLIENT_SHIFT
        found.append((client, [block - base for block, _ in pairs], [slot for _, slot in pairs]))
    return found


INSTEAD: Final = {
    TransferType.DISK2D: "DISK2H, then H2D: blocks pass pinned host memory",
    TransferType.D2DISK: "D2H, then H2DISK: blocks pass pinned host memory",
    TransferType.PEERH2H: "REMOTE2H from a store that the machines share",
    TransferType.H2PEERH: "H2REMOTE to a store that the machines share",
    TransferType.PEERSSD2H: "REMOTE2H from a store that the machines share",
    TransferType.H2PEERSSD: "H2REMOTE to a store that the machines share",
    TransferType.LAYERWISE: "H2D of all layers",
}
"""What is not there, and what does the same."""


def worker_for(workers: Sequence[TransferWorker], transfer_type: TransferType) -> TransferWorker:
    """Who does it. Raises `UnsupportedError` with what to use instead, or where no tier is."""
    for worker in workers:
        if transfer_type in worker.transfer_types:
            return worker
    instead = INSTEAD.get(transfer_type, "a configuration with that tier")
    raise UnsupportedError(f"{transfer_type.value} is not done here; use {instead}")
