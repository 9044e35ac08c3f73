"""FlexKV's KVManager: a tiered KV cache for an engine, in its scheduler's process.

    manager = KVManager(ModelConfig(...), CacheConfig(num_cpu_blocks=4096))
    manager.start()
    manager.register_kv_caches(kv_tensors, layout)

    task, mask = manager.get_match(token_ids)          # mask: tokens in the tiers
    manager.launch(task, slot_mapping[mask])           # copies them into these slots
    manager.wait(task)[task].status                    # KVResponseStatus.SUCCESS

    task, mask = manager.put_match(token_ids)          # mask: tokens missing in the tiers
    manager.launch(task, slot_mapping[mask])
    manager.wait(task)                                 # now the slots may be overwritten
    manager.shutdown()

Any thread may call any method. A failing tier is a miss and raises nothing. `common.calls`
describes the calls.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from copy import copy
from typing import Any

from kvelastic.config import Config
from kvelastic.errors import (
    ChannelError,
    ConfigError,
    InvalidArgumentError,
    NotInitializedError,
    UnsupportedError,
)
from kvelastic.flexkv.common.calls import Calls
from kvelastic.flexkv.common.config import (
    GLOBAL_CONFIG_FROM_ENV,
    CacheConfig,
    ModelConfig,
    check_supported,
)
from kvelastic.flexkv.common.storage import KVCacheLayout
from kvelastic.flexkv.kvtask import KVTaskEngine
from kvelastic.flexkv.server.client import KVDPClient, KVTPClient
from kvelastic.flexkv.server.process import KVServerHandle
from kvelastic.flexkv.server.registration import Registrations
from kvelastic.flexkv.server.server import KVServer
from kvelastic.flexkv.server.utils import (
    default_endpoint,
    gpu_register_endpoint,
    remove_dead_endpoints,
    unique_endpoint,
)
from kvelastic.messages import Endpoint, Message

_log = logging.getLogger("kvelastic.flexkv")


class KVManager(Calls):
    """FlexKV's facade: forwards calls to its own task engine or to a server."""

    def __init__(
        self,
        model_config: ModelConfig,
        cache_config: CacheConfig,
        gpu_register_port: str | None = None,
        server_recv_port: str | None = None,
        dp_client_id: int = 0,
        event_collector: Any = None,
        *,
        settings: Config | None = None,
    ) -> None:
        """Check the configuration; `start` opens the tiers.

        Newer FlexKV has another order after `cache_config`: pass these by keyword. `settings` are
        kvelastic's own (None: from the environment). Raises `ConfigError` for an invalid value, and
        `UnsupportedError`, naming a replacement, for a missing feature.
        """
        check_supported(model_config, cache_config)
        model_config = copy(model_config)
        if event_collector is not None:
            raise UnsupportedError("event_collector: read `kvctl tiers` or the metrics instead")
        ports = (gpu_register_port, server_recv_port)
        is_port = all(port is None or isinstance(port, str) for port in ports)
        if not is_port or isinstance(dp_client_id, bool) or not isinstance(dp_client_id, int):
            raise InvalidArgumentError(
                f"gpu_register_port={gpu_register_port!r}, server_recv_port={server_recv_port!r},"
                f" dp_client_id={dp_client_id!r}: two endpoints and a number are wanted; FlexKV has"
                " changed their order, so pass them by name"
            )
        model_config.check_client(dp_client_id)
        self.dp_client_id = dp_client_id
        self._is_served = is_served(model_config)
        configured = GLOBAL_CONFIG_FROM_ENV.server_recv_port
        self.server_recv_port = server_recv_port or str(configured or "")
        if self._is_served and not self.server_recv_port:
            self.server_recv_port = default_endpoint()
        self._is_endpoint_named = bool(gpu_register_port or self.server_recv_port)
        self.gpu_register_port = gpu_register_port or gpu_register_endpoint(
            self.server_recv_port or unique_endpoint()
        )
        """Endpoint at which ranks in other processes register."""
        self._model, self._cache = model_config, cache_config
        self._listener: Endpoint | None = None
        self._server: KVServerHandle | None = None
        self._own_ranks: list[KVTPClient] = []
        self._engine: KVTaskEngine | KVDPClient
        if self._is_served:
            self._engine = KVDPClient(
                self.server_recv_port, model_config, dp_client_id, cache_config.tokens_per_block
            )
        else:
            self._engine = KVTaskEngine(model_config, cache_config, settings=settings)
            self._registrations = Registrations(self._engine)

    @property
    def task_engine(self) -> KVTaskEngine:
        """The task engine in this process. Raises `NotInitializedError` if a server runs it."""
        if not isinstance(self._engine, KVTaskEngine):
            raise NotInitializedError("the tasks of this manager are its server's")
        return self._engine

    def start(self) -> None:
        """Open the tiers, or start or find the server, and listen for ranks. Idempotent.

        Blocks until the stores are open or the server is ready. Raises the errors of both, and
        `ChannelError` if an endpoint is in use; nothing stays open then. After `shutdown`, tensors
        must be registered again, and earlier tasks are unknown.
        """
        try:
            if self._is_served and self._server is None and self._owns_server:
                self._server = KVServer.create_server(
                    self._model,
                    self._cache,
                    self.gpu_register_port,
                    self.server_recv_port,
                    inherit_env=False,
                )
            self._engine.start()
            if not self._is_served and self._listener is None:
                self._listener = self._listen()
        except BaseException:
            self.shutdown()
            raise

    def _listen(self) -> Endpoint | None:
        """Listen for ranks; return None if an automatically named endpoint is unusable."""
        remove_dead_endpoints()
        try:
            return self._registrations.listen(self.gpu_register_port)
        except ChannelError as error:
            if self._is_endpoint_named:
                raise
            _log.warning(
                "Ranks in other processes cannot register: %s. Set gpu_register_port if there are"
                " some.",
                error,
            )
            return None

    @property
    def _owns_server(self) -> bool:
        return self.dp_client_id == 0 and GLOBAL_CONFIG_FROM_ENV.server_launch_mode == "embedded"

    def reconnect(self) -> None:
        """Connect to the server again, after a call has reported that it ended. Blocks briefly."""
        if isinstance(self._engine, KVDPClient):
            self._engine.reconnect()

    def is_ready(self) -> bool:
        """Whether all ranks have registered their tensors, so that tasks can be launched.

        Raises `EngineError` with the reason if a missing rank was refused: a refused rank does not
        retry.
        """
        return self._engine.is_ready() if self._is_served else self._registrations.is_ready()

    def register_kv_caches(
        self,
        kv_caches: Sequence[Any],
        layout: KVCacheLayout,
        dp_client_id: int | None = None,
        tp_rank: int = 0,
    ) -> None:
        """Register a rank's KV tensors; the client defaults to this manager's.

        With a server, blocks until it has registered them. Otherwise as
        `KVTaskEngine.register_kv_caches`.
        """
        client = self.dp_client_id if dp_client_id is None else dp_client_id
        if isinstance(self._engine, KVTaskEngine):
            self._engine.register_kv_caches(kv_caches, layout, client, tp_rank)
            return
        rank = KVTPClient(self.gpu_register_port, client, tp_rank=tp_rank)
        self._own_ranks.append(rank)
        rank.register_to_server(kv_caches, layout)
        rank.wait_until_registered()

    def ask(self, call: Message, dp_id: int = 0) -> Any:
        """Run a call in this process's engine or in the server. See `Calls.ask`."""
        return self._engine.ask(call, dp_id)

    def shutdown(self) -> None:
        """Cancel all tasks and close the tiers. Idempotent. Blocks.

        With a server, only the client that started it ends it.
        """
        while self._own_ranks:
            self._own_ranks.pop().close()
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        if isinstance(self._engine, KVTaskEngine):
            self._engine.shutdown()
        elif self._server is None:
            self._engine.unregister()
        else:
            self._engine.shutdown()
            self._server.shutdown()
            self._server = None

    def check_integrity(self) -> None:
        """Check all parts in this process. Raises `IntegrityError`. Blocks."""
        if isinstance(self._engine, KVTaskEngine):
            self._registrations.check_integrity()
            self._engine.check_integrity()

    def __enter__(self) -> KVManager:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


def is_served(model: ModelConfig) -> bool:
    """Whether a server runs the tiers: with several clients, or if the settings require it.

    Raises `ConfigError` for FLEXKV_SERVER_LAUNCH_MODE=external without a server.
    """
    if model.clients > 1 or GLOBAL_CONFIG_FROM_ENV.server_client_mode:
        return True
    if GLOBAL_CONFIG_FROM_ENV.server_launch_mode == "external":
        raise ConfigError(
            "FLEXKV_SERVER_LAUNCH_MODE=external: one client has no server; set"
            " FLEXKV_SERVER_CLIENT_MODE=1, or leave it out"
        )
    return False
