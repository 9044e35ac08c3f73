"""Rows, blocks and layers of caches as runs of bytes. Pure.

    tensor      | row 0 | row 1 | row 2 | ...        in a blocks cache: block 0, 1, 2, ...
    layer l     tensors l*n .. l*n + n - 1           n = tensor_num_per_layer, 2 for K and V

Each function checks its arguments against the descriptions, so that no run exceeds a tensor. It
raises `LLMParamError` otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from kvelastic.datadist import checks
from kvelastic.datadist.descriptors import CacheDesc
from kvelastic.datadist.status import LLMParamError

TENSORS_PER_LAYER: Final = 2


class Run(NamedTuple):
    """A run of bytes in a tensor: tensor index, byte offset and byte size."""

    tensor: int
    offset: int
    size: int


def row_index(name: str, desc: CacheDesc, row: int) -> int:
    """Check and return the index of a row."""
    return checks.integer(name, row, most=desc.batch_size - 1)


def block_indices(name: str, desc: CacheDesc, blocks: object) -> list[int]:
    """Check and return the indices of blocks, at least one."""
    return checks.integers(name, blocks, most=desc.batch_size - 1)


class LayerRanges:
    """`src_layer_range`, `dst_layer_range` and `tensor_num_per_layer` of a call, checked."""

    def __init__(
        self,
        src_layer_range: object = None,
        dst_layer_range: object = None,
        tensor_num_per_layer: object = TENSORS_PER_LAYER,
    ) -> None:
        self.sources = checks.step_one("src_layer_range", src_layer_range)
        self.targets = checks.step_one("dst_layer_range", dst_layer_range)
        self._per_layer = checks.integer(
            "tensor_num_per_layer", tensor_num_per_layer, least=1, most=checks.MAX_UINT32
        )

    @classmethod
    def only(cls, call: str, kwargs: dict[str, object]) -> LayerRanges:
        """Create from a call's keyword arguments. Raises `TypeError` for unknown ones."""
        known = {"src_layer_range", "dst_layer_range", "tensor_num_per_layer"}
        if others := sorted(kwargs.keys() - known):
            raise TypeError(f"{call}() got unexpected keyword arguments: {', '.join(others)}")
        return cls(**kwargs)

    def tensors(self, desc: CacheDesc, *, of_source: bool) -> range:
        """Return the tensors of the source's or the target's layers; all without a range."""
        name, layers = (
            ("src_layer_range", self.sources) if of_source else ("dst_layer_range", self.targets)
        )
        if layers is None:
            return range(desc.num_tensors)
        each = checks.integer("tensor_num_per_layer", self._per_layer, most=desc.num_tensors)
        if desc.num_tensors % each:
            raise LLMParamError(
                f"tensor_num_per_layer={each} does not divide the cache's {desc.num_tensors}"
                " tensors"
            )
        if layers.stop * each > desc.num_tensors:
            raise LLMParamError(
                f"{name}={layers} reaches beyond the {desc.num_tensors // each} layers of the cache"
            )
        return range(layers.start * each, layers.stop * each)


@dataclass(frozen=True)
class Part:
    """What is copied of each tensor on one side of a transfer: blocks, or a run of a row."""

    blocks: Sequence[int] | None = None
    row: int = 0
    offset: int = 0

    def runs(self, desc: CacheDesc, tensors: range, size: int, other: Part) -> list[Run]:
        """Return the runs in a cache; `other` is the part on the other side.

        `size` is the bytes of a block, or of the run of a row if neither side has blocks. A row is
        split into as many blocks as the other side has.
        """
        if self.blocks is not None:
            if desc.row_bytes != size:
                raise LLMParamError(f"blocks of {desc.row_bytes} and {size} bytes do not match")
            return block_runs(desc, tensors, self.blocks)
        if other.blocks is not None:
            return row_as_blocks(desc, tensors, self.row, len(other.blocks), size)
        return row_runs(desc, tensors, self.row, self.offset, size)


def row_runs(
    desc: CacheDesc, tensors: Iterable[int], row: int, offset: int, size: int
) -> list[Run]:
    """Return the runs of `size` bytes from `offset` in a row, in each tensor."""
    if size < 1 or offset + size > desc.row_bytes:
        raise LLMParamError(
            f"{size} bytes from offset {offset} are not within a row of {desc.row_bytes} bytes"
        )
    return [Run(tensor, row * desc.row_bytes + offset, size) for tensor in tensors]


def block_runs(desc: CacheDesc, tensors: Iterable[int], blocks: Sequence[int]) -> list[Run]:
    """Return the runs of whole blocks, in each tensor, in the order of `blocks`."""
    step = desc.row_bytes
    return [Run(tensor, block * step, step) for tensor in tensors for block in blocks]


def row_as_blocks(
    desc: CacheDesc, tensors: Iterable[int], row: int, count: int, block_bytes: int
) -> list[Run]:
    """Split a row into runs that fill `count` blocks one after the other; the last may be shorter.

    row      |-- block_bytes --|-- block_bytes --|-- rest --|
    blocks   [        0        ][        1        ][    2     |  ]
    """
    if (count - 1) * block_bytes >= desc.row_bytes:
        raise LLMParamError(
            f"{count} blocks of {block_bytes} bytes are more than a row of {desc.row_bytes} bytes"
            " fills; name fewer"
        )
    starts = range(0, count * block_bytes, block_bytes)
    return [
        Run(tensor, row * desc.row_bytes + at, min(block_bytes, desc.row_bytes - at))
        for tensor in tensors
        for at in starts
    ]


def pairs_merged(sources: Sequence[Run], targets: Sequence[Run]) -> list[tuple[Run, Run]]:
    """Pair equally many sources and targets, each pair with the size of the shorter run.

    Pairs that are adjacent on both sides are merged.
    """
    merged: list[tuple[Run, Run]] = []
    for source, target in zip(sources, targets, strict=True):
        if source.size != target.size:
            size = min(source.size, target.size)
            source, target = source._replace(size=size), target._replace(size=size)  # noqa: PLW2901
        if merged:
            before, into = merged[-1]
            if _continues(before, source) and _continues(into, target):
                merged[-1] = (
                    Run(before.tensor, before.offset, before.size + source.size),
                    Run(into.tensor, into.offset, into.size + target.size),
                )
                continue
        merged.append((source, target))
    return merged


def _continues(before: Run, after: Run) -> bool:
    return before.tensor == after.tensor and before.offset + before.size == after.offset


# --- copies between caches of one process ---------------------------------------------------------


def same_shape(source: CacheDesc, target: CacheDesc) -> None:
    """Refuse caches whose tensors differ in number, type or row size. The row count may differ."""
    for what, one, other in (
        ("tensors", source.num_tensors, target.num_tensors),
        ("bytes a row", source.row_bytes, target.row_bytes),
        ("data type", source.data_type.name, target.data_type.name),
    ):
        if one != other:
            raise LLMParamError(f"the caches do not match: {what} {one} and {other}")


def copied_blocks(
    source: CacheDesc, target: CacheDesc, moves: Sequence[tuple[int, int]]
) -> list[tuple[Run, Run]]:
    """Return the copies of blocks to others; adjacent blocks are merged.

    Raises `LLMParamError` if two are copied to the same one: the result would depend on the order.
    """
    if not moves:
        return []
    same_shape(source, target)
    order = sorted(moves)
    sources = block_indices("blocks to copy from", source, [one for one, _ in order])
    targets = block_indices("blocks to copy to", target, [other for _, other in order])
    if len(set(targets)) != len(targets):
        raise LLMParamError("two blocks are copied to the same one")
    tensors = range(source.num_tensors)
    return pairs_merged(block_runs(source, tensors, sources), block_runs(target, tensors, targets))
