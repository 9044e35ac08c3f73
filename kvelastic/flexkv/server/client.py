"""The clients of a server: an engine's scheduler (KVDPClient), and its ranks (KVTPClient)."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, Final, Literal

from kvelastic.errors import (
    ChannelError,
    InvalidArgumentError,
    KvelasticError,
    MessageError,
    NotInitializedError,
)
from kvelastic.flexkv.cache.cache_engine import ALL_LAYERS, check_layers
from kvelastic.flexkv.common.arguments import (
    as_mask,
    launched,
    namespace_names,
    request_tokens,
    task_id_list,
    wait_seconds,
)
from kvelastic.flexkv.common.config import ModelConfig
from kvelastic.flexkv.common.hash_utils import Tokens
from kvelastic.flexkv.common.request import KVResponse, Mask
from kvelastic.flexkv.kvtask import refuse_layerwise, refuse_sliding
from kvelastic.flexkv.server import request as messages
from kvelastic.flexkv.server.connecting import (
    ANSWER_S,
    START_S,
    Answer,
    connect_when_there,
    expect,
)
from kvelastic.flexkv.server.rank_client import KVTPClient
from kvelastic.flexkv.server.utils import socket_address
from kvelastic.messages import Connection, Endpoint, Message, Request

__all__ = ["KVDPClient", "KVTPClient"]


class KVDPClient:
    """One data-parallel client: what `KVManager` forwards its calls to. Any thread may call.

    Each call blocks until the server has answered, and raises what it answered as an error;
    `ChannelClosedError` when it is gone: all tasks are lost then. The next call looks for another
    server at the same endpoint, which knows none of the tasks of before.
    """

    def __init__(
        self,
        server_recv_port: str,
        model_config: ModelConfig,
        dp_client_id: int = 0,
        tokens_per_block: int = 0,
    ) -> None:
        """Does not connect yet. Raises `ConfigError` for an endpoint other than a Unix socket's."""
        self.dp_client_id: Final = dp_client_id
        self.server_recv_port: Final = server_recv_port
        self._address = socket_address(server_recv_port)
        self._shape = messages.shape_of(model_config, tokens_per_block)
        self._endpoint: Endpoint | None = None
        """From the first start to `unregister` or `shutdown`."""
        self._connection: Connection | None = None
        self._reconnecting = threading.Lock()

    def start(self) -> None:
        """As `KVManager.start`: `start_server_and_register`, unless that was done."""
        if not self._is_connected:
            self.start_server_and_register()

    def reconnect(self) -> None:
        """Register anew where the server is gone and another one there. Blocks shortly."""
        with self._reconnecting:
            if self._endpoint is not None and not self._is_connected:
                with suppress(KvelasticError):
                    self.start_server_and_register(0.0)

    @property
    def _is_connected(self) -> bool:
        return self._connection is not None and self._connection.is_open

    def start_server_and_register(self, timeout_s: float = START_S) -> None:
        """Connect, as soon as the server is there, and say which client this is. Blocks.

        Raises `ChannelTimeoutError` if it is not there by then, `InvalidArgumentError` for another
        model's server or a client that is there already.
        """
        deadline_s = time.monotonic() + timeout_s
        if self._endpoint is None:
            self._endpoint = Endpoint(messages.PROTOCOL, _refuse_all, name="flexkv-dp")
        connection = connect_when_there(self._endpoint, self._address, deadline_s)
        asked = messages.RegisterDPClient(dp_client_id=self.dp_client_id, shape=self._shape)
        try:
            expect(connection.call(asked, ANSWER_S), messages.Registered)
        except BaseException:
            connection.close()
            raise
        self._connection = connection

    def is_ready(self) -> bool:
        """As `KVManager.is_ready`, for all clients of the server."""
        return self._ask(messages.IsReady(), messages.Ready).is_ready

    def get_match(
        self,
        token_ids: Any,
        token_mask: Any = None,
        layer_granularity: int = -1,
        dp_id: int | None = None,
        *,
        cpu_only: bool = False,
        namespace: Sequence[str] | None = None,
        swa_aware: bool = False,
    ) -> tuple[int, Mask]:
        """As `KVManager.get_match`."""
        refuse_sliding(swa_aware=swa_aware)
        self._check_client(dp_id)
        return self._match(
            "get", token_ids, token_mask, None, layer_granularity, namespace, cpu_only=cpu_only
        )

    def put_match(
        self,
        token_ids: Any,
        token_mask: Any = None,
        dp_id: int | None = None,
        *,
        namespace: Sequence[str] | None = None,
    ) -> tuple[int, Mask]:
        """As `KVManager.put_match`."""
        self._check_client(dp_id)
        return self._match("put", token_ids, token_mask, None, -1, namespace)

    def get_async(
        self,
        token_ids: Any,
        slot_mapping: Any,
        token_mask: Any = None,
        layer_granularity: int = -1,
        dp_id: int | None = None,
        *,
        namespace: Sequence[str] | None = None,
    ) -> int:
        """As `KVManager.get_async`."""
        self._check_client(dp_id)
        matched = self._match(
            "get",
            token_ids,
            token_mask,
            request_tokens(slot_mapping, "slot_mapping"),
            layer_granularity,
            namespace,
        )
        return matched[0]

    def put_async(
        self,
        token_ids: Any,
        slot_mapping: Any,
        token_mask: Any = None,
        dp_id: int | None = None,
        *,
        namespace: Sequence[str] | None = None,
    ) -> int:
        """As `KVManager.put_async`."""
        self._check_client(dp_id)
        return self._match(
            "put",
            token_ids,
            token_mask,
            request_tokens(slot_mapping, "slot_mapping"),
            -1,
            namespace,
        )[0]

    def prefetch_async(
        self, token_ids: Any, namespace: Sequence[str] | None = None, swa_aware: bool = False
    ) -> int:
        """As `KVManager.prefetch_async`."""
        refuse_sliding(swa_aware=swa_aware)
        asked = messages.Prefetch(
            tokens=messages.pack_integers(token_ids), namespace=namespace_names(namespace)
        )
        (task_id,) = self._ask(asked, messages.Started).task_ids
        return task_id

    def launch(
        self,
        task_ids: int | Iterable[int],
        slot_mappings: Any,
        swa_slot_mappings: Any = None,
        as_batch: bool = False,
        layerwise_transfer: bool = False,
        counter_id: int = 0,
    ) -> list[int]:
        """As `KVManager.launch`."""
        refuse_sliding(swa_slot_mappings=swa_slot_mappings)
        refuse_layerwise(layerwise_transfer)
        ids, mappings = launched(task_ids, slot_mappings)
        slots = [messages.pack_integers(one) for one in mappings]
        asked = messages.Launch(task_ids=ids, slots=slots, as_batch=bool(as_batch))
        return self._ask(asked, messages.Started).task_ids

    launch_tasks = launch
    """FlexKV's name for it here."""

    def cancel(self, task_ids: int | Iterable[int]) -> None:
        """As `KVManager.cancel`."""
        self._ask(messages.Cancel(task_ids=task_id_list(task_ids)), messages.Done)

    cancel_tasks = cancel

    def wait(
        self, task_ids: int | Iterable[int], timeout: float = 20.0, completely: bool = False
    ) -> dict[int, KVResponse]:
        """As `KVManager.wait`."""
        timeout_s = wait_seconds(timeout)
        asked = messages.Wait(
            task_ids=task_id_list(task_ids), timeout_s=timeout_s, completely=bool(completely)
        )
        return _by_task(self._ask(asked, messages.Responses, timeout_s + ANSWER_S))

    def try_wait(self, task_ids: int | Iterable[int]) -> dict[int, KVResponse]:
        """As `KVManager.try_wait`."""
        asked = messages.Wait(task_ids=task_id_list(task_ids), timeout_s=None, completely=False)
        return _by_task(self._ask(asked, messages.Responses))

    def reset(self) -> None:
        """As `KVManager.reset`: for all clients of the server."""
        self._ask(messages.Reset(), messages.Done)

    def unregister(self) -> None:
        """Give back all that this client holds; the server goes on. Idempotent."""
        with suppress(ChannelError, NotInitializedError):
            self._ask(messages.Unregister(), messages.Done)
        self._close()

    def shutdown(self) -> None:
        """End the server, for all its clients. Safe to repeat."""
        with suppress(ChannelError, NotInitializedError):
            self._ask(messages.Shutdown(), messages.Done)
        self._close()

    def _close(self) -> None:
        with self._reconnecting:
            self._connection = None
            endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None:
            endpoint.close()

    def _match(
        self,
        kind: Literal["get", "put"],
        token_ids: Any,
        token_mask: Any,
        slots: Tokens | None,
        layer_granularity: int,
        namespace: Sequence[str] | None,
        *,
        cpu_only: bool = False,
    ) -> tuple[int, Mask]:
        check_layers(ALL_LAYERS, layer_granularity)
        tokens = request_tokens(token_ids)
        asked = messages.Match(
            kind=kind,
            tokens=messages.pack_integers(tokens),
            mask=messages.pack_mask(as_mask(token_mask, len(tokens))),
            namespace=namespace_names(namespace),
            layer_granularity=ALL_LAYERS,
            slots=None if slots is None else messages.pack_integers(slots),
            cpu_only=bool(cpu_only),
        )
        matched = self._ask(asked, messages.Matched)
        return matched.task_id, messages.mask_of(matched)

    def _check_client(self, dp_id: int | None) -> None:
        if dp_id is not None and dp_id != self.dp_client_id:
            raise InvalidArgumentError(
                f"dp_id={dp_id}: this is client {self.dp_client_id}; each has its own KVManager"
            )

    def _ask(self, message: Message, answer: type[Answer], timeout_s: float = ANSWER_S) -> Answer:
        connection = self._connection
        if connection is None:
            raise NotInitializedError("this client has no server yet: call KVManager.start()")
        if not connection.is_open:
            self.reconnect()
            connection = self._connection or connection
        return expect(connection.call(message, timeout_s), answer)


def _by_task(answered: messages.Responses) -> dict[int, KVResponse]:
    return {one.task_id: messages.response_of(one) for one in answered.responses}


def _refuse_all(request: Request) -> None:
    raise MessageError(f"a client takes no {type(request.message).__name__}")
