"""A worker's part of the connector: registers its KV cache; copies need no Python of it."""

from __future__ import annotations

from typing import Any

from kvelastic.errors import UnsupportedError
from kvelastic.flexkv.integration.config import FlexKVConfig
from kvelastic.flexkv.integration.vllm.load_errors import LoadErrorReceiver
from kvelastic.flexkv.server.client import KVTPClient


class FlexKVWorkerConnector:
    """See the module."""

    def __init__(self, config: FlexKVConfig, dp_rank: int, tp_rank: int, engine: str) -> None:
        self._block_size = config.cache_config.tokens_per_block
        self._errors = LoadErrorReceiver(engine) if tp_rank == 0 else None
        self._client = KVTPClient(
            config.gpu_register_port,
            dp_client_id=config.dp_client_id_of_instance + dp_rank,
            tp_rank=tp_rank,
        )

    def register_to_server(self, kv_caches: dict[str, Any]) -> None:
        """Hand over the layers' tensors, in the order of the layers. Returns at once."""
        views = [self._by_block(tensor) for tensor in kv_caches.values()]
        self._client.register_to_server(
            [view for view, _ in views], block_axis=views[0][1] if views else 0
        )

    def _by_block(self, tensor: Any) -> tuple[Any, int]:
        """A layer's cache with an axis that counts the engine's blocks, and that axis."""
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
        if tensor.ndim == 3:  # [blocks, tokens, elements]: one row for K and V
            return tensor, 0
        if tensor.ndim == 5 and tensor.shape[1] == 2:
            return tensor, 0
        if tensor.ndim == 5 and tensor.shape[0] == 2:
            return tensor, 1
        raise UnsupportedError(f"a KV cache of the shape {tuple(tensor.shape)} is not known here")

    def take_failed_blocks(self) -> set[int]:
        """What the scheduler has said could not be loaded, since the last call."""
        return self._errors.take() if self._errors is not None else set()

    def shutdown(self) -> None:
        """Take the memory back. Safe to repeat."""
        self._client.close()
        if self._errors is not None:
            self._errors.close()
