"""Copies between addresses of this process.

copy_runs(pairs, sources, targets, trusted=True)

Memory of an own pool is *trusted*: it is pinned, and copied in the fastest way. What a caller has
registered may be gone meanwhile, or may be a range of which pages are not mapped: the kernel copies
that, and says so (`LLM_PARAM_INVALID`) where the process would otherwise die of it.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from math import inf
from typing import Final

from kvelastic import _vmm
from kvelastic.datadist.pieces import Run
from kvelastic.datadist.status import LLMException, LLMParamError, LLMStatusCode
from kvelastic.errors import DeviceUnavailableError, MappingError

_MOST_RUNS_A_CALL: Final = 1024
_MOST_BYTES_A_CALL: Final = 64 << 20
"""What is copied between two looks at the clock."""


def copy_runs(
    pairs: Sequence[tuple[Run, Run]],
    sources: Sequence[int],
    targets: Sequence[int],
    *,
    trusted: bool,
    on_gpu: bool = False,
    deadline_s: float = inf,
) -> None:
    """Copy each run of `sources` to its run of `targets` (addresses by tensor), in order.

    Blocks, without Python's lock. Raises `LLMParamError` where memory is not there, `LLM_TIMEOUT`
    past a deadline (of `time.monotonic`), `LLM_FAILED` where a GPU's driver refuses; what comes
    before that in the order is copied then.
    """
    moves = [
        (targets[to.tensor] + to.offset, sources[of.tensor] + of.offset, of.size)
        for of, to in pairs
    ]
    copy = _copy_on_gpu if on_gpu else _copy_here if trusted else _copy_by_kernel
    for portion in _portions(moves):
        if time.monotonic() > deadline_s:
            raise LLMException(
                "the copy has taken longer than sync_kv_timeout and is not complete",
                status_code=LLMStatusCode.LLM_TIMEOUT,
            )
        copy(portion)


def copy_to_host(address: int, view: memoryview, *, on_gpu: bool) -> None:
    """Fill a buffer of this process from an address of an own cache. As `copy_runs`."""
    into = (ctypes.c_char * view.nbytes).from_buffer(view)
    size = view.nbytes
    copy_runs(
        [(Run(0, 0, size), Run(0, 0, size))],
        [address],
        [ctypes.addressof(into)],
        trusted=False,
        on_gpu=on_gpu,
    )


def _portions(
    moves: Iterable[tuple[int, int, int]],
) -> Iterator[list[tuple[int, int, int]]]:
    """Moves in the portions that are copied between two looks at the clock."""
    portion: list[tuple[int, int, int]] = []
    left = _MOST_BYTES_A_CALL
    for to, of, size in moves:
        done = 0
        while done < size:
            step = min(size - done, left)
            portion.append((to + done, of + done, step))
            done += step
            left -= step
            if not left or len(portion) == _MOST_RUNS_A_CALL:
                yield portion
                portion, left = [], _MOST_BYTES_A_CALL
    if portion:
        yield portion


def _copy_here(moves: Sequence[tuple[int, int, int]]) -> None:
    for to, of, size in moves:
        ctypes.memmove(to, of, size)


def _copy_by_kernel(moves: Sequence[tuple[int, int, int]]) -> None:
    """A fault is an answer, also where a sandbox denies process_vm_readv(2)."""
    sources = _vmm.pack_pieces([(of, size) for _, of, size in moves])
    targets = _vmm.pack_pieces([(to, size) for to, _, size in moves])
    try:
        _vmm.copy_pieces(sources, targets)
    except MappingError as error:
        raise LLMParamError(
            "memory of a cache is not there, and the copy is not complete. Keep registered memory"
            " mapped until unregister_cache"
        ) from error
    except DeviceUnavailableError as error:
        raise LLMException(str(error), status_code=LLMStatusCode.LLM_FAILED) from error


def _copy_on_gpu(moves: Sequence[tuple[int, int, int]]) -> None:
    """cuMemcpy knows by the address on which side each end lies; in the default stream."""
    cuda, context = _cuda()
    _check(cuda.cuCtxPushCurrent_v2(context), "cuCtxPushCurrent")
    try:
        for to, of, size in moves:
            _check(cuda.cuMemcpy(ctypes.c_ulonglong(to), ctypes.c_ulonglong(of), size), "cuMemcpy")
    finally:
        cuda.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))


@lru_cache(maxsize=1)
def _cuda() -> tuple[ctypes.CDLL, ctypes.c_void_p]:
    """The driver and a primary context; unified addresses reach the memory of any device."""
    cuda = ctypes.CDLL("libcuda.so.1")
    cuda.cuMemcpy.argtypes = [ctypes.c_ulonglong, ctypes.c_ulonglong, ctypes.c_size_t]
    _check(cuda.cuInit(0), "cuInit")
    context = ctypes.c_void_p()
    _check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0), "cuDevicePrimaryCtxRetain")
    return cuda, context


def _check(result: int, call: str) -> None:
    if result:
        raise LLMException(
            f"{call} answered CUDA's error {result}", status_code=LLMStatusCode.LLM_FAILED
        )
