"""The server: one task engine and its tiers, shared by several engines of a machine.

    server = KVServer(model_config, cache_config, server_recv_port="ipc:///run/user/1000/kv")
    server.run()                                        # until a client or a signal ends it

    python -m kvelastic.flexkv.server CONFIG.json       # the same as a program

The endpoint's thread receives messages and replies to waits when their tasks have ended. Other
calls run one at a time, in order of arrival: in the endpoint's thread if they cannot block and no
earlier call is queued, otherwise in a second thread. A client finds only tasks of its own
data-parallel id. A connection represents a client: when it ends, the server releases what the
client held.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable
from functools import partial
from queue import Queue
from typing import Any, Final

from kvelastic.errors import InvalidArgumentError, KvelasticError, NotInitializedError
from kvelastic.flexkv.common.config import CacheConfig, ModelConfig
from kvelastic.flexkv.kvtask import KVTaskEngine
from kvelastic.flexkv.server import request as messages
from kvelastic.flexkv.server.process import KVServerHandle
from kvelastic.flexkv.server.registration import Registrations, has_gone
from kvelastic.flexkv.server.utils import default_endpoint, gpu_register_endpoint, socket_address
from kvelastic.messages import Connection, Endpoint, Message, Request

_log = logging.getLogger("kvelastic.flexkv")
_LOOK_S: Final = 0.25
"""Interval at which a waiting request is looked at; the end of a task does it earlier."""
MOST_TASKS_OF_A_CLIENT: Final = 1 << 14


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

        Raises the errors of `KVTaskEngine`, and `ChannelError` if an endpoint is in use; nothing
        stays open then.
        """
        # Task ids are random, so that ids of an earlier server's tasks are unknown here.
        first_task_id = 1 + (secrets.randbits(28) << 32)
        self._engine = KVTaskEngine(model_config, cache_config, first_task_id=first_task_id)
        self._registrations = Registrations(self._engine)
        self.server_recv_port: Final = server_recv_port or default_endpoint()
        self.gpu_register_port: Final = gpu_register_port or gpu_register_endpoint(
            self.server_recv_port
        )
        self._shape = messages.shape_of(model_config, cache_config.tokens_per_block)
        self._clients: dict[Connection, int] = {}
        self._waiting: dict[Request, tuple[messages.Wait, int, float]] = {}
        """For each wait without a reply: its message, its client and its deadline."""
        self._calls: Queue[Callable[[], object] | None] = Queue()
        """Calls that may block, and those after them. A second thread costs a tenth of a call."""
        self._thread = threading.Thread(target=self._run_calls, name="flexkv-engine", daemon=True)
        self._is_over = threading.Event()
        self._engine.start()
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
            self._engine.shutdown()
            raise
        self._engine.transfer_engine.on_event = self._wake
        self._thread.start()
        _log.info("FlexKV's server is at %s.", self.server_recv_port)

    create_server = KVServerHandle
    """Starts a server in a child process that ends with this one."""

    def is_ready(self) -> bool:
        """Whether every rank of every data-parallel client has registered.

        Raises `EngineError` with the reason if a missing rank was refused.
        """
        return self._registrations.is_ready()

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
        if self._thread.is_alive():
            self._calls.put(None)
        self._thread.join()
        self._engine.shutdown()

    @property
    def open_tasks(self) -> int:
        """Number of tasks that run or have holds or space. Waits for earlier calls."""
        self._calls.join()
        return self._engine.open_tasks

    @property
    def registered_ranks(self) -> int:
        """The number of registered ranks."""
        return len(self._registrations)

    def check_integrity(self) -> None:
        """Raise `IntegrityError` for resources without an owner.

        Blocks; call it on an idle server.
        """
        self._registrations.check_integrity()
        self._calls.join()
        self._engine.check_integrity()

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
        elif isinstance(message, messages.Wait):
            deadline_s = time.monotonic() + (message.timeout_s or 0.0)
            self._waiting[request] = message, self._client_of(request), deadline_s
            self._look_again(request)
        else:
            call = partial(self._carry_out, message, self._client_of(request))
            if self._calls.unfinished_tasks or self._engine.may_block(message):
                self._calls.put(partial(self._reply, request, call))
            else:
                self._reply(request, call)

    def _register_client(self, request: Request, message: messages.RegisterDPClient) -> None:
        if unlike := messages.differences(message.shape, self._shape):
            raise InvalidArgumentError(f"this server is for another model: the client has {unlike}")
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
            self._calls.put(partial(self._engine.forget_client, client))

    def _wake(self) -> None:
        """Look at the waits again. Any thread may call; the transfer engine does at each end."""
        if self._waiting:
            self._endpoint.run_soon(self._look_at_all)

    def _look_at_all(self) -> None:
        for request in list(self._waiting):
            self._look(request)

    def _look_again(self, request: Request) -> None:
        """Look at a wait until it has its reply: a store that hangs reports no end."""
        self._look(request)
        if request in self._waiting:
            left_s = self._waiting[request][-1] - time.monotonic()
            again = partial(self._look_again, request)
            self._endpoint.run_later(min(max(0.0, left_s), _LOOK_S), again)

    def _look(self, request: Request) -> None:
        """Reply to a wait if its tasks have ended or its deadline has come."""
        if request not in self._waiting:
            return
        wait, client, deadline_s = self._waiting[request]
        is_late = time.monotonic() >= deadline_s

        def responses() -> Message | None:
            found = self._engine.answers(wait, client, is_late=is_late)
            return None if found is None else messages.Responses(list(found.values()))

        if not request.connection.is_open or self._reply(request, responses):
            del self._waiting[request]

    # --- both threads --------------------------------------------------------------------------

    def _reply(self, request: Request, call: Callable[[], Any]) -> bool:
        """Send the result of a call, or its error, unless the result is None."""
        try:
            result = call()
            if result is None:
                return False
            request.answer(result)
        except Exception as error:
            if not isinstance(error, KvelasticError):
                _log.exception("a %s was not carried out", type(request.message).__name__)
            request.refuse(error)
        return True

    def _carry_out(self, call: Message, client: int) -> Any:
        if isinstance(call, messages.Unregister):
            self._engine.forget_client(client)
            return messages.Done()
        if isinstance(call, messages.Match) and self._engine.open_tasks >= MOST_TASKS_OF_A_CLIENT:
            count = len(self._engine.list_open(client))
            if count >= MOST_TASKS_OF_A_CLIENT:
                raise InvalidArgumentError(
                    f"{count} tasks of this client are open; wait for them or cancel them"
                )
        return self._engine.ask(call, client, client)

    # --- the second thread ---------------------------------------------------------------------

    def _run_calls(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            except Exception:  # noqa: PERF203  # a fault ends only its own call
                _log.exception("the server goes on after a fault")
            finally:
                self._calls.task_done()
        self._calls.task_done()
