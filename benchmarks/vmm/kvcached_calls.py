"""kvcached's sequence of driver calls, replayed: what its pages cost on the same driver.

Facts of its version 0.1.5 as we read them. All unmapped addresses have one shared "zero page"
behind them, as large as a page, and no memory is kept for later:

    grow a page     unmap zero page, create, map, set_access
    shrink a page   unmap, map zero page, set_access, release

Contiguous layout (its default on CUDA): one page of 2 MiB x layers x 2 for all layers. Per-layer
layout: the same eight calls on 2 MiB in each of layers x 2 buffers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from benchmarks.vmm.models import MIB, Model

if TYPE_CHECKING:
    from benchmarks.vmm.bare_cuda import BareCuda

PAGE_BYTES: Final = 2 * MIB
CALLS_TO_GROW: Final = 4
CALLS_TO_SHRINK: Final = 4


@dataclass(frozen=True)
class KvcachedLayout:
    """Of what a page id consists: `handles` mappings of `handle_bytes`."""

    name: str
    handles: int
    handle_bytes: int

    @property
    def page_id_bytes(self) -> int:
        return self.handles * self.handle_bytes

    @property
    def cycle_calls(self) -> int:
        """Calls to grow and shrink by one page id."""
        return self.handles * (CALLS_TO_GROW + CALLS_TO_SHRINK)


def contiguous(model: Model) -> KvcachedLayout:
    return KvcachedLayout("kvcached, contiguous", 1, PAGE_BYTES * model.buffers)


def per_layer(model: Model) -> KvcachedLayout:
    return KvcachedLayout("kvcached, per layer", model.buffers, PAGE_BYTES)


class Replay:
    """The address space of one pool in that layout, with the zero page behind all of it."""

    def __init__(self, cuda: BareCuda, layout: KvcachedLayout, page_ids: int) -> None:
        self._cuda = cuda
        self._bytes = layout.handle_bytes
        self._buffers = range(layout.handles)
        self._page_ids = page_ids
        self._zero = cuda.create(self._bytes)
        self._range_bytes = layout.handles * page_ids * self._bytes
        self._base = cuda.reserve(self._range_bytes)
        self._handles: dict[int, int] = {}
        for buffer in self._buffers:
            for page_id in range(page_ids):
                self._map(self._address(buffer, page_id), self._zero)

    def _address(self, buffer: int, page_id: int) -> int:
        return self._base + (buffer * self._page_ids + page_id) * self._bytes

    def _map(self, address: int, handle: int) -> None:
        self._cuda.map(address, self._bytes, handle)
        self._cuda.set_access(address, self._bytes)

    def grow(self, page_ids: range) -> None:
        """Memory behind these page ids."""
        for page_id in page_ids:
            for buffer in self._buffers:
                address = self._address(buffer, page_id)
                self._cuda.unmap(address, self._bytes)
                self._handles[address] = self._cuda.create(self._bytes)
                self._map(address, self._handles[address])

    def shrink(self, page_ids: range) -> None:
        """Their memory is the device's again."""
        for page_id in page_ids:
            for buffer in self._buffers:
                address = self._address(buffer, page_id)
                self._cuda.unmap(address, self._bytes)
                self._map(address, self._zero)
                self._cuda.destroy(self._handles.pop(address), self._bytes)

    def close(self) -> None:
        """Everything back; what is still grown is given back first."""
        for address in list(self._handles):
            self._cuda.unmap(address, self._bytes)
            self._cuda.destroy(self._handles.pop(address), self._bytes)
            self._map(address, self._zero)
        for buffer in self._buffers:
            for page_id in range(self._page_ids):
                self._cuda.unmap(self._address(buffer, page_id), self._bytes)
        self._cuda.destroy(self._zero, self._bytes)
        self._cuda.release(self._base, self._range_bytes)
