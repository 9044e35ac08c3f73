"""The connector's worker side: it registers the KV cache. Copies run without its Python code.

vLLM takes failed blocks only from its workers' output, and not after the step that ends the load.
The scheduler learns of a failure first. It notifies the workers with the next step's metadata, and
reports the load as finished in the step whose output names its blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from kvelastic.errors import UnsupportedError
from kvelastic.flexkv.common.memory_handle import shared_zeros
from kvelastic.flexkv.integration.config import FlexKVConfig
from kvelastic.flexkv.server.client import KVTPClient


class FlexKVWorkerConnector:
    """The connector of one rank of the engine."""

    def __init__(self, config: FlexKVConfig, dp_rank: int, tp_rank: int) -> None:
        self._block_size = config.cache_config.tokens_per_block
        self._failed_blocks: set[int] = set()
        self._client = KVTPClient(
            config.gpu_register_port,
            dp_client_id=config.dp_client_id_of_instance + dp_rank,
            tp_rank=tp_rank,
        )

    def register_to_server(self, kv_caches: dict[str, Any]) -> None:
        """Register the layers' tensors, in the order of the layers. Does not block."""
        views = [self._by_block(tensor) for tensor in kv_caches.values()]
        self._client.register_to_server(
            [view for view, _ in views], block_axis=views[0][1] if views else 0
        )

    def _by_block(self, tensor: Any) -> tuple[Any, int]:
        """Return a layer's cache with an axis that counts the engine's blocks, and that axis."""
        if tensor.ndim == 4:  # [blocks, heads, tokens, elements of K and V], since vLLM 0.30
            kernel_tokens = tensor.shape[2]
            if self._block_size % kernel_tokens or tensor.shape[0] % (
                self._block_size // kernel_tokens
            ):
                raise UnsupportedError(
                    f"a KV cache of the shape {tuple(tensor.shape)} has no blocks of"
                    f" {self._block_size} tokens"
                )
            return tensor.unflatten(0, (-1, self._block_size // kernel_tokens)), 0
        # [blocks, tokens, elements] is one row for K and V
        if tensor.ndim == 3 or (tensor.ndim == 5 and tensor.shape[1] == 2):
            return tensor, 0
        if tensor.ndim == 5 and tensor.shape[0] == 2:
            return tensor, 1
        raise UnsupportedError(f"a KV cache of the shape {tuple(tensor.shape)} is not known here")

    def note_failed_blocks(self, block_ids: set[int]) -> None:
        """Keep the failed blocks that come with a step, for the output of that step."""
        self._failed_blocks |= block_ids

    def take_failed_blocks(self) -> set[int]:
        """Return the failed blocks since the last call."""
        taken, self._failed_blocks = self._failed_blocks, set()
        return taken

    def shutdown(self) -> None:
        """Unregister. Idempotent."""
        self._client.close()


class SharedZeros(TorchFunctionMode):  # type: ignore[misc]  # torch is untyped here
    """Puts vLLM's cache, which `torch.zeros(bytes, dtype=int8)` allocates, in shared memory."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Handle a function call. Torch calls this for every function while the mode is active."""
        kwargs = kwargs or {}
        is_flat = len(args) == 1 and isinstance(args[0], int) and args[0] > 0
        if func is torch.zeros and is_flat and kwargs.get("dtype") is torch.int8:
            return torch.from_numpy(shared_zeros(args[0], "int8"))
        return func(*args, **kwargs)


def extend_connector(*, is_cpu: bool) -> None:
    """Make vLLM's FlexKVConnectorV1 forward two more calls to its adapter.

    These are a step's metadata, and on the CPU the allocation of the cache.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1 import flexkv_connector

    connector = flexkv_connector.FlexKVConnectorV1

    def bind(self: Any, metadata: Any) -> None:
        super(connector, self).bind_connector_metadata(metadata)
        self._flexkv_connector.bind_connector_metadata(metadata)

    if "bind_connector_metadata" not in vars(connector):
        connector.bind_connector_metadata = bind
    if is_cpu and "get_mem_pool_context" not in vars(connector):
        connector.get_mem_pool_context = lambda self: SharedZeros()
