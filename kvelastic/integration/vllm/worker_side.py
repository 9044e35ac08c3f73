"""A worker of vLLM on kvelastic: an arena replaces its KV cache allocation.

vLLM allocates the whole KV cache with one call, `torch.zeros(size, dtype=int8)`, and creates views
of it. While `as_kv_allocation` is active, that call returns the arena's range: as many addresses,
of which only the pages that the scheduler has requested are mapped. A native thread executes these
requests; no Python runs for them.

Imports torch, so only worker processes import it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.util import Finalize
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from kvelastic import _vmm, config
from kvelastic.device.selection import reserve_range
from kvelastic.errors import EngineError, SegmentNotFoundError
from kvelastic.integration.vllm.handoff import Handoff
from kvelastic.integration.vllm.worker_device import WorkerDevice
from kvelastic.pool import tensors
from kvelastic.pool.pool import native_geometry, pool_named
from kvelastic.shared import ledger, segment

_log = logging.getLogger("kvelastic.vllm")


class WorkerMemory:
    """The arena of one worker and the native thread that serves it. Made by `attach`."""

    def __init__(
        self,
        seg: segment.Segment,
        arena: _vmm.Range,
        ring_worker: _vmm.RingWorker,
        lives: Sequence[_vmm.LivenessLock | None],
    ) -> None:
        self._segment = seg
        self._arena = arena
        self._ring_worker = ring_worker
        self._lives = lives  # held until this process ends, as long as its memory exists
        self._tensor: torch.Tensor | None = tensors.whole_range(arena)
        # A process that ends without closing the worker still stops this thread first.
        self._at_exit = Finalize(self, ring_worker.stop, exitpriority=10)

    @property
    def instance_name(self) -> str:
        """The instance's name in the ledger."""
        return self._segment.name

    @property
    def held_bytes(self) -> int:
        """Bytes of device memory that hold this worker's KV cache."""
        return self._arena.held_bytes

    @contextmanager
    def as_kv_allocation(self) -> Iterator[None]:
        """Replace the KV cache allocation made in the body, on this thread, with the arena.

        Raises `EngineError` afterwards unless there was exactly one: otherwise vLLM's cache would
        not, or not only, lie in the arena.
        """
        assert self._tensor is not None
        mode = _AnswerZeros(self._tensor)
        with mode:
            yield
        if mode.answered != 1:
            raise EngineError(
                f"vLLM allocated its KV cache {mode.answered} times instead of once, in a way "
                "that kvelastic does not know. Please report this with the model's name; unset "
                "ENABLE_KVELASTIC to go on without kvelastic."
            )

    def check_views(self, views: Sequence[torch.Tensor], num_blocks: int) -> None:
        """Raise `EngineError` unless every layer's view lies in the arena and has all ids.

        A view may count kernel blocks, several per id, if the kernel needs smaller ones.
        """
        first = self._arena.address
        last = first + self._arena.range_bytes
        for layer, view in enumerate(views):
            if not first <= view.data_ptr() < last:
                raise EngineError(f"the KV cache of layer {layer} does not lie in the arena")
            if view.shape[0] % num_blocks != 0:
                raise EngineError(
                    f"the KV cache of layer {layer} has {view.shape[0]} blocks, expected a "
                    f"multiple of {num_blocks}. Please report this with the model's name."
                )

    def close(self) -> None:
        """Stop serving. The memory is released with the process, or with the last view of it."""
        self._at_exit.cancel()
        self._ring_worker.stop()
        pool = pool_named(self.instance_name)
        if pool is not None and self._arena.held_bytes:  # the scheduler shares this process
            pool.keep_grant_with(self._arena)
        self._tensor = None
        self._segment.close()


def attach(handoff: Handoff, device: WorkerDevice) -> WorkerMemory:
    """Reserve the range on the worker's device and start to serve the scheduler's commands.

    Raises `EngineError` if the scheduler expects this worker on another device, `SegmentError` if
    the scheduler's segment is gone, `LedgerError` if its ledger membership is gone, `DriverError`
    if the addresses cannot be reserved, and `ChannelError` or `SegmentBusyError` if another worker
    already has this rank.
    """
    if handoff.device != device.facts.name:
        raise EngineError(
            f"worker {handoff.rank} computes on {device.facts.name}, but the scheduler accounts "
            f"its memory to {handoff.device}. Please report this with the model's name."
        )
    _vmm.set_log_level(_log.getEffectiveLevel())
    seg = segment.open_writable(handoff.segment_name)
    try:
        if seg.control_block.read_header()["uuid"] != handoff.segment_uuid:
            raise SegmentNotFoundError(
                f"the segment {handoff.segment_name!r} now belongs to another instance: this "
                "worker's scheduler has ended"
            )
        # Before any page is mapped here: others must see this process as the pages' holder.
        lives = [
            seg.hold_as_worker(handoff.rank),
            *ledger.hold_as_worker(handoff.segment_uuid, handoff.rank, handoff.device),
        ]
        geometry = native_geometry(handoff.layout, handoff.pages)
        arena = reserve_range(device.driver, geometry, guard_pages=config.load().guard_pages)
        with _every_processor():
            ring_worker = _vmm.RingWorker.start(seg.control_block, arena, handoff.rank)
    except BaseException:
        seg.close()
        raise
    _log.info(
        "Reserved addresses for %d pages of %.1f MiB for the KV cache; none is mapped yet.",
        handoff.pages,
        handoff.layout.page_bytes / 2**20,
    )
    return WorkerMemory(seg, arena, ring_worker, lives)


@contextmanager
def _every_processor() -> Iterator[None]:
    """Let threads started in the body run on any processor this process may use.

    vLLM's CPU worker binds itself to the cores that it computes on. A thread that inherits this
    binding competes with its own model for these cores, and delays every alloc and limit that waits
    for it. The memory node of pages does not change; it depends on the memory policy.
    """
    bound = os.sched_getaffinity(0)
    with suppress(OSError):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    try:
        yield
    finally:
        with suppress(OSError):
            os.sched_setaffinity(0, bound)


class _AnswerZeros(TorchFunctionMode):  # type: ignore[misc]  # torch is untyped here
    """Replaces `torch.zeros(bytes of the arena, dtype=int8)`; all other calls pass through."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self._tensor = tensor
        self.answered = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """torch calls this for every function while the mode is active."""
        kwargs = kwargs or {}
        if (
            func is torch.zeros
            and args == (self._tensor.numel(),)
            and kwargs.get("dtype") is torch.int8
        ):
            self.answered += 1
            return self._tensor
        return func(*args, **kwargs)
