"""Shares tensors with other processes: a descriptor of their memory, and their position in it.

    kv = shared_zeros((layers, 2, blocks, tokens, heads, head_size), "float16")   # in a memfd
    handle = TensorSharedHandle(kv)
    ...                                     # its description and fd go to the other process
    there = TensorSharedHandle.of(description, fd).get_tensor()                   # the same bytes

The kernel passes the descriptor with a message, so there is no name that another user could open,
and no pickle. Any other shared mapping of a file can be shared as well.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import weakref
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, NoReturn

import numpy as np

from kvelastic.errors import InvalidArgumentError, UnsupportedError
from kvelastic.flexkv.common import process_mappings
from kvelastic.flexkv.common.config import dtype_name, item_bytes

MOST_AXES: Final = 8
MOST_BYTES: Final = 1 << 46


class Buffer(NamedTuple):
    """Bytes of blocks in one file: block `b` has `block_bytes` at `offset + b * stride_bytes`."""

    offset: int
    stride_bytes: int
    block_bytes: int

    def part(self, address: int) -> tuple[int, int, int, int, int]:
        """Return it as a part of `_vmm.EngineBlocks`, for a file that is mapped at `address`."""
        return (address + self.offset, self.stride_bytes, self.block_bytes, 1, self.block_bytes)


class TensorDescription(NamedTuple):
    """A tensor without its memory: plain values, possibly from another process."""

    offset: int
    """Offset of the first element in the memory."""
    shape: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    dtype: str
    item_bytes: int

    def check(self, memory_bytes: int) -> None:
        """Raise `InvalidArgumentError` unless the tensor is within a memory of that size."""
        if not 0 < len(self.shape) <= MOST_AXES or len(self.strides_bytes) != len(self.shape):
            raise InvalidArgumentError(f"a tensor of the shape {self.shape} is not accepted")
        counts = (self.item_bytes, *self.shape)
        if min(counts) < 1 or max(counts) > MOST_BYTES or min(self.strides_bytes) < 0:
            raise InvalidArgumentError(
                f"a tensor of the shape {self.shape} with strides of {self.strides_bytes} bytes is"
                " not accepted"
            )
        if not 0 <= self.offset <= memory_bytes - self.span_bytes:
            raise InvalidArgumentError(
                f"a tensor that spans {self.span_bytes} bytes from {self.offset} on does not lie in"
                f" its memory of {memory_bytes} bytes"
            )

    @property
    def span_bytes(self) -> int:
        """Bytes from the first to the last byte of the tensor."""
        steps = zip(self.shape, self.strides_bytes, strict=True)
        return self.item_bytes + sum((size - 1) * stride for size, stride in steps)

    def buffers(self, block_axis: int) -> list[Buffer]:
        """Return the blocks along an axis: one buffer for each contiguous run of a block's bytes.

        Runs are in the order of the axes. Within a run, bytes are in memory order. Raises
        `InvalidArgumentError` if blocks share bytes or have too many runs.
        """
        if not 0 <= block_axis < len(self.shape):
            raise InvalidArgumentError(f"a tensor of the shape {self.shape} has no {block_axis=}")
        axes = [axis for axis in range(len(self.shape)) if axis != block_axis]
        run_bytes, outer = self._dense_run(axes)
        offsets = [self.offset]
        for axis in outer:
            if len(offsets) * self.shape[axis] > MOST_RUNS:
                raise InvalidArgumentError(
                    f"a block of the shape {self.shape} lies in more than {MOST_RUNS} pieces"
                )
            stride = self.strides_bytes[axis]
            offsets = [at + step * stride for at in offsets for step in range(self.shape[axis])]
        stride = self.strides_bytes[block_axis]
        if self.shape[block_axis] > 1 and stride < run_bytes:
            raise InvalidArgumentError(
                f"blocks of {run_bytes} bytes that are {stride} bytes apart share some"
            )
        return [Buffer(at, stride, run_bytes) for at in offsets]

    def _dense_run(self, axes: Sequence[int]) -> tuple[int, list[int]]:
        """Return the bytes of a run, and the axes outside it, in order."""
        run_bytes = self.item_bytes
        inner = set()
        for axis in sorted(axes, key=lambda axis: self.strides_bytes[axis]):
            if self.shape[axis] != 1 and self.strides_bytes[axis] != run_bytes:
                break
            run_bytes *= self.shape[axis]
            inner.add(axis)
        return run_bytes, [axis for axis in axes if axis not in inner]


MOST_RUNS: Final = 4096


class TensorSharedHandle:
    """One tensor and a descriptor of its memory, owned by the handle. Not thread-safe."""

    def __init__(self, tensor: Any) -> None:
        """Share a NumPy array or a torch tensor on the CPU whose memory is a shared file mapping.

        Raises `InvalidArgumentError` for private memory, and `UnsupportedError` for GPU memory
        without a descriptor.
        """
        address, description = describe(tensor)
        if getattr(getattr(tensor, "device", None), "type", "cpu") == "cuda":
            raise UnsupportedError(
                "memory that cudaMalloc gave has no file descriptor: let kvelastic allocate it"
                " (kvelastic.kvcached.embedded), and register its range"
            )
        mapping, offset = process_mappings.behind(address, description.span_bytes)
        self.is_elastic = offset is None
        """Whether pages are mapped and unmapped behind the tensor.

        Its offset is then its address: the owner reports the pages' file offsets for each copy.
        """
        offset = address if offset is None else offset
        self.description = description._replace(offset=offset)
        self.fd = process_mappings.descriptor_of(mapping)
        self._closing = weakref.finalize(self, os.close, self.fd)

    @classmethod
    def of(cls, description: TensorDescription, fd: int) -> TensorSharedHandle:
        """Create a handle for a tensor that another process described; it owns the descriptor.

        Raises `InvalidArgumentError`, and closes the descriptor, if the tensor is not within the
        memory.
        """
        handle = cls.__new__(cls)
        handle.description, handle.fd, handle.is_elastic = description, fd, False
        handle._closing = weakref.finalize(handle, os.close, fd)
        try:
            description.check(os.fstat(fd).st_size)
        except BaseException:
            handle.close()
            raise
        return handle

    def __reduce__(self) -> NoReturn:
        """Raise `UnsupportedError`: a descriptor's number means other memory in another process."""
        raise UnsupportedError(
            f"a TensorSharedHandle cannot be pickled or copied: descriptor {self.fd} is other"
            " memory in another process; send the descriptor over a Unix socket"
            " (socket.send_fds), and make the handle there by TensorSharedHandle.of(description,"
            " fd)"
        )

    def get_tensor(self) -> np.ndarray[Any, Any]:
        """Return the tensor as a NumPy array over the shared memory; it outlives the handle.

        A dtype that NumPy lacks (bfloat16) becomes integers of its size. Raises
        `InvalidArgumentError` for memory that its owner can truncate: an access beyond its end
        would end this process.
        """
        if not _cannot_shrink(self.fd):
            raise InvalidArgumentError(
                "this memory could be shortened while it is looked at; seal it (F_SEAL_SHRINK), as"
                " shared_zeros does, or read it by its descriptor"
            )
        memory = mmap.mmap(self.fd, 0)
        one = self.description
        tensor: np.ndarray[Any, Any] = np.ndarray(
            one.shape, _numpy_type(one), buffer=memory, offset=one.offset, strides=one.strides_bytes
        )
        return tensor

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        self._closing()


def describe(tensor: Any) -> tuple[int, TensorDescription]:
    """Return the address and the description of a torch tensor or a NumPy array."""
    if hasattr(tensor, "data_ptr"):
        size = int(tensor.element_size())
        strides = tuple(int(stride) * size for stride in tensor.stride())
        address = int(tensor.data_ptr())
    elif isinstance(tensor, np.ndarray):
        size, strides, address = tensor.itemsize, tensor.strides, int(tensor.ctypes.data)
    else:
        raise InvalidArgumentError(
            f"a {type(tensor).__name__} is no tensor; give NumPy's arrays or torch's tensors"
        )
    shape = tuple(int(count) for count in tensor.shape)
    return address, TensorDescription(0, shape, strides, dtype_name(tensor.dtype), size)


def shared_zeros(shape: int | Sequence[int], dtype: Any = "uint8") -> np.ndarray[Any, Any]:
    """Return a NumPy array of zeros in a sealed memfd, which can be shared with other processes.

    The memory is released with the last process that uses it. A dtype that NumPy lacks becomes
    integers of its size; use `torch.from_numpy(...).view(...)`.
    """
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    size_bytes = math.prod(shape) * item_bytes(dtype)
    if not 0 < size_bytes <= MOST_BYTES:
        raise InvalidArgumentError(f"an array of the shape {shape} is not accepted")
    fd = os.memfd_create("kvelastic-flexkv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size_bytes)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        memory = mmap.mmap(fd, size_bytes)
    except BaseException:
        os.close(fd)
        raise
    weakref.finalize(memory, os.close, fd)  # later found by its mapping
    described = TensorDescription(0, shape, (), dtype_name(dtype), item_bytes(dtype))
    array: np.ndarray[Any, Any] = np.ndarray(shape, _numpy_type(described), buffer=memory)
    return array


def _numpy_type(description: TensorDescription) -> np.dtype[Any]:
    try:
        found = np.dtype(description.dtype)
    except TypeError:
        found = None
    if found is not None and found.itemsize == description.item_bytes and not found.hasobject:
        return found
    size = description.item_bytes
    return np.dtype(f"u{size}" if size in (1, 2, 4, 8) else f"V{size}")


def _cannot_shrink(fd: int) -> bool:
    try:
        return bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:  # no memfd
        return False
