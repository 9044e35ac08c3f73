"""Tensors by handle: what can be handed over, what comes out there, and what is refused."""

from __future__ import annotations

import copy
import mmap
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from waiting import DEADLINE_S

from kvelastic import _vmm
from kvelastic.errors import DriverError, InvalidArgumentError, KvelasticError, UnsupportedError
from kvelastic.flexkv.common import process_mappings
from kvelastic.flexkv.common.memory_handle import (
    Buffer,
    TensorDescription,
    TensorSharedHandle,
    shared_zeros,
)
from kvelastic.flexkv.transfer.shared_blocks import SharedBlocks

pytestmark = pytest.mark.slow


ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _no_descriptor_left() -> Iterator[None]:
    before = len(list(Path("/proc/self/fd").iterdir()))
    yield
    import gc

    gc.collect()
    assert len(list(Path("/proc/self/fd").iterdir())) <= before


def there(handle: TensorSharedHandle) -> np.ndarray[Any, Any]:
    """As another process would see it."""
    other = TensorSharedHandle.of(handle.description, os.dup(handle.fd))
    seen = other.get_tensor()
    other.close()
    return seen


def test_handle_maps_same_bytes_in_another_process() -> None:
    ours, theirs = socket.socketpair()
    kv = shared_zeros((3, 4, 5), "float32")
    kv[:] = np.arange(60).reshape(3, 4, 5)
    handle = TensorSharedHandle(kv[:, 1:])
    program = (
        "import socket, sys, numpy as np;"
        "from kvelastic.flexkv.common.memory_handle import *;"
        "s = socket.socket(fileno=int(sys.argv[1])); _, fds, _, _ = socket.recv_fds(s, 1, 1);"
        f"t = TensorSharedHandle.of({handle.description!r}, fds[0]).get_tensor();"
        "assert (t == np.arange(60).reshape(3, 4, 5)[:, 1:]).all(); t[2, 2, 4] = 99"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program, str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        cwd=ROOT,
    )
    socket.send_fds(ours, [b"x"], [handle.fd])
    assert child.wait(DEADLINE_S) == 0
    assert kv[2, 3, 4] == 99
    handle.close()
    ours.close()
    theirs.close()


@pytest.mark.parametrize("duplicate", [pickle.dumps, copy.copy, copy.deepcopy])
def test_handle_refuses_pickle_and_copy(duplicate: Any) -> None:
    handle = TensorSharedHandle(shared_zeros(64))
    for one in (handle, TensorSharedHandle.of(handle.description, os.dup(handle.fd))):
        with pytest.raises(UnsupportedError, match="send_fds"):
            duplicate(one)
        one.close()


def test_handles_of_torch_shared_memory() -> None:
    import torch

    flat = shared_zeros(64, "bfloat16")
    kv = torch.from_numpy(flat).view(torch.bfloat16).reshape(4, 16)
    kv[1] = 1.5
    handle = TensorSharedHandle(kv[1])
    assert handle.description.dtype == "bfloat16"
    assert (there(handle) == 0x3FC0).all()
    own = torch.zeros(1000).share_memory_()
    own[999] = 2
    shared = TensorSharedHandle(own)
    assert shared.description.span_bytes == 4000
    mapped = SharedBlocks([(os.dup(shared.fd), Buffer(0, 4, 4))], 1000)
    del mapped


def test_named_memory_without_descriptor_is_opened_by_name(tmp_path: Path) -> None:
    import torch

    named = torch.from_file(str(tmp_path / "kv"), shared=True, size=16, dtype=torch.int32)
    named[3] = 7
    handle = TensorSharedHandle(named)
    assert np.frombuffer(os.pread(handle.fd, 64, 0), "int32")[3] == 7
    with pytest.raises(InvalidArgumentError, match="could be shortened"):
        handle.get_tensor()
    handle.close()
    (tmp_path / "kv").unlink()
    with pytest.raises(InvalidArgumentError, match="no name and no open descriptor"):
        TensorSharedHandle(named)


def test_private_memory_is_refused() -> None:
    import torch

    for tensor in (np.zeros(1 << 20), torch.zeros(1 << 20), np.zeros(3)):
        with pytest.raises(InvalidArgumentError, match="shared_zeros"):
            TensorSharedHandle(tensor)
    for nothing in (object(), [1, 2], b"bytes"):
        with pytest.raises(InvalidArgumentError, match="no tensor"):
            TensorSharedHandle(nothing)
    with tempfile.TemporaryFile() as file:
        file.truncate(8192)
        private = mmap.mmap(file.fileno(), 8192, flags=mmap.MAP_PRIVATE)
        array = np.frombuffer(private, np.uint8)
        with pytest.raises(InvalidArgumentError, match="alone"):
            TensorSharedHandle(array)
        del array
        private.close()


def test_adjacent_mappings_are_parsed_separately() -> None:
    mapping = process_mappings.Mapping
    lines = (
        "7f0000000000-7f0000001000 rw-s 00000000 00:01 11 /memfd:a (deleted)\n"
        "7f0000001000-7f0000002000 rw-s 00001000 00:01 11 /memfd:a (deleted)\n"
        "7f0000002000-7f0000003000 rw-p 00000000 00:00 0 \n"
    )
    parsed = list(process_mappings.parse(lines))
    assert parsed[1] == mapping(
        0x7F0000001000, 0x7F0000002000, True, False, 0x1000, (0, 1), 11, "/memfd:a (deleted)"
    )
    assert (parsed[2].is_shared, parsed[2].path) == (False, "")


def test_gpu_memory_without_descriptor_is_refused() -> None:
    import torch

    class OnAGpu:
        dtype, shape = torch.float16, (4, 4)
        device = torch.device("cuda:0")

        def data_ptr(self) -> int:
            return 1 << 40

        def element_size(self) -> int:
            return 2

        def stride(self) -> tuple[int, int]:
            return (4, 1)

    with pytest.raises(UnsupportedError, match="kvelastic"):
        TensorSharedHandle(OnAGpu())


# --- what a peer may say --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "lie",
    [
        TensorDescription(0, (), (), "int8", 1),
        TensorDescription(0, (4,), (1, 1), "int8", 1),
        TensorDescription(0, (0,), (1,), "int8", 1),
        TensorDescription(-1, (4,), (1,), "int8", 1),
        TensorDescription(0, (4,), (-1,), "int8", 1),
        TensorDescription(0, (4,), (1,), "int8", 0),
        TensorDescription(1, (4096,), (1,), "int8", 1),
        TensorDescription(0, (2, 2), (4096, 1), "int8", 1),
        TensorDescription(0, (1 << 60, 1 << 60), (0, 0), "int8", 1),
        TensorDescription(0, (1,) * 9, (1,) * 9, "int8", 1),
    ],
)
def test_tensor_description_outside_its_memory_is_refused(lie: TensorDescription) -> None:
    fd = os.memfd_create("lie")
    os.ftruncate(fd, 4096)
    with pytest.raises(InvalidArgumentError):
        TensorSharedHandle.of(lie, fd)


whole = st.integers(-(1 << 63), 1 << 63)
small = st.integers(-2, 70)


@given(
    st.builds(
        TensorDescription,
        offset=whole | small,
        shape=st.lists(whole | small, max_size=10).map(tuple),
        strides_bytes=st.lists(whole | small, max_size=10).map(tuple),
        dtype=st.text(max_size=8),
        item_bytes=whole | small,
    ),
    st.integers(-3, 12),
)
def test_random_descriptions_are_refused_or_within_memory(
    said: TensorDescription, axis: int
) -> None:
    try:
        said.check(4096)
        buffers = said.buffers(axis)
    except InvalidArgumentError:
        return
    count = said.shape[axis]
    for buffer in buffers:
        assert buffer.offset >= 0
        assert buffer.offset + (count - 1) * buffer.stride_bytes + buffer.block_bytes <= 4096


# --- blocks ---------------------------------------------------------------------------------------

SHAPES = {
    "a layer, K and V apart": ((2, 6, 4, 3, 8), 1, 2),
    "a layer, blocks first": ((6, 2, 4, 3, 8), 0, 1),
    "all layers, blocks first": ((6, 5, 2, 4, 3, 8), 0, 1),
    "all layers in front": ((5, 2, 6, 4, 3, 8), 2, 10),
}


@pytest.mark.parametrize("name", SHAPES)
def test_blocks_are_copied_out_and_in_unchanged(name: str) -> None:
    shape, axis, runs = SHAPES[name]
    kv = shared_zeros(shape, "float16")
    kv[...] = np.random.default_rng(1).random(shape)
    handle = TensorSharedHandle(kv)
    buffers = handle.description.buffers(axis)
    assert len(buffers) == runs
    blocks = SharedBlocks([(os.dup(handle.fd), buffer) for buffer in buffers], shape[axis])
    staging = _vmm.Staging(4, 2 * blocks.record_bytes)
    blocks.copy_out([5, 0], staging, [1, 3], offset_bytes=blocks.record_bytes)
    for block, slot in ((5, 1), (0, 3)):
        record = bytes(staging.view(slot)[blocks.record_bytes :])
        assert record == np.take(kv, block, axis).tobytes()
    expected = kv.copy()
    moved = np.moveaxis(expected, axis, 0)
    moved[2] = moved[5]
    blocks.copy_in(staging, [1], [2], offset_bytes=blocks.record_bytes)
    assert (kv == expected).all()
    blocks.close()
    handle.close()


def test_permuted_heads_give_one_contiguous_buffer() -> None:
    import torch

    kv = shared_zeros((6, 4, 3, 8), "float16")  # blocks, tokens, heads, size
    seen = TensorSharedHandle(torch.from_numpy(kv).permute(0, 2, 1, 3))
    assert seen.description.buffers(0) == [Buffer(0, 192, 192)]


def test_unknown_block_id_copies_nothing() -> None:
    blocks = blocks_over(os.memfd_create("m"), 4096)
    staging = _vmm.Staging(2, 1024)
    staging.view(0)[:4] = b"kept"
    for ids in ([0, 4], [-1]):
        with pytest.raises(InvalidArgumentError, match="is none of 4"):
            blocks.copy_out(ids, staging, [0, 1][: len(ids)])
    assert bytes(staging.view(0)[:4]) == b"kept"
    blocks.close()


def blocks_over(fd: int, size_bytes: int) -> SharedBlocks:
    os.ftruncate(fd, size_bytes)
    return SharedBlocks([(fd, Buffer(0, 1024, 1024))], 4)


def test_truncated_memory_fails_only_that_copy() -> None:
    fd = os.memfd_create("m")
    blocks = blocks_over(fd, 4096)
    staging = _vmm.Staging(1, 1024)
    os.ftruncate(fd, 3 * 1024 + 100)
    with pytest.raises(DriverError, match="shortened"):
        blocks.copy_out([3], staging, [0])
    blocks.copy_out([2], staging, [0])
    blocks.close()


def test_close_during_copy_keeps_the_descriptor_open() -> None:
    read_end, write_end = os.pipe()
    fd = os.memfd_create("m")
    os.ftruncate(fd, 64)
    blocks = SharedBlocks([(fd, Buffer(0, 8, 8))], 4)
    is_copying = threading.Event()

    class Staging:
        slots, record_bytes = 1, 8

        def view(self, slot: int) -> memoryview:
            is_copying.set()
            os.read(read_end, 1)  # in the middle of a copy until the test goes on
            return memoryview(bytearray(8))

    results: list[object] = []

    def copy() -> None:
        try:
            blocks.copy_out([0], Staging(), [0])
            results.append(None)
        except KvelasticError as error:
            results.append(error)

    thread = threading.Thread(target=copy)
    thread.start()
    assert is_copying.wait(DEADLINE_S)
    blocks.close()
    os.fstat(fd)  # open as long as the copy is under way
    with pytest.raises(DriverError, match="has gone"):
        blocks.copy_in(Staging(), [0], [0])
    os.write(write_end, b"x")
    thread.join()
    assert results == [None]
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)
    blocks.close()
    os.close(read_end)
    os.close(write_end)
