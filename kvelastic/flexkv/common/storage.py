"""Byte layouts of a KV cache.

LAYERFIRST   [layer, kv, block, token, head, element]
BLOCKFIRST   [block, layer, kv, token, head, element]      a block is contiguous, like a record
LAYERBLOCK   [layer, block, kv, token, head, element]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import InitVar, dataclass, replace
from enum import Enum
from typing import Any, Final, TypeVar

from kvelastic.errors import InvalidArgumentError
from kvelastic.flexkv.common.memory_handle import TensorDescription

_Item = TypeVar("_Item")


class KVCacheLayoutType(Enum):
    """The order of the axes."""

    LAYERFIRST = "LAYERFIRST"
    BLOCKFIRST = "BLOCKFIRST"
    LAYERBLOCK = "LAYERBLOCK"


_LAYER, _KV, _BLOCK = range(3)
_ORDERS: Final = {
    KVCacheLayoutType.LAYERFIRST: (_LAYER, _KV, _BLOCK),
    KVCacheLayoutType.BLOCKFIRST: (_BLOCK, _LAYER, _KV),
    KVCacheLayoutType.LAYERBLOCK: (_LAYER, _BLOCK, _KV),
}
"""The order of the axes before those of a row, which is a block's K or V in one layer."""
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
    def kv_shape(self) -> tuple[int, ...]:
        """The shape of the whole cache as one tensor."""
        axes = (self.num_layer, self.kv_dim, self.num_block)
        row = (self.tokens_per_block, self.num_head, self.head_size)
        return (*(axes[axis] for axis in _ORDERS[self.type]), *row)

    def in_record_order(self, tensors: Sequence[_Item]) -> list[_Item]:
        """Return an engine's tensors with this layout in the order of a record.

        With two tensors for each layer, the first half are K and the second half V, as in FlexKV. A
        record has K and V of a layer next to each other. If the model has one row for both, only
        the first half is used, as in FlexKV.
        """
        is_by_layer = self.type is not KVCacheLayoutType.BLOCKFIRST
        if not is_by_layer or len(tensors) != 2 * self.num_layer:
            return list(tensors)
        keys, values = tensors[: self.num_layer], tensors[self.num_layer :]
        if self.kv_dim == 1:
            return list(keys)
        return [one for pair in zip(keys, values, strict=True) for one in pair]

    def div_head(self, num_chunks: int) -> KVCacheLayout:
        """Return one rank's layout if `num_chunks` ranks share the heads.

        Raises `InvalidArgumentError` if the heads cannot be divided.
        """
        if num_chunks < 1 or self.num_head % num_chunks:
            raise InvalidArgumentError(
                f"{self.num_head} heads cannot be shared by {num_chunks} ranks; give a divisor"
            )
        return replace(self, num_head=self.num_head // num_chunks)


def in_blocks(
    tensors: Sequence[TensorDescription],
    layout: KVCacheLayout | None,
    block_axis: int | None = None,
) -> tuple[list[TensorDescription], int]:
    """View tensors in record order as blocks; return them and the axis that counts blocks.

    Tensors indexed by token, as SGLang's, become the blocks of the layout. `block_axis` is for a
    layout that FlexKV does not have. Raises `InvalidArgumentError` as `block_axis_of` does.
    """
    viewed = [_by_block(one, layout) for one in tensors]
    return viewed, block_axis_of(layout, viewed) if block_axis is None else block_axis


def block_axis_of(layout: KVCacheLayout | None, tensors: Sequence[Any]) -> int:
    """Return the axis that counts blocks in tensors (or their descriptions) with that layout.

    Raises `InvalidArgumentError` without a layout, or if the tensors' shape does not match it.
    """
    if layout is None:
        raise InvalidArgumentError("say by kv_layout or block_axis which axis counts blocks")
    shape = [int(count) for count in tensors[0].shape]
    whole = replace(layout, num_layer=1) if len(tensors) > 1 else layout
    blocks_at = BLOCK_AXES[whole.type]
    found = -1
    # A tensor may omit axes of length one: a single layer, or K and V in one row.
    left = len(shape) - 1
    for axis in reversed(range(len(whole.kv_shape))):
        if left >= 0 and shape[left] == whole.kv_shape[axis]:
            found = left if axis == blocks_at else found
            left -= 1
        elif whole.kv_shape[axis] != 1:
            break
    if found < 0 or left >= 0:
        raise InvalidArgumentError(
            f"a tensor of the shape {tuple(shape)} is not of {layout.type.name}, which has"
            f" {whole.kv_shape}"
        )
    return found


def _by_block(tensor: TensorDescription, layout: KVCacheLayout | None) -> TensorDescription:
    """View a tensor `[token, head, element]` as `[block, token, head, element]`.

    The view omits tokens beyond the layout's blocks: SGLang pads with an extra page of tokens. A
    tensor of another shape is returned unchanged.
    """
    if layout is None or tensor.shape[1:] != (layout.num_head, layout.head_size):
        return tensor
    whole = layout.num_block * layout.tokens_per_block
    if not whole <= tensor.shape[0] < whole + layout.tokens_per_block:
        return tensor
    token_bytes = tensor.strides_bytes[0]
    return tensor._replace(
        shape=(layout.num_block, layout.tokens_per_block, *tensor.shape[1:]),
        strides_bytes=(
            layout.tokens_per_block * token_bytes,
            token_bytes,
            *tensor.strides_bytes[1:],
        ),
    )
