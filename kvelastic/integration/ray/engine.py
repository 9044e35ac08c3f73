"""The Ray Serve deployment whose replicas run one engine each (`replica`)."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from typing import Any

import ray
from ray import serve

from kvelastic.errors import ClusterError
from kvelastic.integration.ray.autoscaling import stats_of
from kvelastic.integration.ray.messages import Control, Cut, EngineRequest, Head, Unserved
from kvelastic.integration.ray.replica import EngineReplica
from kvelastic.integration.ray.settings import RESOURCE, ClusterSettings
from kvelastic.units import MIB_BYTES, format_size


class KvEngine:
    """One replica of a model. Its instance in the node's ledger is named after it."""

    async def __init__(  # type: ignore[misc] # Ray awaits it
        self, settings: ClusterSettings, name: str
    ) -> None:
        """Wait until the engine is ready. Raises `ClusterError`; Ray then starts a new replica."""
        context = serve.get_replica_context()
        self._replica = EngineReplica(settings, name, context.replica_id.unique_id)
        await self._replica.start()
        try:
            await asyncio.to_thread(self._check_node)
        except BaseException:
            await self._replica.stop()
            raise

    async def forward(self, request: EngineRequest) -> AsyncIterator[Head | bytes | Unserved | Cut]:
        """Forward one request to the engine; see `messages`."""
        async for part in self._replica.serve(request):
            yield part

    async def report(self) -> dict[str, Any]:
        """Return the replica's report with its node's address."""
        node = ray.util.get_node_ip_address()
        return {**await asyncio.to_thread(self._replica.report), "node": node}

    async def control(self, replica: str | None, request: EngineRequest) -> Control | None:
        """Call a route of the replica's controller; return None if `replica` is another one."""
        if replica is not None and replica != self._replica.replica:
            return None
        node = ray.util.get_node_ip_address()
        return dataclasses.replace(await self._replica.control(request), node=node)

    async def record_routing_stats(self) -> dict[str, Any]:
        """Return the report for routers. Ray calls this every `report_every` seconds."""
        return await self.report()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the load for `autoscaling`. Ray calls this with autoscaling only."""
        return stats_of(await asyncio.to_thread(self._replica.report))

    def check_health(self) -> None:
        """Raise `ClusterError` if the engine has failed. Called by Ray; does not block."""
        if self._replica.problem is not None:
            raise ClusterError(self._replica.problem)

    async def __del__(self) -> None:
        """Stop the engine. Ray calls this when the replica shuts down gracefully."""
        await self._replica.stop()

    def _check_node(self) -> None:
        """Raise `ClusterError` if Ray may place more on this node than its ledgers can hold."""
        mine = ray.get_runtime_context().get_node_id()
        resources = [node["Resources"] for node in ray.nodes() if node["NodeID"] == mine]
        placed_bytes = int(sum(each.get(RESOURCE, 0) for each in resources)) * MIB_BYTES
        held_bytes = self._replica.device_capacity_bytes()
        if placed_bytes > held_bytes > 0:
            raise ClusterError(
                f"Ray counts {format_size(placed_bytes)} on this node, and its ledgers hold"
                f" {format_size(held_bytes)}: start Ray there with --resources="
                f"'{{\"{RESOURCE}\": {held_bytes // MIB_BYTES}}}', or raise KVELASTIC_HOST_MEMORY"
            )
