"""kvcached's low-level calls: raw tensors, and pages mapped by hand.

    raw = create_kv_tensors(64 << 20, 2, "cpu", num_layers=12)   # one flat int8 tensor per layer
    map_to_kv_tensors([0, 1, 2])       # pages 0 to 2 of every layer, K part and V part
    unmap_from_kv_tensors([1])         # its memory is kept for the next map
    trim_kv_tensors()                  # and released
    shutdown_kvelastic()

A layer's tensor consists of `num_kv_buffers` consecutive parts (K, then V). Page p is
`page_bytes(group_id)` bytes at offset p * page_bytes of *every* part: one call maps it for all
layers, or for none. Each group of tensors is an instance of its device: `kvctl list` shows its
memory, and every page needs a grant of the device's ledger.

Engines should use the managers of `integration/*/interfaces.py` instead. These count blocks, and
one of their pages is a single mapping for all layers.

All calls are thread-safe.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvelastic import _vmm
from kvelastic.config import Config, load
from kvelastic.device.selection import Device, resolve
from kvelastic.errors import InvalidArgumentError, NotInitializedError
from kvelastic.kvcached import embedded
from kvelastic.pool.hand_mapped import HandMapped, open_hand_mapped
from kvelastic.shared.device_set import page_size_bytes as default_page_size
from kvelastic.units import GRANULARITY_BYTES

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class _Tensors:
    pages: HandMapped
    block_bytes: int | None


@dataclass(frozen=True)
class _Setup:
    settings: Config
    device: Device
    page_bytes: int


_lock = threading.Lock()
_setup: _Setup | None = None
_groups: dict[int, _Tensors] = {}


def init_kvelastic(device: str = "auto", page_size: int = 0) -> None:
    """Initialize the low-level calls; `page_size` is in bytes, 0 means the configured size.

    Raises `DeviceUnavailableError` for a GPU that is not available, and `InvalidArgumentError` for
    a page size that is not a multiple of 2 MiB.
    """
    global _setup
    settings = load()
    if page_size < 0 or page_size % GRANULARITY_BYTES != 0:
        raise InvalidArgumentError(
            f"page_size={page_size} is not accepted; it must be a multiple of {GRANULARITY_BYTES}"
        )
    with _lock:
        on = resolve(device, settings)
        _setup = _Setup(settings, on, page_size or default_page_size(settings, [on]))


def shutdown_kvelastic() -> None:
    """Unmap and release the memory of every group, and leave the device's ledger.

    Do not access the tensors afterwards. Memory that the driver fails to release keeps its grant.
    """
    global _setup
    with _lock:
        groups = list(_groups.values())
        _groups.clear()
        _setup = None
    with ExitStack() as closing:  # closes the others too if one raises, as at Ctrl-C
        for group in groups:
            closing.callback(group.pages.close)


def create_kv_tensors(
    mem_size_per_layer: int,
    dtype_size: int,
    device: str,
    num_layers: int,
    num_kv_buffers: int = 2,
    group_id: int = 0,
    *,
    block_bytes: int | None = None,
) -> list[torch.Tensor]:
    """Return one flat int8 tensor per layer, of at least `mem_size_per_layer` bytes, unmapped.

    The size is rounded up so that each of the `num_kv_buffers` parts consists of whole pages;
    `dtype_size` must divide a page. `block_bytes` (of one block in one part) is only needed to pass
    block ids without pages to `map_to_kv_tensors`. Without an earlier `init_kvelastic`, this
    initializes `device`.

    Raises `InvalidArgumentError` if a number is not positive or the group already has tensors, and
    the errors of `open_hand_mapped`.
    """
    from kvelastic.pool.tensors import name_streams, whole_range

    if _setup is None and not embedded.is_initialized():
        init_kvelastic(str(device))
    setup = _required_setup()
    page_bytes = setup.page_bytes
    embedded.check_device(device, setup.device)
    numbers = {
        "mem_size_per_layer": mem_size_per_layer,
        "dtype_size": dtype_size,
        "num_layers": num_layers,
        "num_kv_buffers": num_kv_buffers,
    }
    for name, value in numbers.items():
        if value < 1:
            raise InvalidArgumentError(f"{name}={value} is not accepted; it must be 1 or more")
    if page_bytes % dtype_size != 0:
        raise InvalidArgumentError(
            f"dtype_size={dtype_size} does not divide a page of {page_bytes} bytes"
        )
    pages = -(-mem_size_per_layer // (num_kv_buffers * page_bytes))
    part_bytes = pages * page_bytes
    geometry = _vmm.Geometry(
        pages=pages,
        extent_bytes=page_bytes,
        block_bytes=page_bytes,  # no block ids here: a page is its own block
        blocks_per_page=1,
        extents_per_page=num_layers * num_kv_buffers,
        extent_stride_bytes=part_bytes,
    )
    if not setup.device.is_host:
        name_streams(setup.device.driver())
    with _lock:
        if group_id in _groups:
            raise InvalidArgumentError(
                f"group {group_id} has tensors already; use another group_id"
            )
        named = setup.settings.ipc_name
        own = open_hand_mapped(
            setup.settings,
            setup.device,
            geometry,
            name=f"{named}_vmm_g{group_id}" if named else None,
        )
        _groups[group_id] = _Tensors(own, block_bytes)
    flat = whole_range(own.memory)
    layer_bytes = num_kv_buffers * part_bytes
    return [flat[i * layer_bytes : (i + 1) * layer_bytes] for i in range(num_layers)]


def kv_tensors_created(group_id: int = 0) -> bool:
    """Return whether the group has tensors."""
    return group_id in _groups


def page_bytes(group_id: int = 0) -> int:
    """Return the bytes of one page in each part of each layer."""
    return _group(group_id).pages.memory.geometry.extent_bytes


def map_to_kv_tensors(
    page_ids: Sequence[int], block_ids: Sequence[int] = (), *, group_id: int = 0
) -> None:
    """Map pages in every layer, and the pages that contain `block_ids`. All of them or none.

    If `create_kv_tensors` got no `block_bytes`, only `page_ids` are mapped. A page listed twice, by
    number or by a block, is mapped once. New memory is zeroed. Memory kept by
    `unmap_from_kv_tensors` is reused unchanged.

    Blocks for at most `KVELASTIC_RECLAIM_WAIT` while other instances release memory. Raises
    `InvalidArgumentError` for a page that is already mapped or outside the tensors. Raises
    `OutOfMemoryError` if the ledger refuses the grant, `KVELASTIC_LIMIT` is reached, or the device
    has no memory.
    """
    group = _group(group_id)
    group.pages.map(_pages(group, page_ids, block_ids))


def unmap_from_kv_tensors(
    page_ids: Sequence[int], block_ids: Sequence[int] = (), *, group_id: int = 0
) -> None:
    """Unmap all of the pages from every layer, or none. Accessing them then faults.

    The memory is kept, with its grant, until `trim_kv_tensors`, or until a later call while another
    instance requests memory. Raises `InvalidArgumentError` for a page that is not mapped.
    """
    group = _group(group_id)
    group.pages.unmap(_pages(group, page_ids, block_ids))


def trim_kv_tensors(group_id: int = 0) -> None:
    """Release the memory of unmapped pages to the device."""
    _group(group_id).pages.trim()


def _required_setup() -> _Setup:
    if _setup is not None:
        return _setup
    state = embedded.required()
    return _Setup(state.settings, state.device, state.page_size_bytes)


def _group(group_id: int) -> _Tensors:
    group = _groups.get(group_id)
    if group is None:
        _required_setup()
        raise NotInitializedError(
            f"group {group_id} has no tensors; call create_kv_tensors(...) first"
        )
    return group


def _pages(group: _Tensors, page_ids: Sequence[int], block_ids: Sequence[int]) -> list[int]:
    pages: dict[Any, None] = dict.fromkeys(page_ids)
    if block_ids and group.block_bytes is None:
        if pages:
            return list(pages)  # these contain the blocks, as in kvcached's callers
        raise InvalidArgumentError(
            "block_ids alone need to know how large a block is: give block_bytes to"
            " create_kv_tensors, or name the pages"
        )
    for block in block_ids:
        first = block * (group.block_bytes or 0)
        last = first + (group.block_bytes or 0) - 1
        size = group.pages.memory.geometry.extent_bytes
        pages.update(dict.fromkeys(range(first // size, last // size + 1)))
    return list(pages)


# kvcached's names.
init_kvcached = init_kvelastic
shutdown_kvcached = shutdown_kvelastic
