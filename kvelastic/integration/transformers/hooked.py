"""Paths of continuous batching that are hooked, and the hooks that all series share."""

from __future__ import annotations

from typing import Final

from kvelastic.integration.hooks.probe import Probe
from kvelastic.integration.hooks.table import Hook
from kvelastic.integration.transformers import in_batches

ROOM: Final = "transformers.generation.continuous_batching"
LOOP: Final = f"{ROOM}.continuous_api"
"""The module whose import sets all hooks. It imports the others."""
CACHE: Final = f"{ROOM}.cache:PagedAttentionCache"
HANDLER: Final = f"{ROOM}.cache:PagedAttentionMemoryHandler"
PROCESSOR: Final = f"{LOOP}:ContinuousBatchProcessor"
_MANAGER: Final = f"{LOOP}:ContinuousBatchingManager"
OFFLOADING: Final = f"{ROOM}.offloading_manager:OffloadingManager"
RUNNER: Final = f"{ROOM}.model_runner:ModelRunner"
SCHEDULER: Final = f"{ROOM}.scheduler:Scheduler"
_RESOLVING: Final = f"{ROOM}.initialization"

LOOP_HOOKS: Final = (
    Hook(LOOP, f"{_RESOLVING}:decide_use_async_batching", in_batches.decide_use_async_batching),
    Hook(LOOP, f"{PROCESSOR}.__init__", in_batches.processor_init),
    Hook(LOOP, f"{PROCESSOR}.prepare_next_batch", in_batches.prepare_next_batch),
    Hook(LOOP, f"{OFFLOADING}.offload_requests", in_batches.offload_requests),
    Hook(LOOP, f"{_MANAGER}.stop", in_batches.manager_stop),
)


def probe_loop(probe: Probe) -> None:
    """Probe everything that `LOOP_HOOKS` replace, call or rely on."""
    probe.parameters(f"{_RESOLVING}:decide_use_async_batching", "cb_config is_attn_mask_needed")
    probe.mentions(f"{_RESOLVING}:decide_use_async_batching", "use_async_batching")
    probe.mentions(f"{PROCESSOR}.__init__", "scheduler inputs_and_outputs model_runner cache")
    probe.parameters(f"{PROCESSOR}.prepare_next_batch", "self")
    probe.mentions(
        f"{PROCESSOR}.prepare_next_batch",
        "schedule_batch offload_requests clear_cancelled_requests",
    )
    probe.parameters(f"{PROCESSOR}.update_batch", "self")
    probe.mentions(f"{PROCESSOR}.update_batch", "finish_request")
    probe.parameters(f"{PROCESSOR}.has_pending_requests", "self")
    probe.parameters(f"{OFFLOADING}.offload_requests", "self")
    probe.mentions(f"{SCHEDULER}.__init__", "cache")
    probe.mentions(f"{SCHEDULER}.reset", "waiting_requests")
    probe.mentions(f"{OFFLOADING}.offload_requests", "block_new_requests starved_requests")
    probe.parameters(f"{_MANAGER}.stop", "self")
    probe.mentions(f"{_MANAGER}.stop", "batch_processor")
    probe.get(f"{_MANAGER}.is_running")
    probe.parameters(f"{RUNNER}.warmup", "self model")
    probe.mentions(f"{RUNNER}.__init__", "pad_inputs cache")
    probe.get(f"{ROOM}.utils:attn_mask_is_needed")
