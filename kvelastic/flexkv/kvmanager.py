"""FlexKV's KVManager: a tiered KV cache for an engine, in its scheduler's process.

    manager = KVManager(ModelConfig(...), CacheConfig(num_cpu_blocks=4096))
    manager.start()
    manager.register_kv_caches(kv_tensors, layout)

    task, mask = manager.get_match(token_ids)          # what is there
    manager.launch(task, slot_mapping[mask])           # into these slots
    manager.wait(task)[task].status                    # KVResponseStatus.SUCCESS

    task, mask = manager.put_match(token_ids)          # what is not there
    manager.launch(task, slot_mapping[mask])
    manager.wait(task)                                 # the slots may be written again
    manager.shutdown()

Any thread may call anything. Nothing raises for what a tier's medium does.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
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
from kvelastic.flexkv.common.config import (
    GLOBAL_CONFIG_FROM_ENV,
    CacheConfig,
    ModelConfig,
    check_supported,
)
from kvelastic.flexkv.common.request import KVResponse, Mask
from kvelastic.flexkv.common.storage import KVCacheLayout
from kvelastic.flexkv.kvtask import WAIT_S, KVTaskEngine
from kvelastic.flexkv.server.client import KVDPClient, KVTPClient
from kvelastic.flexkv.server.process import KVServerHandle
from kvelastic.flexkv.server.rank_listener import RankListener
from kvelastic.flexkv.server.server import KVServer
from kvelastic.flexkv.server.utils import (
    default_endpoint,
    gpu_register_endpoint,
    remove_dead_endpoints,
    unique_endpoint,
)

_log = logging.getLogger("kvelastic.flexkv")


class KVManager:
    """See the module."""

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
        """Checks the configuration; nothing is opened before `start`.

        Newer FlexKV has another order behind `cache_config`: pass by keyword. `settings` are
        kvelastic's own (None: from the environment). Raises `ConfigError` for a value that is not
        accepted, `UnsupportedError` for what is not there, with what to use instead.
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
        clients = model_config.dp_size * model_config.instance_num
        if not 0 <= dp_client_id < clients:
            raise InvalidArgumentError(
                f"dp_client_id={dp_client_id} is none of {clients} data-parallel clients; it is"
                " instance_id * dp_size + dp_rank"
            )
        self.dp_client_id = dp_client_id
        self._is_served = is_served(model_config)
        self.server_recv_port = server_recv_port or _configured_endpoint()
        if self._is_served and not self.server_recv_port:
            self.server_recv_port = default_endpoint()
        self._is_endpoint_named = bool(gpu_register_port or self.server_recv_port)
        self.gpu_register_port = gpu_register_port or gpu_register_endpoint(
            self.server_recv_port or unique_endpoint()
        )
        """Where ranks in other processes register. Without a server and a name, of this manager."""
        self._model, self._cache = model_config, cache_config
        self._listener: RankListener | None = None
        self._server: KVServerHandle | None = None
        self._own_ranks: list[KVTPClient] = []
        self._engine: KVTaskEngine | KVDPClient
        if self._is_served:
            self._engine = KVDPClient(
                self.server_recv_port, model_config, dp_client_id, cache_config.tokens_per_block
            )
        else:
            self._engine = KVTaskEngine(model_config, cache_config, settings=settings)

    @property
    def task_engine(self) -> KVTaskEngine:
        """What carries the calls out. Raises `NotInitializedError` where a server does."""
        if not isinstance(self._engine, KVTaskEngine):
            raise NotInitializedError("the tasks of this manager are its server's")
        return self._engine

    def start(self) -> None:
        """Open the tiers, or start the server or find it, and listen for ranks.

        Blocks as long as the stores need, or until the server is there. Raises what they raise, and
        `ChannelError` if an endpoint is taken; nothing is left then. Idempotent. After `shutdown`
        it starts anew: tensors are to be registered again, and tasks of before are not found.
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

    def _listen(self) -> RankListener | None:
        """None: nobody has named the endpoint, and it cannot be used."""
        remove_dead_endpoints()
        try:
            return RankListener(
                self._model,
                self._cache,
                self.gpu_register_port,
                lambda: self.task_engine.transfer_engine.gpu_worker,
            )
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
        """Look for the server again, after a call has said that it is gone. Blocks shortly."""
        if isinstance(self._engine, KVDPClient):
            self._engine.reconnect()

    def is_ready(self) -> bool:
        """Whether every expected rank has registered its tensors, so that tasks can be launched.

        Raises `EngineError` with the reason if a rank that is missing was refused: it will not come
        again by itself.
        """
        if self._engine.is_ready():
            return True
        if self._listener is not None:
            self._listener.check_refused()
        return False

    def register_kv_caches(
        self,
        kv_caches: Sequence[Any],
        layout: KVCacheLayout,
        dp_client_id: int | None = None,
        tp_rank: int = 0,
    ) -> None:
        """As `KVTaskEngine.register_kv_caches`; the client is this manager's unless it is named."""
        client = self.dp_client_id if dp_client_id is None else dp_client_id
        if isinstance(self._engine, KVTaskEngine):
            self._engine.register_kv_caches(kv_caches, layout, client, tp_rank)
            return
        rank = KVTPClient(self.gpu_register_port, client, tp_rank=tp_rank)
        self._own_ranks.append(rank)
        rank.register_to_server(kv_caches, layout)
        rank.wait_until_registered()

    def get_match(
        self,
        token_ids: Any,
        token_mask: Any = None,
        layer_granularity: int = -1,
        dp_id: int = 0,
        *,
        cpu_only: bool = False,
        namespace: Sequence[str] | None = None,
        swa_aware: bool = False,
    ) -> tuple[int, Mask]:
        """Find the longest prefix that is in the tiers: (task id, mask).

        The mask is True for one run of whole blocks, which begins at the block of the first True
        token of `token_mask` (None: all True). What is found is held until the task is launched and
        over, or cancelled: do one of the two. `cpu_only` asks no other tier. `token_ids` are a row
        of int64, of NumPy or torch on the CPU; `namespace` keeps tenants apart. Raises
        `InvalidArgumentError`, and `UnsupportedError` for a `layer_granularity` other than -1.
        """
        return self._engine.get_match(
            token_ids,
            token_mask,
            layer_granularity,
            self._client(dp_id),
            cpu_only=cpu_only,
            namespace=namespace,
            swa_aware=swa_aware,
        )

    def put_match(
        self,
        token_ids: Any,
        token_mask: Any = None,
        dp_id: int = 0,
        *,
        namespace: Sequence[str] | None = None,
    ) -> tuple[int, Mask]:
        """Find what is not in the CPU tier, and have places for it: (task id, mask).

        The mask is True from the first block that is not there, nor on its way, to the last whole
        one; all False where not all of that finds a place. `token_mask` must be True from the first
        token on. Launch or cancel the task. Raises `InvalidArgumentError`.
        """
        return self._engine.put_match(
            token_ids, token_mask, self._client(dp_id), namespace=namespace
        )

    def get_async(
        self,
        token_ids: Any,
        slot_mapping: Any,
        token_mask: Any = None,
        layer_granularity: int = -1,
        dp_id: int = 0,
        *,
        namespace: Sequence[str] | None = None,
    ) -> int:
        """Match, bind and launch in one call: the task id.

        `slot_mapping` has a slot for each True token of `token_mask`; those of tokens that are not
        there stay as they are. The mask comes in `KVResponse.return_mask`.
        """
        return self._engine.get_async(
            token_ids,
            slot_mapping,
            token_mask,
            layer_granularity,
            self._client(dp_id),
            namespace=namespace,
        )

    def put_async(
        self,
        token_ids: Any,
        slot_mapping: Any,
        token_mask: Any = None,
        dp_id: int = 0,
        *,
        namespace: Sequence[str] | None = None,
    ) -> int:
        """The same for a put."""
        return self._engine.put_async(
            token_ids, slot_mapping, token_mask, self._client(dp_id), namespace=namespace
        )

    def prefetch_async(
        self,
        token_ids: Any,
        namespace: Sequence[str] | None = None,
        swa_aware: bool = False,
    ) -> int:
        """Bring what only a farther tier has into the CPU tier: the task id.

        Its response comes when all of it is over, with the mask of what lies in the CPU tier then.
        """
        return self._engine.prefetch_async(token_ids, namespace, swa_aware)

    def launch(
        self,
        task_ids: int | Iterable[int],
        slot_mappings: Any,
        swa_slot_mappings: Any = None,
        as_batch: bool = False,
        layerwise_transfer: bool = False,
        counter_id: int = 0,
    ) -> list[int]:
        """Begin tasks; answers the ids to wait for. All of them, or none where one is refused.

        A slot mapping has the slots of exactly the True tokens of the task's mask, in order, whole
        blocks of the engine: block = slot // tokens_per_block. In the place of a block's slots its
        first one may stand for each token. One id may come with one bare array;
        arrays are of NumPy or torch. Tasks that are complete because nothing was found are left
        alone. With `as_batch` the answer is one id for all. Raises `InvalidArgumentError` (a
        ValueError) for a task that is launched or over, and for slots that do not fit;
        `NotInitializedError` before tensors are registered; `UnsupportedError` for layers one by
        one and sliding windows. Never blocks.
        """
        return self._engine.launch(
            task_ids, slot_mappings, swa_slot_mappings, as_batch, layerwise_transfer, counter_id
        )

    def cancel(self, task_ids: int | Iterable[int]) -> None:
        """Give tasks up: as `KVTaskEngine.cancel`."""
        self._engine.cancel(task_ids)

    def wait(
        self, task_ids: int | Iterable[int], timeout: float = WAIT_S, completely: bool = False
    ) -> dict[int, KVResponse]:
        """What became of tasks, for each id; `timeout` seconds for all of them together.

        SUCCESS comes as soon as the engine may go on: a get is in its blocks, the blocks of a put
        may be written again. With `completely` also what is written to farther tiers is over; a
        prefetch is always waited for so. FAILED says that some blocks were not moved, and the mask
        which were. A task that was not launched is UNREADY, one that is not known NOTFOUND. Blocks.
        """
        return self._engine.wait(task_ids, timeout, completely)

    def try_wait(self, task_ids: int | Iterable[int]) -> dict[int, KVResponse]:
        """The same without blocking; tasks on their way are left out."""
        return self._engine.try_wait(task_ids)

    def reset(self) -> None:
        """Forget everything in all tiers, for new weights: as `KVTaskEngine.reset`. Blocks."""
        self._engine.reset()

    def shutdown(self) -> None:
        """Cancel what is on its way and close the tiers. Idempotent. Blocks.

        Of several clients the one that has started the server ends it; the others leave it.
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
        """Every part's own check; of a server that is its own. Raises `IntegrityError`. Blocks."""
        if self._listener is not None:
            self._listener.check_integrity()
        if isinstance(self._engine, KVTaskEngine):
            self._engine.check_integrity()

    def _client(self, dp_id: int) -> int:
        """`dp_id` names another client of this process than the manager's own."""
        return dp_id or self.dp_client_id

    def __enter__(self) -> KVManager:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


def is_served(model: ModelConfig) -> bool:
    """Whether a server has the tiers: for several clients, or because the settings say so.

    Raises `ConfigError` for FLEXKV_SERVER_LAUNCH_MODE=external where there is no server.
    """
    several = model.dp_size > 1 or model.instance_num > 1
    if several or GLOBAL_CONFIG_FROM_ENV.server_client_mode:
        return True
    if GLOBAL_CONFIG_FROM_ENV.server_launch_mode == "external":
        raise ConfigError(
            "FLEXKV_SERVER_LAUNCH_MODE=external: one client has no server; set"
            " FLEXKV_SERVER_CLIENT_MODE=1, or leave it out"
        )
    return False


def _configured_endpoint() -> str:
    return str(GLOBAL_CONFIG_FROM_ENV.server_recv_port or "")
