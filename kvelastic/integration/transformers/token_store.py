"""Keys and values of all layers, in pages that are mapped as the sequence grows.

    store = TokenStore(pages, device, layers=16)
    keys, values = store.append(0, key_states, value_states)   # all of layer 0, views of the range
    store.cut([12] * 16)                                       # keep twelve tokens
    store.close()

`token_rows` has the drawing of the layout. Imports torch, but not transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from kvelastic import _vmm
from kvelastic.device.selection import Device
from kvelastic.errors import (
    EngineError,
    IntegrityError,
    InvalidArgumentError,
    PoolFailedError,
    UnsupportedError,
)
from kvelastic.integration.transformers.growing_pages import GrowingPages
from kvelastic.integration.transformers.token_rows import TokenRows
from kvelastic.pool.tensors import name_streams, whole_range

_MOVED_AT_ONCE_BYTES: Final = 16 << 20
"""Size of the temporary copy when rows change their size."""


class TokenStore:
    """The memory of one cache. One thread at a time.

    Each layer calls `append` once per forward. Between forwards all layers have the same tokens.
    """

    def __init__(self, pages: GrowingPages, device: Device, layers: int) -> None:
        self._pages = pages
        self._geometry = pages.geometry
        self.lengths = [0] * layers
        """Number of tokens of each layer."""
        self._rows: TokenRows | None = None
        assert isinstance(pages.pool.memory, _vmm.Range)
        with torch.inference_mode(False):  # otherwise it is writable in inference mode only
            self._bytes: torch.Tensor | None = whole_range(pages.pool.memory)
        self._typed = self._bytes
        self._forward = (0, 0)  # tokens before this forward, and its new tokens
        self._last_layer = layers
        self._lost = ""
        self._streams: set[int] | None = None
        self._driver: _vmm.Driver | None = None
        if not device.is_host:
            self._driver = device.driver()
            name_streams(self._driver)
            if torch.cuda.is_available():
                self._streams = {0}

    @property
    def tokens(self) -> int:
        """Number of tokens of the longest layer."""
        return max(self.lengths, default=0)

    @property
    def batch(self) -> int:
        """Number of sequences in the batch; 0 without tokens."""
        return self._rows.batch if self._rows is not None and self.tokens else 0

    def append(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add tokens, `[batch, heads, tokens, dim]`; return views of all tokens of the layer.

        The views are valid until the store is cut or closed. If memory is missing, the call raises
        the errors of `GrowingPages.grow` and changes nothing. Raises `UnsupportedError` for tensors
        that autograd records or layers that differ, `InvalidArgumentError` for another batch or
        device, and `EngineError` if layers disagree on the number of tokens.
        """
        self._check_usable(keys, values)
        start, new = self.lengths[layer], keys.shape[-2]
        if layer <= self._last_layer:
            self._note_stream()
        elif (start, new) != self._forward:
            raise EngineError(
                f"layer {layer} has {start} tokens and gets {new}, and layer {self._last_layer} had"
                f" {self._forward[0]} and got {self._forward[1]}: a forward ended before its last"
                " layer. Call reset() and start again"
            )
        rows = self._rows_for(keys, values, layer)
        self._pages.grow(self._pages_for(rows, start + new))
        self._rows = rows
        typed = self._typed_as(keys.dtype)
        for part, states in ((2 * layer, keys), (2 * layer + 1, values)):
            typed.as_strided(*rows.view(part, start, start + new)).copy_(states)
        self.lengths[layer] = start + new
        self._forward, self._last_layer = (start, new), layer
        return self.view(layer, 0), self.view(layer, 1)

    def view(self, layer: int, which: int, begin: int = 0) -> torch.Tensor:
        """Return a view of a layer's keys (0) or values (1) from token `begin` on.

        The layer must have tokens.
        """
        rows, typed = self._rows, self._typed
        assert rows is not None
        assert typed is not None
        return typed.as_strided(*rows.view(2 * layer + which, begin, self.lengths[layer]))

    def cut(self, lengths: Sequence[int]) -> None:
        """Keep the first `lengths[i]` tokens of layer i; park the unused pages."""
        self._check_open()
        self.lengths = [min(now, most) for now, most in zip(self.lengths, lengths, strict=True)]
        self._last_layer = len(self.lengths)
        if self._rows is not None:
            self._pages.shrink(self._pages_for(self._rows, self.tokens))

    def clear(self) -> None:
        """Remove all tokens and their shape. Blocks until all pages but the first are unmapped."""
        self._check_open()
        self.lengths = [0] * len(self.lengths)
        self._last_layer = len(self.lengths)
        self._rows, self._lost = None, ""
        self._pages.shrink(0, trim=True)

    def reorder(self, layer: int, indices: torch.Tensor) -> None:
        """Copy row `indices[i]` of the batch to row i; the number of rows stays the same."""
        self._check_open()
        if self.lengths[layer] == 0:
            return
        for which in (0, 1):
            view = self.view(layer, which)
            view.copy_(view.index_select(0, indices.to(view.device)))

    def select_rows(self, indices: torch.Tensor) -> None:
        """Replace the batch by the rows `indices`, in that order; a row may occur several times.

        Raises `EngineError` and `InvalidArgumentError`, and the errors of `GrowingPages.grow`. It
        then changes nothing.
        """
        self._check_open()
        old, tokens = self._rows, self.tokens
        if old is None or tokens == 0:
            return
        if set(self.lengths) != {tokens}:
            raise EngineError(f"layers have {sorted(set(self.lengths))} tokens; call reset()")
        if indices.numel() == 0:
            raise InvalidArgumentError("no row of the batch would be left; call reset() instead")
        new = replace(old, batch=indices.numel())
        self._pages.grow(self._pages_for(new, tokens))
        assert self._bytes is not None
        indices = indices.to(self._bytes.device)
        self._lost = "its rows were being moved when that failed"
        for lane in range(old.lanes):
            self._move_rows(lane, old, new, indices)
        self._rows, self._lost = new, ""
        self._pages.shrink(self._pages_for(new, tokens))

    def _move_rows(self, lane: int, old: TokenRows, new: TokenRows, indices: torch.Tensor) -> None:
        """Rewrite a lane in place with rows of another size, with a temporary copy of one chunk.

        Longer rows are written from the last token on, shorter ones from the first. So the unread
        rows are always before, or after, the rows being written::

            old  | 0 | 1 | 2 |              new  | 0 | 1 | 2 |  <- from the first
            new  |  0  |  1  |  2  |  <- from the last
        """
        typed, tokens = self._typed, self.tokens
        assert self._bytes is not None
        assert typed is not None
        old_bytes, new_bytes = old.row_bytes(lane), new.row_bytes(lane)
        start_bytes = old.start_bytes(lane)
        step = max(1, _MOVED_AT_ONCE_BYTES // old_bytes)
        begins = range(0, tokens, step)
        for begin in reversed(begins) if new_bytes > old_bytes else begins:
            end = min(begin + step, tokens)
            first, last = (start_bytes + token * old_bytes for token in (begin, end))
            aside = self._bytes[first:last].clone().view(typed.dtype)
            for part in (one for one in range(2 * old.layers) if old.lane_of(one) == lane):
                rows = aside.as_strided(*old.view_at(part, 0, end - begin))
                target = typed.as_strided(*new.view(part, begin, end))
                target.copy_(rows.index_select(0, indices))

    def copy_to(self, other: TokenStore) -> None:
        """Copy the tokens to the empty store `other`.

        Raises the errors of `GrowingPages.grow`; `other` is then unchanged.
        """
        self._check_open()
        rows = self._rows
        if rows is None:
            return
        mine, others = self._bytes, other._bytes
        assert mine is not None
        assert others is not None
        assert self._typed is not None
        theirs = replace(
            rows,
            lane_stride_bytes=other._geometry.extent_stride_bytes,
            unused_bytes=other._geometry.block_bytes,
        )
        other._pages.grow(other._pages_for(theirs, self.tokens))
        for lane in range(rows.lanes):
            size_bytes = self.tokens * rows.row_bytes(lane)
            target = others[theirs.start_bytes(lane) :][:size_bytes]
            target.copy_(mine[rows.start_bytes(lane) :][:size_bytes])
        other._rows, other.lengths = theirs, list(self.lengths)
        other._typed_as(self._typed.dtype)

    def close(self) -> None:
        """Release the memory. Existing views keep it until they are deleted. Idempotent."""
        if self._bytes is None:
            return
        storage = StorageWeakRef(self._bytes.untyped_storage())
        self._bytes = self._typed = None
        self._pages.close(is_unused=storage.expired())

    def check_integrity(self) -> None:
        """Raise `IntegrityError` if tokens are outside the used pages or the pool's check fails."""
        self._pages.pool.blocks.check_integrity()
        if self._rows is not None:
            needed = self._pages_for(self._rows, self.tokens)
            if needed > self._pages.held:
                raise IntegrityError(
                    f"{self.tokens} tokens need {needed} pages, and {self._pages.held} are in use"
                )

    # --- inside ---------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._bytes is None:
            raise PoolFailedError("the cache is closed; make another one")
        self._pages.refuse_in_a_child()

    def _check_usable(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._check_open()
        assert self._bytes is not None
        if self._lost:
            raise EngineError(f"the cache has lost its contents: {self._lost}; call reset()")
        if keys.requires_grad or values.requires_grad:
            raise UnsupportedError(
                "the cache is not for training: its memory is written in place, which autograd"
                " cannot undo; call the model under torch.no_grad()"
            )
        if keys.device != self._bytes.device or values.device != keys.device:
            raise InvalidArgumentError(
                f"keys on {keys.device} do not go into a cache on {self._bytes.device}; make it"
                " with device=model.device, and for a model on several devices use DynamicCache"
            )

    def _rows_for(self, keys: torch.Tensor, values: torch.Tensor, layer: int) -> TokenRows:
        """Return the current rows after checking the shapes; without tokens, new rows."""
        batch, heads, _, dim = keys.shape
        value_batch, value_heads, new_values, value_dim = values.shape
        now = self._rows
        if now is None or self.tokens == 0:
            if (value_batch, new_values) != (batch, keys.shape[-2]):
                raise InvalidArgumentError(f"keys of {keys.shape} do not go with {values.shape}")
            return TokenRows(
                layers=len(self.lengths),
                batch=batch,
                key=(heads, dim),
                value=(value_heads, value_dim),
                itemsize=keys.dtype.itemsize,
                lane_stride_bytes=self._geometry.extent_stride_bytes,
                unused_bytes=self._geometry.block_bytes,
                is_one_lane=self._geometry.extents_per_page == 1,
            )
        assert self._typed is not None
        if batch != now.batch or value_batch != now.batch:
            raise InvalidArgumentError(
                f"the cache has tokens of {now.batch} sequences and gets those of {batch}; call"
                " reset() first, or batch_repeat_interleave()"
            )
        if ((heads, dim), (value_heads, value_dim)) != (now.key, now.value):
            raise UnsupportedError(
                f"layer {layer} has keys and values of {(heads, dim)} and"
                f" {(value_heads, value_dim)} heads and dimensions, and others {now.key} and"
                f" {now.value}: all layers of a model must be alike; use DynamicCache"
            )
        if keys.dtype != self._typed.dtype or values.dtype != keys.dtype:
            raise UnsupportedError(
                f"layer {layer} has {keys.dtype} and {values.dtype}, and others"
                f" {self._typed.dtype}: all must be alike; use DynamicCache"
            )
        return now

    def _typed_as(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the range viewed as the cache's dtype."""
        assert self._bytes is not None
        if self._typed is None or self._typed.dtype != dtype:
            with torch.inference_mode(False):
                self._typed = self._bytes.view(dtype)
        return self._typed

    def _pages_for(self, rows: TokenRows, tokens: int) -> int:
        return -(-rows.needed_bytes(tokens) // self._geometry.extent_bytes)

    def _note_stream(self) -> None:
        """Register the current stream with a GPU's driver as a user of the pages."""
        if self._streams is None:
            return
        assert isinstance(self._driver, _vmm.CudaDriver)
        stream = int(torch.cuda.current_stream(self._driver.ordinal).cuda_stream)
        if stream not in self._streams:
            self._streams.add(stream)
            self._driver.use_streams(sorted(self._streams))
