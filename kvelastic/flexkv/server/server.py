"""The server: one task engine and its tiers, shared by several engines of a machine.

    server = KVServer(model_config, cache_config, server_recv_port="ipc:///run/user/1000/kv")
    server.run()                                        # until a client or a signal ends it

    python -m kvelastic.flexkv.server CONFIG.json       # the same as a program

It has two threads. The endpoint's thread receives messages; the engine's thread (`engine_thread`)
runs calls. A connection represents a client: when it ends, the server releases what the client
held.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Mapping
from copy import copy
from typing import Final

from kvelastic.errors import InvalidArgumentError, NotInitializedError
from kvelastic.flexkv.common.config import CacheConfig, ModelConfig, check_supported
from kvelastic.flexkv.kvtask import KVTaskEngine
from kvelastic.flexkv.server import request as messages
from kvelastic.flexkv.server.engine_thread import EngineThread
from kvelastic.flexkv.server.process import KVServerHandle
from kvelastic.flexkv.server.registration import Registrations, has_gone
from kvelastic.flexkv.server.utils import default_endpoint, gpu_register_endpoint, socket_address
from kvelastic.messages import Connection, Endpoint, Request

_log = logging.getLogger("kvelastic.flexkv")


class KVServer:
    """A server for several engines. Any thread may call."""

    def __init__(
        self,
        model_config: ModelConfig,
        cache_config: CacheConfig,
        gpu_register_port: str = "",
        server_recv_port: str = "",
    ) -> None:
        """Open the tiers and listen. Blocks while stores open.

        Raises the errors of `check_supported` and `KVTaskEngine`, and `ChannelError` if an endpoint
        is in use; nothing stays open then.
        """
        check_supported(model_config, cache_config)
        model_config = copy(model_config)
        self.server_recv_port: Final = server_recv_port or default_endpoint()
        self.gpu_register_port: Final = gpu_register_port or gpu_register_endpoint(
            self.server_recv_port
        )
        self._shape = messages.shape_of(model_config, cache_config.tokens_per_block)
        self._clients: dict[Connection, int] = {}
        self._is_over = threading.Event()
        # Random, so that ids of an earlier server's tasks are unknown here.
        first_task_id = 1 + (secrets.randbits(28) << 32)
        self._engine = KVTaskEngine(model_config, cache_config, first_task_id=first_task_id)
        self._registrations = Registrations(
            model_config, lambda: self._engine.transfer_engine.gpu_worker
        )
        self._engine.start()
        self._thread = EngineThread(self._engine)
        try:
            addresses = [self.server_recv_port, self.gpu_register_port]
            self._endpoint = Endpoint(
                messages.PROTOCOL,
                self._receive,
                listen=[socket_address(one) for one in addresses],
                on_close=self._connection_ended,
                name="flexkv",
            )
        except BaseException:
            self._thread.stop()
            self._engine.shutdown()
            raise
        _log.info("FlexKV's server is at %s.", self.server_recv_port)

    @classmethod
    def create_server(
        cls,
        model_config: ModelConfig,
        cache_config: CacheConfig,
        gpu_register_port: str = "",
        server_recv_port: str | None = None,
        child_env: Mapping[str, str] | None = None,
        inherit_env: bool = True,
    ) -> KVServerHandle:
        """Start a server in a child process that ends with this one. Does not block.

        `child_env` is added to its environment. With `inherit_env` False, the child gets only the
        variables that Python needs and those of FlexKV and kvelastic.
        """
        return KVServerHandle(
            model_config,
            cache_config,
            gpu_register_port,
            server_recv_port or "",
            child_env or {},
            inherit_env=inherit_env,
        )

    def is_ready(self) -> bool:
        """Whether every rank of every data-parallel client has registered.

        Raises `EngineError` with the reason if a missing rank was refused.
        """
        self._registrations.check_refused()
        return self._registrations.is_complete

    def run(self) -> None:
        """Block until a client shuts the server down, or `stop` is called; then close."""
        self._is_over.wait()
        self.close()

    def stop(self) -> None:
        """Make `run` return. A signal handler may call it."""
        self._is_over.set()

    def close(self) -> None:
        """Close the connections and the tiers. Blocks for running copies. Idempotent."""
        self._is_over.set()
        self._endpoint.close()
        self._thread.stop()
        self._engine.shutdown()

    @property
    def open_tasks(self) -> int:
        """Number of tasks that run or have holds or space. Waits for the engine's thread."""
        return int(self._thread.ask(lambda: self._engine.open_tasks))

    @property
    def registered_ranks(self) -> int:
        """The number of registered ranks."""
        return len(self._registrations)

    def check_integrity(self) -> None:
        """Raise `IntegrityError` for resources without an owner.

        Blocks; call it on an idle server.
        """
        self._registrations.check_integrity()
        self._thread.ask(self._engine.check_integrity)

    # --- the endpoint's thread -----------------------------------------------------------------

    def _receive(self, request: Request) -> None:
        message = request.message
        if self._registrations.receive(request):
            return
        if isinstance(message, messages.RegisterDPClient):
            self._register_client(request, message)
            request.answer(messages.Registered())
        elif isinstance(message, messages.IsReady):
            request.answer(messages.Ready(is_ready=self.is_ready()))
        elif isinstance(message, messages.Shutdown):
            self._client_of(request)
            request.answer(messages.Done())
            self._is_over.set()
        else:
            self._thread.carry_out(request, self._client_of(request))

    def _register_client(self, request: Request, message: messages.RegisterDPClient) -> None:
        if not message.shape.is_served_by(self._shape):
            raise InvalidArgumentError(
                f"this server is for {self._shape}, and the client has {message.shape}"
            )
        self._engine.model_config.check_client(message.dp_client_id)
        if request.connection in self._clients:
            raise InvalidArgumentError("this connection is a client already")
        for connection, client in list(self._clients.items()):
            if client == message.dp_client_id:
                if not has_gone(connection):
                    raise InvalidArgumentError(
                        f"client {message.dp_client_id} is {connection.peer} already; give each"
                        " its own dp_client_id"
                    )
                self._connection_ended(connection)
        self._clients[request.connection] = message.dp_client_id

    def _client_of(self, request: Request) -> int:
        client = self._clients.get(request.connection)
        if client is None:
            raise NotInitializedError("say first which data-parallel client this is")
        return client

    def _connection_ended(self, connection: Connection) -> None:
        self._registrations.connection_ended(connection)
        client = self._clients.pop(connection, None)
        if client is not None:
            _log.info("Client %d has gone.", client)
            self._thread.give_back(client)
