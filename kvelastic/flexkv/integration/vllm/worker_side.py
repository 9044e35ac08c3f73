"""The connector's worker side: it registers the KV cache. Copies run without its Python code.

vLLM takes failed blocks only from its workers' output, and not after the step that ends the load.
The scheduler learns of a failure first. It notifies one worker, and reports the load as finished in
the step whose output names its blocks. If it notified two workers, the later one could name blocks
that another request has received in the meantime.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Annotated, Any, Final

import torch
from torch.overrides import TorchFunctionMode

from kvelastic.errors import ChannelClosedError, KvelasticError, UnsupportedError
from kvelastic.flexkv.common.memory_handle import shared_zeros
from kvelastic.flexkv.integration.config import FlexKVConfig
from kvelastic.flexkv.server.client import KVTPClient
from kvelastic.flexkv.server.utils import default_endpoint, socket_address
from kvelastic.messages import Connection, Endpoint, Message, Meta, Protocol, Request

_AGAIN_S: Final = 0.05


class FailedBlocks(Message):
    """Blocks of the engine that could not be loaded."""

    block_ids: Annotated[list[int], Meta(max_length=1 << 16)]


_PROTOCOL: Final = Protocol("flexkv-load-errors", version=1, messages=(FailedBlocks,))


class LoadErrorSender:
    """The scheduler's end; `engine` names it for its own workers."""

    def __init__(self, engine: str) -> None:
        address = socket_address(default_endpoint(f"{engine}_errors"))
        self._endpoint = Endpoint(_PROTOCOL, _refuse, listen=[address], name="flexkv-errors")
        self._worker: Connection | None = None
        self._unsent: set[int] = set()

    def tell(self, block_ids: set[int]) -> None:
        """Send failed blocks. Does not block; keeps them until a worker is connected."""
        self._unsent |= block_ids
        self.flush()

    def flush(self) -> None:
        """Send blocks that were kept."""
        if not self._unsent:
            return
        if self._worker is None or not self._worker.is_open:
            self._worker = next((one for one in self._endpoint.connections if one.is_open), None)
        if self._worker is not None:
            try:
                self._worker.notify(FailedBlocks(block_ids=sorted(self._unsent)))
            except ChannelClosedError:
                return
            self._unsent.clear()

    def close(self) -> None:
        """Close the endpoint. Idempotent."""
        self._endpoint.close()


def _refuse(request: Request) -> None:
    raise ChannelClosedError("a scheduler takes no messages")


class LoadErrorReceiver:
    """A worker's end."""

    def __init__(self, engine: str) -> None:
        self._address = socket_address(default_endpoint(f"{engine}_errors"))
        self._lock = threading.Lock()
        self._block_ids: set[int] = set()
        self._is_closed = False
        self._endpoint = Endpoint(_PROTOCOL, self._hear, name="flexkv-errors")
        self._thread = threading.Thread(target=self._connect, name="flexkv-errors", daemon=True)
        self._thread.start()

    def take(self) -> set[int]:
        """Return the blocks that have failed since the last call."""
        with self._lock:
            taken, self._block_ids = self._block_ids, set()
        return taken

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._is_closed = True
        self._endpoint.close()
        self._thread.join()

    def _connect(self) -> None:
        # The scheduler starts after its workers.
        while not self._is_closed:
            try:
                self._endpoint.connect(self._address)
                return
            except KvelasticError:  # noqa: PERF203  # it waits in between
                time.sleep(_AGAIN_S)

    def _hear(self, request: Request) -> None:
        assert isinstance(request.message, FailedBlocks)
        with self._lock:
            self._block_ids.update(request.message.block_ids)


class FlexKVWorkerConnector:
    """The connector of one rank of the engine."""

    def __init__(self, config: FlexKVConfig, dp_rank: int, tp_rank: int, engine: str) -> None:
        self._block_size = config.cache_config.tokens_per_block
        self._errors = LoadErrorReceiver(engine) if tp_rank == 0 else None
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

    def take_failed_blocks(self) -> set[int]:
        """Return the failed blocks that the scheduler has sent since the last call."""
        return self._errors.take() if self._errors is not None else set()

    def shutdown(self) -> None:
        """Unregister. Idempotent."""
        self._client.close()
        if self._errors is not None:
            self._errors.close()


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


def share_cpu_cache() -> None:
    """Add this mode to vLLM's FlexKVConnectorV1, which does not forward the call to its adapter."""
    from vllm.distributed.kv_transfer.kv_connector.v1 import flexkv_connector

    connector = flexkv_connector.FlexKVConnectorV1
    if "get_mem_pool_context" not in vars(connector):
        connector.get_mem_pool_context = lambda self: SharedZeros()
