"""A worker of vLLM on kvelastic: an arena in the place of the one KV cache allocation.

vLLM allocates the whole KV cache by one call, `torch.zeros(size, dtype=int8)`, and makes views of
it. While `as_kv_allocation` is active that call is answered with the arena's range: as many
addresses, with memory only behind the pages that the scheduler has asked this worker to map. A
native thread does what is asked; no Python runs for it.

Imports torch: only in a worker process.
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

from kvelastic import _vmm, config, ledger, segment, tensors
from kvelastic.device import reserve_range
from kvelastic.errors import EngineError, SegmentNotFoundError
from kvelastic.integration.vllm.handoff import Handoff
from kvelastic.integration.vllm.worker_device import WorkerDevice

_log = logging.getLogger("kvelastic.vllm")


class WorkerMemory:
    """The arena of one worker and the thread that serves it. Made by `attach`."""

    def __init__(
        self,
        seg: segment.Segment,
        arena: _vmm.Range,
        ring_worker: _vmm.RingWorker,
        lives: Sequence[_vmm.LifeLock | None],
    ) -> None:
        self._segment = seg
        self._arena = arena
        self._ring_worker = ring_worker
        self._lives = lives  # held until this process ends: the memory is there as long
        self._tensor: torch.Tensor | None = tensors.whole_range(arena)
        # A process that ends without telling the worker still stops its thread first.
        self._at_exit = Finalize(self, ring_worker.stop, exitpriority=10)

    @property
    def instance_name(self) -> str:
        """As the ledger has it."""
        return self._segment.name

    @property
    def held_bytes(self) -> int:
        """What of the device's memory is KV cache of this worker."""
        return self._arena.held_bytes

    @contextmanager
    def as_kv_allocation(self) -> Iterator[None]:
        """Answer the one allocation of the KV cache made in the body, on this thread.

        Raises `EngineError` afterwards if there was none, or more than one: then vLLM's cache is
        not, or not only, in the arena.
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
        """Raise `EngineError` unless every layer's view lies in the arena, with all ids in it.

        A view may count kernel blocks, several to an id, where the kernel wants smaller ones.
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
        """Stop serving. The memory itself goes with the process, or with the last view of it."""
        self._at_exit.cancel()
        self._ring_worker.stop()
        self._tensor = None
        self._segment.close()


def attach(handoff: Handoff, device: WorkerDevice) -> WorkerMemory:
    """Reserve the range on the worker's device and begin to carry out the scheduler's commands.

    Raises `EngineError` if the scheduler takes this worker for one on another device,
    `SegmentError` if the scheduler's segment is gone, `LedgerError` if its place in the device's
    ledger is, `DriverError` if the addresses cannot be reserved, and `ChannelError` or
    `SegmentBusyError` if another worker is this rank already.
    """
    if handoff.device != device.facts.name:
        raise EngineError(
            f"worker {handoff.rank} computes on {device.facts.name}, and the scheduler counts its "
            f"memory on {handoff.device}. Please report this with the model's name."
        )
    _vmm.set_log_level(_log.getEffectiveLevel())
    seg = segment.open_writable(handoff.segment_name)
    try:
        if seg.record.read_header()["uuid"] != handoff.segment_uuid:
            raise SegmentNotFoundError(
                f"the segment {handoff.segment_name!r} is another instance's by now: the scheduler "
                "that this worker belongs to has ended"
            )
        # Before any page is mapped here: what dies with a page must be known to have lived.
        lives = [
            seg.hold_as_worker(handoff.rank),
            *ledger.hold_as_worker(handoff.segment_uuid, handoff.rank, handoff.device),
        ]
        arena = reserve_range(
            device.driver, handoff.geometry(), guard_pages=config.load().guard_pages
        )
        with _every_processor():
            ring_worker = _vmm.RingWorker.start(seg.record, arena, handoff.rank)
    except BaseException:
        seg.close()
        raise
    _log.info(
        "%d pages of %.1f MiB reserved for the KV cache, none of them mapped yet.",
        handoff.pages,
        handoff.extents_per_page * handoff.extent_bytes / 2**20,
    )
    return WorkerMemory(seg, arena, ring_worker, lives)


@contextmanager
def _every_processor() -> Iterator[None]:
    """Let threads started in the body run on any processor this process may have.

    vLLM's CPU worker binds itself to the cores that it computes on. A thread that inherits this
    stands in line behind its own model, and every alloc and limit that waits for it does too.
    Which memory node pages come from is not changed: that goes by the memory policy.
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
    """Answers `torch.zeros(bytes of the arena, dtype=int8)`; lets everything else pass."""

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
        """Called by torch for every function while this mode is active."""
        kwargs = kwargs or {}
        if (
            func is torch.zeros
            and args == (self._tensor.numel(),)
            and kwargs.get("dtype") is torch.int8
        ):
            self.answered += 1
            return self._tensor
        return func(*args, **kwargs)
