"""Copies between addresses of this process.

    copy_runs(pairs, sources, targets, trusted=True)

Memory of this process's own pools is *trusted*: it is pinned, so the fastest copy is used. Memory
registered by a caller may have been unmapped, or may lie in a range with unmapped pages. There the
kernel copies, and a fault becomes `LLM_PARAM_INVALID` instead of killing the process.
"""

from __future__ import annotations

import ctypes
import time
from array import array
from collections.abc import Sequence
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
    of_pieces = _vmm.pack_pieces([(sources[of.tensor] + of.offset, of.size) for of, _ in pairs])
    to_pieces = _vmm.pack_pieces([(targets[to.tensor] + to.offset, of.size) for of, to in pairs])
    if gpu is not None:
        gpu.drain()
    for source, target, _ in _vmm.portions_of_pieces(
        of_pieces, to_pieces, _MOST_RUNS_A_CALL, _MOST_BYTES_A_CALL
    ):
        if time.monotonic() > deadline_s:
            raise failure(
                LLMStatusCode.LLM_TIMEOUT,
                "the copy has taken longer than sync_kv_timeout and is not complete",
            )
        if gpu is not None:
            _vmm.copy_pieces_on_gpu(gpu, source, target)  # it knows who owns an address
        elif trusted:
            _copy_trusted(source, target)
        else:
            _copy_by_kernel(source, target)


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


def _copy_trusted(sources: bytes, targets: bytes) -> None:
    """Copy packed pieces to others of the same sizes."""
    of, to = array("Q", sources), array("Q", targets)
    for source, target, size in zip(of[::2], to[::2], of[1::2], strict=True):
        ctypes.memmove(target, source, size)


def _copy_by_kernel(sources: bytes, targets: bytes) -> None:
    """Copy by the kernel, so that a fault is an error. Works if process_vm_readv(2) is denied."""
    try:
        _vmm.copy_pieces(sources, targets)
    except MappingError as error:
        raise LLMParamError(
            "memory of a cache is not there, and the copy is not complete. Keep registered memory"
            " mapped until unregister_cache"
        ) from error
    except DeviceUnavailableError as error:
        raise failure(LLMStatusCode.LLM_FAILED, str(error)) from error
