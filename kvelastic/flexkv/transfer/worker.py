"""Copies between the tensors of an engine's ranks and staging memory."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from kvelastic import _vmm
from kvelastic.errors import InvalidArgumentError, NotInitializedError
from kvelastic.flexkv.transfer.shared_blocks import ForeignBlocks

Blocks: TypeAlias = _vmm.EngineBlocks | ForeignBlocks

_CLIENT_SHIFT: Final = 40
"""Block ids of data-parallel client c are c << 40 plus the client's own id."""
MOST_BLOCKS: Final = 1 << _CLIENT_SHIFT


class GPUCPUTransferWorker:
    """The executor's `Copies` over the tensors of every rank. Any thread may call.

    A record has the parts of the ranks, in order. Ranks with identical rows (MLA) share one part:
    the first rank's part is stored, and all ranks are loaded from it.
    """

    def __init__(self, *, part_bytes: int, tp_size: int, is_shared: bool) -> None:
        """`part_bytes` is the size of one rank's part.

        `is_shared`: all ranks have the same rows.
        """
        self._part_bytes = part_bytes
        self._tp_size = tp_size
        self._is_shared = is_shared
        self._lock = threading.Lock()
        self._ranks: dict[int, dict[int, tuple[Blocks, Any]]] = {}

    def register(self, dp_client_id: int, tp_rank: int, blocks: Blocks, keep: Any = None) -> None:
        """Add a rank's tensors; `keep` is referenced until `unregister`.

        If ranks have unequal numbers of blocks, only ids that all of them have are valid. Raises
        `InvalidArgumentError` for an unexpected or already registered rank, and for blocks of
        another size.
        """
        if not 0 <= tp_rank < self._tp_size or dp_client_id < 0:
            raise InvalidArgumentError(
                f"rank {tp_rank} of client {dp_client_id} is none of {self._tp_size}"
                " tensor-parallel ranks"
            )
        if blocks.record_bytes != self._part_bytes:
            raise InvalidArgumentError(
                f"a block of these tensors has {blocks.record_bytes} bytes, and of this model"
                f" {self._part_bytes} in a rank: num_layers, num_kv_heads, head_size, dtype,"
                " tp_size and tokens_per_block have to be the engine's"
            )
        if blocks.blocks > MOST_BLOCKS:
            raise InvalidArgumentError(f"{blocks.blocks} blocks; register fewer than {MOST_BLOCKS}")
        with self._lock:
            ranks = self._ranks.setdefault(dp_client_id, {})
            if tp_rank in ranks:
                raise InvalidArgumentError(
                    f"rank {tp_rank} of client {dp_client_id} is registered already; unregister it"
                )
            ranks[tp_rank] = (blocks, keep)

    def unregister(self, dp_client_id: int, tp_rank: int | None = None) -> None:
        """Release the tensors of one rank of a client; None means every rank.

        No copy may be using them.
        """
        with self._lock:
            if tp_rank is None:
                self._ranks.pop(dp_client_id, None)
            else:
                self._ranks.get(dp_client_id, {}).pop(tp_rank, None)

    def is_registered(self, dp_client_id: int) -> bool:
        """Whether all ranks of a client have registered."""
        with self._lock:
            return len(self._ranks.get(dp_client_id, {})) == self._tp_size

    def check(self, dp_client_id: int, ids: npt.NDArray[np.int64], what: str) -> None:
        """Raise `InvalidArgumentError` if `what` names a block that not all ranks have.

        `NotInitializedError` if a rank is missing.
        """
        count = min(blocks.blocks for _, blocks in self._of(dp_client_id))
        wrong = ids[(ids < 0) | (ids >= count)]
        if len(wrong):
            raise InvalidArgumentError(
                f"{what} names block {int(wrong[0])} of {count}; bind it to blocks of the engine"
            )

    def _of(self, client: int) -> list[tuple[int, Blocks]]:
        with self._lock:
            ranks = self._ranks.get(client, {})
            if len(ranks) != self._tp_size:
                raise NotInitializedError(
                    f"{len(ranks)} of {self._tp_size} ranks of client {client} have registered"
                    " their tensors; register all of them before a launch"
                )
            return [(rank, ranks[rank][0]) for rank in sorted(ranks)]

    def copy_out(self, ids: Sequence[int], staging: _vmm.Staging, slots: Sequence[int]) -> None:
        """Copy engine blocks to staging slots. See `tiers.executor.BlockCopies`."""
        for client, (blocks, places) in _by_client(ids, slots):
            for rank, own in self._of(client)[: 1 if self._is_shared else None]:
                own.copy_out(blocks, staging, places, rank * self._part_bytes)

    def copy_in(self, staging: _vmm.Staging, slots: Sequence[int], ids: Sequence[int]) -> None:
        """Copy staging slots to engine blocks. See `tiers.executor.BlockCopies`."""
        for client, (blocks, places) in _by_client(ids, slots):
            for rank, own in self._of(client):
                offset_bytes = 0 if self._is_shared else rank * self._part_bytes
                own.copy_in(staging, places, blocks, offset_bytes)


def _by_client(
    ids: Sequence[int], slots: Sequence[int]
) -> Iterable[tuple[int, tuple[list[int], list[int]]]]:
    found: dict[int, tuple[list[int], list[int]]] = {}
    for block, slot in zip(ids, slots, strict=True):
        blocks, places = found.setdefault(block >> _CLIENT_SHIFT, ([], []))
        blocks.append(block & (MOST_BLOCKS - 1))
        places.append(slot)
    return found.items()
