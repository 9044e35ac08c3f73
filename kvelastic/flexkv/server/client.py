"""The clients of a server: an engine's scheduler (KVDPClient), and its ranks (KVTPClient)."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import Any, Final

from kvelastic.errors import (
    ChannelError,
    InvalidArgumentError,
    KvelasticError,
    MessageError,
    NotInitializedError,
)
from kvelastic.flexkv.common.calls import Calls
from kvelastic.flexkv.common.config import ModelConfig
from kvelastic.flexkv.server import request as messages
from kvelastic.flexkv.server.rank_client import (
    ANSWER_S,
    START_S,
    KVTPClient,
    connect_when_there,
)
from kvelastic.flexkv.server.utils import socket_address
from kvelastic.messages import Connection, Endpoint, Message, Request

__all__ = ["KVDPClient", "KVTPClient"]


class KVDPClient(Calls):
    """One data-parallel client of a server. Any thread may call.

    Each call blocks until the server replies, and raises the error in the reply. If the server has
    ended, the call raises `ChannelClosedError` and all tasks are lost. The next call connects to a
    new server at the same endpoint, which does not know these tasks.
    """

    def __init__(
        self,
        server_recv_port: str,
        model_config: ModelConfig,
        dp_client_id: int = 0,
        tokens_per_block: int = 0,
    ) -> None:
        """Does not connect yet. Raises `ConfigError` for an endpoint that is not a Unix socket."""
        self.dp_client_id = dp_client_id
        self.server_recv_port: Final = server_recv_port
        self._address = socket_address(server_recv_port)
        self._shape = messages.shape_of(model_config, tokens_per_block)
        self._endpoint: Endpoint | None = None
        """Exists from the first start until `unregister` or `shutdown`."""
        self._connection: Connection | None = None
        self._reconnecting = threading.Lock()

    def start(self) -> None:
        """Connect and register this client, unless that was done. Blocks."""
        if not self._is_connected:
            self.start_server_and_register()

    def reconnect(self) -> None:
        """Register with a new server if the old one has ended. Blocks briefly."""
        with self._reconnecting:
            if self._endpoint is not None and not self._is_connected:
                with suppress(KvelasticError):
                    self.start_server_and_register(0.0)

    @property
    def _is_connected(self) -> bool:
        return self._connection is not None and self._connection.is_open

    def start_server_and_register(self, timeout_s: float = START_S) -> None:
        """Connect once the server listens, and register this client. Blocks.

        Raises `ChannelTimeoutError` after `timeout_s`, and `InvalidArgumentError` for a server of
        another model or a client that is registered already.
        """
        deadline_s = time.monotonic() + timeout_s
        if self._endpoint is None:
            self._endpoint = Endpoint(messages.PROTOCOL, _refuse_all, name="flexkv-dp")
        connection = connect_when_there(self._endpoint, self._address, deadline_s)
        asked = messages.RegisterDPClient(dp_client_id=self.dp_client_id, shape=self._shape)
        try:
            connection.call(asked, ANSWER_S)
        except BaseException:
            connection.close()
            raise
        self._connection = connection

    def is_ready(self) -> bool:
        """Whether every rank of every client of the server has registered their tensors."""
        ready: messages.Ready = self._ask(messages.IsReady())
        return ready.is_ready

    def ask(self, call: Message, dp_id: int = 0) -> Any:
        """Send a call to the server and return its reply. Blocks. See `Calls.ask`."""
        if dp_id != self.dp_client_id:
            raise InvalidArgumentError(
                f"dp_id={dp_id}: this is client {self.dp_client_id}; each has its own KVManager"
            )
        if not isinstance(call, messages.Wait):
            return self._ask(call)
        replied: messages.Responses = self._ask(call, (call.timeout_s or 0.0) + ANSWER_S)
        return {one.task_id: one for one in replied.responses}

    launch_tasks = Calls.launch
    cancel_tasks = Calls.cancel

    def unregister(self) -> None:
        """Release what this client holds; the server continues. Idempotent."""
        self._end_with(messages.Unregister())

    def shutdown(self) -> None:
        """End the server, for all its clients. Idempotent."""
        self._end_with(messages.Shutdown())

    def _end_with(self, last: Message) -> None:
        with suppress(ChannelError, NotInitializedError):
            self._ask(last)
        with self._reconnecting:
            self._connection = None
            endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None:
            endpoint.close()

    def _ask(self, message: Message, timeout_s: float = ANSWER_S) -> Any:
        connection = self._connection
        if connection is None:
            raise NotInitializedError("this client has no server yet: call KVManager.start()")
        if not connection.is_open:
            self.reconnect()
            connection = self._connection or connection
        return connection.call(message, timeout_s)


def _refuse_all(request: Request) -> None:
    raise MessageError(f"a client takes no {type(request.message).__name__}")
