"""Copies between addresses of this process.

    copy_runs(pairs, sources, targets, trusted=True)

Memory of this process's own pools is *trusted*: it is pinned, so the fastest copy is used. Memory
registered by a caller may have been unmapped, or may lie in a range with unmapped pages. There the
kernel copies, and a fault becomes `LLM_PARAM_INVALID` instead of killing the process.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterable, Iterator, Sequence
from math import inf
from typing import Final

from kvelastic import _vmm
from kvelastic.datadist.cache_layout import Run
from kvelastic.datadist.status import LLMParamError, LLMStatusCode, failure
from kvelastic.errors import DeviceUnavailableError, MappingError

_MOST_RUNS_A_CALL: Final = 1024
_MOST_BYTES_A_CALL: Final = 64 << 20
"""Bytes copied between two checks of the deadline."""


def copy_runs(
    pairs: Sequence[tuple[Run, Run]],
    sources: Sequence[int],
    targets: Sequence[int],
    *,
    trusted: bool,
    gpu: _vmm.CudaDriver | None = None,
    deadline_s: float = inf,
) -> None:
    """Copy each run of `sources` to its run of `targets` (addresses by tensor), in order.

    `gpu` is the driver of the GPU that holds a source or target. The copy then waits for work
    queued earlier in the streams that the driver knows. `deadline_s` is a `time.monotonic` time.

    Blocks; releases the GIL. Raises `LLMParamError` if memory is not mapped, `LLM_TIMEOUT` after
    the deadline, and `DriverError` if the GPU's driver fails. Earlier runs are copied in that case.
    """
    moves = [
        (targets[to.tensor] + to.offset, sources[of.tensor] + of.offset, of.size)
        for of, to in pairs
    ]
    if gpu is not None:
        gpu.drain()
    for portion in _portions(moves):
        if time.monotonic() > deadline_s:
            raise failure(
                LLMStatusCode.LLM_TIMEOUT,
                "the copy has taken longer than sync_kv_timeout and is not complete",
            )
        if gpu is not None:
            _vmm.copy_pieces_on_gpu(gpu, *_packed(portion))  # it knows who owns an address
        elif trusted:
            for to, of, size in portion:
                ctypes.memmove(to, of, size)
        else:
            _copy_by_kernel(portion)


def copy_to_host(address: int, view: memoryview, *, gpu: _vmm.CudaDriver | None) -> None:
    """Fill a buffer of this process from an address of a local cache.

    Raises as `copy_runs` does.
    """
    into = (ctypes.c_char * view.nbytes).from_buffer(view)
    size = view.nbytes
    copy_runs(
        [(Run(0, 0, size), Run(0, 0, size))],
        [address],
        [ctypes.addressof(into)],
        trusted=False,
        gpu=gpu,
    )


def _portions(moves: Iterable[tuple[int, int, int]]) -> Iterator[list[tuple[int, int, int]]]:
    """Split moves into the portions that are copied between two checks of the deadline."""
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


def _packed(moves: Sequence[tuple[int, int, int]]) -> tuple[bytes, bytes]:
    sources = _vmm.pack_pieces([(of, size) for _, of, size in moves])
    return sources, _vmm.pack_pieces([(to, size) for to, _, size in moves])


def _copy_by_kernel(moves: Sequence[tuple[int, int, int]]) -> None:
    """Copy by the kernel, so that a fault is an error. Works if process_vm_readv(2) is denied."""
    try:
        _vmm.copy_pieces(*_packed(moves))
    except MappingError as error:
        raise LLMParamError(
            "memory of a cache is not there, and the copy is not complete. Keep registered memory"
            " mapped until unregister_cache"
        ) from error
    except DeviceUnavailableError as error:
        raise failure(LLMStatusCode.LLM_FAILED, str(error)) from error
