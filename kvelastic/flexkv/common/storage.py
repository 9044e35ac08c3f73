"""Byte layouts of a KV cache.

LAYERFIRST   [layer, kv, block, token, head, element]
BLOCKFIRST   [block, layer, kv, token, head, element]      a block is contiguous, like a record
LAYERBLOCK   [layer, block, kv, token, head, element]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import InitVar, dataclass, replace
from enum import Enum
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from kvelastic.errors import InvalidArgumentError

_Item = TypeVar("_Item")
Bytes = npt.NDArray[np.uint8]
Part = tuple[int, int, int, int, int]
"""A part for `_vmm.EngineBlocks`: address, block stride, row bytes, rows, row stride."""


class KVCacheLayoutType(Enum):
    """The order of the axes."""

    LAYERFIRST = "LAYERFIRST"
    BLOCKFIRST = "BLOCKFIRST"
    LAYERBLOCK = "LAYERBLOCK"


_LAYER, _KV, _BLOCK, _ROW = range(4)
_ORDERS: Final = {
    KVCacheLayoutType.LAYERFIRST: (_LAYER, _KV, _BLOCK, _ROW),
    KVCacheLayoutType.BLOCKFIRST: (_BLOCK, _LAYER, _KV, _ROW),
    KVCacheLayoutType.LAYERBLOCK: (_LAYER, _BLOCK, _KV, _ROW),
}
"""The order of the axes. A row is a block's K or V in one layer."""
BLOCK_AXES: Final = {kind: order.index(_BLOCK) for kind, order in _ORDERS.items()}


@dataclass(frozen=True)
class KVCacheLayout:
    """Axis order and sizes. Raises `InvalidArgumentError` for a size below 1.

    `is_mla` is FlexKV's form of `kv_dim`: True means 1. v1.2.1 has it in the position of `kv_dim`,
    so a bool in `kv_dim` is read as `is_mla`.
    """

    type: KVCacheLayoutType
    num_layer: int
    num_block: int
    tokens_per_block: int
    num_head: int
    head_size: int
    kv_dim: int = 2
    itemsize: int = 2
    """Bytes of an element."""
    is_mla: InitVar[bool | None] = None

    def __post_init__(self, is_mla: bool | None) -> None:
        if isinstance(self.kv_dim, bool):
            is_mla = self.kv_dim
        if is_mla is not None:
            object.__setattr__(self, "kv_dim", 1 if is_mla else 2)
        object.__setattr__(self, "is_mla", self.kv_dim == 1)
        sizes = (self.num_layer, self.num_block, self.tokens_per_block, self.num_head)
        if min(*sizes, self.head_size, self.kv_dim, self.itemsize) < 1:
            raise InvalidArgumentError(f"{self} has a size below 1; give whole numbers from 1 on")

    @property
    def row_bytes(self) -> int:
        """A block's bytes in one layer's K or V."""
        return self.tokens_per_block * self.num_head * self.head_size * self.itemsize

    @property
    def block_bytes(self) -> int:
        """A block's bytes in all layers."""
        return self.num_layer * self.kv_dim * self.row_bytes

    @property
    def total_bytes(self) -> int:
        """Total bytes of the blocks."""
        return self.num_block * self.block_bytes

    @property
    def _axes(self) -> tuple[int, ...]:
        return (self.num_layer, self.kv_dim, self.num_block, self.row_bytes)

    @property
    def kv_shape(self) -> tuple[int, ...]:
        """The shape of the whole cache as one tensor."""
        row = (self.tokens_per_block, self.num_head, self.head_size)
        return (*(self._axes[axis] for axis in _ORDERS[self.type][:-1]), *row)

    def _strides(self) -> tuple[int, int, int]:
        """Return the bytes between adjacent layers, K and V, and blocks."""
        strides = [0] * 3
        step = self.row_bytes
        for axis in reversed(_ORDERS[self.type][:-1]):
            strides[axis] = step
            step *= self._axes[axis]
        return strides[_LAYER], strides[_KV], strides[_BLOCK]

    def _has_apart(self, tensors: Sequence[object]) -> bool:
        """Whether each layer has a tensor for K and one for V."""
        is_by_layer = self.type is not KVCacheLayoutType.BLOCKFIRST
        return is_by_layer and len(tensors) == 2 * self.num_layer

    def in_record_order(self, tensors: Sequence[_Item]) -> list[_Item]:
        """Return an engine's tensors with this layout in the order of a record.

        With two tensors for each layer, the first half are K and the second half V, as in FlexKV. A
        record has K and V of a layer next to each other. If the model has one row for both, only
        the first half is used, as in FlexKV.
        """
        if not self._has_apart(tensors):
            return list(tensors)
        keys, values = tensors[: self.num_layer], tensors[self.num_layer :]
        if self.kv_dim == 1:
            return list(keys)
        return [one for pair in zip(keys, values, strict=True) for one in pair]

    def parts(self, addresses: Sequence[int]) -> list[Part]:
        """Return the rows of a block in a record's order, for `_vmm.EngineBlocks`.

        `addresses` has one of three forms: one for the whole cache; one for each layer's tensor,
        which then has this layout with one layer; or, in a record's order, one for K and one for V
        of each layer. Raises `InvalidArgumentError` for another count.
        """
        if self.kv_dim == 2 and self._has_apart(addresses):
            row = self.row_bytes
            return [(address, row, row, 1, row) for address in addresses]
        layer, kv, block = self._strides()
        if len(addresses) == 1:
            bases = [addresses[0] + at * layer for at in range(self.num_layer)]
        elif self.type is KVCacheLayoutType.BLOCKFIRST or len(addresses) != self.num_layer:
            raise InvalidArgumentError(
                f"{len(addresses)} addresses for {self.num_layer} layers in {self.type.value}; give"
                " one for all, or one for each layer, whose blocks then lie in that layer's tensor"
            )
        else:
            bases = list(addresses)
        if kv == self.row_bytes:  # adjacent K and V form one row
            row = self.kv_dim * self.row_bytes
            return [(base, block, row, 1, row) for base in bases]
        return [(base, block, self.row_bytes, self.kv_dim, kv) for base in bases]

    def convert(self, memory: Any, to: KVCacheLayoutType) -> Bytes:
        """Return the whole cache's bytes in another axis order.

        `memory` is a buffer of `total_bytes`; otherwise raises `InvalidArgumentError`.
        """
        flat = np.frombuffer(memory, np.uint8)
        if flat.size != self.total_bytes:
            raise InvalidArgumentError(
                f"{flat.size} bytes for a cache of {self.total_bytes}; pass all of it"
            )
        order, wanted = _ORDERS[self.type], _ORDERS[to]
        shaped = flat.reshape([self._axes[axis] for axis in order])
        return np.ascontiguousarray(
            shaped.transpose([order.index(axis) for axis in wanted])
        ).ravel()

    def with_type(self, to: KVCacheLayoutType) -> KVCacheLayout:
        """Return the layout with the same sizes in another axis order."""
        return replace(self, type=to)

    def div_head(self, num_chunks: int) -> KVCacheLayout:
        """Return one rank's layout if `num_chunks` ranks share the heads.

        Raises `InvalidArgumentError` if the heads cannot be divided.
        """
        if num_chunks < 1 or self.num_head % num_chunks:
            raise InvalidArgumentError(
                f"{self.num_head} heads cannot be shared by {num_chunks} ranks; give a divisor"
            )
        return replace(self, num_head=self.num_head // num_chunks)


class StorageHandleType(Enum):
    """A tier's store, or an engine's tensors."""

    STORE = "store"
    ENGINE = "engine"


class StorageHandle(NamedTuple):
    """The blocks of one device."""

    handle_type: StorageHandleType
    data: Any
    """A `tiers.base.Store`, or a `_vmm.EngineBlocks`."""
    kv_layout: KVCacheLayout
