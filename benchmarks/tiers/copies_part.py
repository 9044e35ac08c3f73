"""Copies between blocks and staging, beside memcpy of the same pieces.

A block of SmolLM2-135M lies in 60 pieces of 12 KiB (30 layers, K and V, 16 tokens); one of 1 MiB
pieces is what a large model has. The floor copies the same pieces by numpy's memcpy, one call for
each block.
"""

from __future__ import annotations

import ctypes

import numpy as np

from benchmarks.harness import Figure, per_call_us
from kvelastic import _vmm
from kvelastic.pool.layout import PageLayout
from kvelastic.pool.pool import native_geometry

BLOCKS = 16
ROUNDS = 15
HUGE = 2 << 20


class _Memory:
    def __init__(self, block_bytes: int, buffers: int) -> None:
        per_page = 8
        page_bytes = -(-per_page * buffers * block_bytes // HUGE) * HUGE
        self.layout = PageLayout(block_bytes, buffers, per_page, page_bytes)
        pages = BLOCKS // per_page + 2
        self.range = _vmm.Range.reserve(_vmm.HostDriver(), native_geometry(self.layout, pages))
        total = pages * page_bytes
        self.pool = _vmm.Pool(
            self.range,
            max_blocks=pages * per_page,
            limit_bytes=total,
            capacity_bytes=total,
            preallocate=False,
        )
        ids = self.pool.alloc(BLOCKS)
        assert ids is not None
        self.ids = ids
        self.staging = _vmm.Staging(BLOCKS, self.pool.record_bytes)
        self.slots = list(range(BLOCKS))
        addresses = (ctypes.c_uint8 * self.range.range_bytes).from_address(self.range.address)
        flat = np.ctypeslib.as_array(addresses)
        row = per_page * block_bytes
        self.blocks = [
            np.lib.stride_tricks.as_strided(
                flat[self.layout.offset_bytes(block, 0, pages) :],
                shape=(buffers, block_bytes),
                strides=(row, 1),
            )
            for block in ids
        ]
        self.records = [
            np.frombuffer(self.staging.view(slot), np.uint8).reshape(buffers, block_bytes)
            for slot in self.slots
        ]
        for block in self.blocks:
            block[:] = 1

    def out(self) -> None:
        self.pool.copy_out(self.ids, self.staging, self.slots)

    def back(self) -> None:
        self.pool.copy_in(self.staging, self.slots, self.ids)

    def memcpy_out(self) -> None:
        for record, block in zip(self.records, self.blocks, strict=True):
            np.copyto(record, block)

    def memcpy_back(self) -> None:
        for record, block in zip(self.records, self.blocks, strict=True):
            np.copyto(block, record)


def figures() -> list[Figure]:
    """GB/s of both ways for two shapes of blocks; the ratio is to memcpy's."""
    rows = []
    for name, block_bytes, buffers in (("60 x 12 KiB", 12 << 10, 60), ("4 x 1 MiB", 1 << 20, 4)):
        memory = _Memory(block_bytes, buffers)
        total = BLOCKS * memory.pool.record_bytes
        for way, call, floor in (
            ("out", memory.out, memory.memcpy_out),
            ("in", memory.back, memory.memcpy_back),
        ):
            figure = Figure(
                f"copy {way}, blocks of {name}", "GB/s", [], ">= 0.9", floor_name="memcpy"
            )
            control = Figure(
                f"control: memcpy {way} of {name}", "GB/s", [], "", floor_name="memcpy"
            )
            for _ in range(ROUNDS):
                for target, one in (
                    (figure.samples, call),
                    (figure.floor_samples, floor),
                    (control.samples, floor),
                ):
                    target.append(total / per_call_us(one, 3) / 1e3)
            control.floor_samples = figure.floor_samples
            rows += [figure, control]
    return rows
