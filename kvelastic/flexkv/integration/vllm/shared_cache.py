"""vLLM's KV cache on the CPU in memory that can be handed over.

vLLM allocates its cache by one `torch.zeros(bytes, dtype=int8)`, inside the context that a
connector may give it (`get_mem_pool_context`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from kvelastic.flexkv.common.memory_handle import shared_zeros


class SharedZeros(TorchFunctionMode):  # type: ignore[misc]  # torch is untyped here
    """Answers `torch.zeros(bytes, dtype=int8)` with shared memory; lets everything else pass."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Called by torch for every function while this mode is active."""
        kwargs = kwargs or {}
        is_flat = len(args) == 1 and isinstance(args[0], int) and args[0] > 0
        if func is torch.zeros and is_flat and kwargs.get("dtype") is torch.int8:
            return torch.from_numpy(shared_zeros(args[0], "int8"))
        return func(*args, **kwargs)


def offer_to_vllm() -> None:
    """Let vLLM's FlexKVConnectorV1 give that context: it forwards no such call to its adapter."""
    from vllm.distributed.kv_transfer.kv_connector.v1 import flexkv_connector

    connector = flexkv_connector.FlexKVConnectorV1
    if "get_mem_pool_context" not in vars(connector):
        connector.get_mem_pool_context = lambda self: SharedZeros()
