"""The operations of a request: pure functions from the blocks found to a graph.

get        DISK2H, REMOTE2H (blocks that the CPU tier lacks)  ->  H2D (all)          end: H2D
prefetch   DISK2H, REMOTE2H                                   ->  VIRTUAL            end: VIRTUAL
put        D2H (new blocks)  ->  H2DISK, H2REMOTE                                    end: D2H
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvelastic.flexkv.common.transfer import DeviceType, TransferOp, TransferOpGraph, TransferType
from kvelastic.tiers.base import KEY_BYTES, NO_KEY

_INTO_CPU = {DeviceType.SSD: TransferType.DISK2H, DeviceType.REMOTE: TransferType.REMOTE2H}
_OUT_OF_CPU = {DeviceType.SSD: TransferType.H2DISK, DeviceType.REMOTE: TransferType.H2REMOTE}


class Fragment(NamedTuple):
    """Consecutive blocks that one tier has."""

    device: DeviceType
    first: int
    blocks: int


def get_graph(
    keys: bytes, fragments: Sequence[Fragment], *, chain_after: bytes = NO_KEY, dp_id: int = 0
) -> TransferOpGraph:
    """Copy the keys of consecutive fragments to the engine's blocks."""
    graph = TransferOpGraph()
    if keys:
        reads = _add_reads(graph, keys, fragments, chain_after)
        load = TransferOp(TransferType.H2D, keys=keys, chain_after=chain_after, dp_id=dp_id)
        graph.task_end_op_id = _add_after(graph, load, reads)
    return graph


def prefetch_graph(
    keys: bytes, fragments: Sequence[Fragment], *, chain_after: bytes = NO_KEY
) -> TransferOpGraph:
    """Copy the blocks that only a farther tier has into the CPU tier."""
    graph = TransferOpGraph()
    reads = _add_reads(graph, keys, fragments, chain_after)
    if reads:
        graph.task_end_op_id = _add_after(graph, TransferOp(TransferType.VIRTUAL), reads)
    return graph


def put_graph(
    keys: bytes, farther: Sequence[DeviceType], *, chain_after: bytes = NO_KEY, dp_id: int = 0
) -> TransferOpGraph:
    """Copy these keys from the engine's blocks to the CPU tier, and from there to farther tiers."""
    graph = TransferOpGraph()
    if keys:
        store = TransferOp(TransferType.D2H, keys=keys, chain_after=chain_after, dp_id=dp_id)
        graph.task_end_op_id = graph.add_transfer_op(store)
        for device in farther:
            copy = TransferOp(_OUT_OF_CPU[device], keys=keys, chain_after=chain_after)
            _add_after(graph, copy, [store.op_id])
    return graph


def _add_after(graph: TransferOpGraph, op: TransferOp, before: Sequence[int]) -> int:
    graph.add_transfer_op(op)
    for op_id in before:
        graph.add_dependency(op.op_id, op_id)
    return op.op_id


def _add_reads(
    graph: TransferOpGraph, keys: bytes, fragments: Sequence[Fragment], chain_after: bytes
) -> list[int]:
    reads = []
    for device, block, count in fragments:
        first, end = block * KEY_BYTES, (block + count) * KEY_BYTES
        before = keys[first - KEY_BYTES : first] if first else chain_after
        if device is not DeviceType.CPU:
            read = TransferOp(_INTO_CPU[device], keys=keys[first:end], chain_after=before)
            reads.append(graph.add_transfer_op(read))
    return reads
