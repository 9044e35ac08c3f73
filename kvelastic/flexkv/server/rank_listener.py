"""Where the ranks of an engine without a server register: in the process of its KVManager."""

from __future__ import annotations

from collections.abc import Callable

from kvelastic.errors import MessageError
from kvelastic.flexkv.common.config import CacheConfig, ModelConfig
from kvelastic.flexkv.server import request as messages
from kvelastic.flexkv.server.registration import Registrations
from kvelastic.flexkv.server.utils import socket_address
from kvelastic.flexkv.transfer.worker import GPUCPUTransferWorker
from kvelastic.messages import Endpoint, Request


class RankListener:
    """Listens from its making to `close`."""

    def __init__(
        self,
        model: ModelConfig,
        cache: CacheConfig,
        gpu_register_port: str,
        worker: Callable[[], GPUCPUTransferWorker],
    ) -> None:
        """As `Registrations`. Raises `ChannelError` if the endpoint is taken."""
        self._registrations = Registrations(model, cache, worker)
        self._endpoint = Endpoint(
            messages.PROTOCOL,
            self._hear,
            listen=[socket_address(gpu_register_port)],
            on_close=self._registrations.connection_ended,
            name="flexkv-ranks",
        )

    def check_refused(self) -> None:
        """As `Registrations.check_refused`."""
        self._registrations.check_refused()

    def check_integrity(self) -> None:
        """As `Registrations.check_integrity`."""
        self._registrations.check_integrity()

    def close(self) -> None:
        """Let the ranks go. Safe to repeat."""
        self._endpoint.close()

    def _hear(self, request: Request) -> None:
        message = request.message
        if isinstance(message, messages.AddMemory):
            self._registrations.add_memory(request, message)
        elif isinstance(message, messages.AddDevice):
            self._registrations.add_device(request, message)
        elif isinstance(message, messages.RegisterTPClient):
            self._registrations.register(request, message)
            request.answer(messages.Registered())
        else:
            raise MessageError("this engine has no server: only its ranks register here")
