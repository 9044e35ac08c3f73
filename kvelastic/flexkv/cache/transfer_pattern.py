"""Which operations a request needs: pure functions from what was found to a graph.

get        DISK2H, REMOTE2H (what only those have)  ->  H2D (all)          end: H2D
prefetch   DISK2H, REMOTE2H                         ->  [VIRTUAL]          end: all of it
put        D2H (what is new)  ->  H2DISK, H2REMOTE                         end: D2H
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvelastic.flexkv.common.transfer import (
    GRAPH_END,
    BlockIds,
    DeviceType,
    TransferOp,
    TransferOpGraph,
    TransferType,
)
from kvelastic.tiers.base import KEY_BYTES, NO_KEY

_INTO_CPU = {DeviceType.SSD: TransferType.DISK2H, DeviceType.REMOTE: TransferType.REMOTE2H}
_OUT_OF_CPU = {DeviceType.SSD: TransferType.H2DISK, DeviceType.REMOTE: TransferType.H2REMOTE}


@dataclass(frozen=True)
class Fragment:
    """Blocks side by side that are in one tier."""

    device: DeviceType
    first: int
    count: int


def get_graph(
    keys: bytes,
    fragments: Sequence[Fragment],
    *,
    chain_after: bytes = NO_KEY,
    block_ids: BlockIds | None = None,
    dp_id: int = 0,
) -> TransferOpGraph:
    """Bring the keys of all fragments, which follow one another, to the engine's blocks."""
    graph = TransferOpGraph()
    if not keys:
        return graph
    reads = _reads(graph, keys, fragments, chain_after, dp_id)
    load = TransferOp(
        TransferType.H2D, keys=keys, chain_after=chain_after, dst_block_ids=block_ids, dp_id=dp_id
    )
    graph.task_end_op_id = graph.add_transfer_op(load)
    for read in reads:
        graph.add_dependency(load.op_id, read)
    return graph


def prefetch_graph(
    keys: bytes, fragments: Sequence[Fragment], *, chain_after: bytes = NO_KEY
) -> TransferOpGraph:
    """Bring what is only farther away into the CPU tier. Its end is the whole graph."""
    graph = TransferOpGraph()
    reads = _reads(graph, keys, fragments, chain_after, 0)
    if len(reads) == 1:
        graph.task_end_op_id = reads[0]
    elif reads:
        join = graph.add_transfer_op(TransferOp(TransferType.VIRTUAL))
        for read in reads:
            graph.add_dependency(join, read)
    return graph


def put_graph(
    keys: bytes,
    farther: Sequence[DeviceType],
    *,
    chain_after: bytes = NO_KEY,
    block_ids: BlockIds | None = None,
    dp_id: int = 0,
) -> TransferOpGraph:
    """Take these keys from the engine's blocks into the CPU tier, and on to those farther away."""
    graph = TransferOpGraph()
    if not keys:
        return graph
    store = TransferOp(
        TransferType.D2H,
        keys=keys,
        chain_after=chain_after,
        src_block_ids=block_ids,
        dp_id=dp_id,
    )
    graph.task_end_op_id = graph.add_transfer_op(store)
    for device in farther:
        copy = TransferOp(_OUT_OF_CPU[device], keys=keys, chain_after=chain_after, dp_id=dp_id)
        graph.add_dependency(graph.add_transfer_op(copy), store.op_id)
    return graph


def _reads(
    graph: TransferOpGraph,
    keys: bytes,
    fragments: Sequence[Fragment],
    chain_after: bytes,
    dp_id: int,
) -> list[int]:
    reads = []
    for fragment in fragments:
        if fragment.device is DeviceType.CPU:
            continue
        first = fragment.first * KEY_BYTES
        before = keys[first - KEY_BYTES : first] if first else chain_after
        read = TransferOp(
            _INTO_CPU[fragment.device],
            keys=keys[first : first + fragment.count * KEY_BYTES],
            chain_after=before,
            dp_id=dp_id,
        )
        reads.append(graph.add_transfer_op(read))
    return reads


__all__ = ["GRAPH_END", "Fragment", "get_graph", "prefetch_graph", "put_graph"]
