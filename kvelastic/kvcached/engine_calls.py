"""kvcached's calls that are the same for every engine.

_calls = EngineCalls("vllm")                 # in kvelastic.integration.vllm.interfaces
init_kvelastic = _calls.init_kvelastic
"""

from __future__ import annotations

from typing import Any

from kvelastic.kvcached import embedded
from kvelastic.kvcached.snapshots import KVCachePoolSnapshot, RuntimeSnapshot


class EngineCalls:
    """The calls for one engine, by its name in `kvelastic.engines`. Thread-safe."""

    def __init__(self, engine: str) -> None:
        self._engine = engine

    def init_kvelastic(
        self,
        tp_rank: int = 0,
        tp_size: int = 1,
        is_worker: bool = False,
        device: str | None = None,
        async_sched: bool = False,
        *,
        world_size: int | None = None,
        pp_rank: int = 0,
    ) -> None:
        """Initialize this process. Call it first. Idempotent; another engine, device or rank count
        is refused.

        `device` is "cpu" (or "host") for the machine's memory; None uses KVELASTIC_DEVICE.
        `world_size` is an alias of `tp_size`. `is_worker` and `async_sched` exist for compatibility
        with kvcached and have no effect: there is one process, and a page is unmapped only when
        none of its blocks is in use. Raises `UnsupportedError` for more than one rank,
        `ConfigError` for an invalid variable, `DeviceUnavailableError` for a missing GPU.
        """
        embedded.init(
            self._engine,
            tp_rank=tp_rank,
            world_size=tp_size if world_size is None else world_size,
            pp_rank=pp_rank,
            device=device,
            is_worker=is_worker,
            async_sched=async_sched,
        )

    def observability_snapshot(self) -> RuntimeSnapshot:
        """Return the arguments of `init_kvelastic` and the resulting device. Works before init."""
        return embedded.runtime_snapshot(self._engine)

    def observability_snapshot_dict(self) -> dict[str, Any]:
        """Return `observability_snapshot()` as a JSON-compatible dictionary."""
        return self.observability_snapshot().to_dict()

    def kv_cache_pool_snapshots(self) -> list[KVCachePoolSnapshot]:
        """Return one snapshot for each group that has a manager."""
        return embedded.pool_snapshots(self._engine)

    def kv_cache_pool_snapshot_dicts(self) -> list[dict[str, Any]]:
        """Return `kv_cache_pool_snapshots()` as JSON-compatible dictionaries."""
        return [snapshot.to_dict() for snapshot in self.kv_cache_pool_snapshots()]
