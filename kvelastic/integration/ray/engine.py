"""Ray Serve's seam: a deployment whose replicas run one engine each (`replica`)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Final

import ray
from ray import serve

from kvelastic.errors import ClusterError
from kvelastic.integration.ray.messages import Cut, EngineRequest, Head, Unserved
from kvelastic.integration.ray.replica import EngineReplica
from kvelastic.integration.ray.settings import RESOURCE, ClusterSettings
from kvelastic.sizes import format_size

_MIB: Final = 1 << 20


class KvEngine:
    """One replica of a model. Its instance in the node's ledger is named after it."""

    async def __init__(  # type: ignore[misc] # Ray awaits it
        self, settings: ClusterSettings, name: str
    ) -> None:
        """Returns when the engine is ready. Raises `ClusterError`, and Ray starts another."""
        context = serve.get_replica_context()
        self._replica = EngineReplica(settings, name, context.replica_id.unique_id)
        await self._replica.start()
        try:
            await asyncio.to_thread(self._check_node)
        except BaseException:
            await self._replica.stop()
            raise

    async def forward(self, request: EngineRequest) -> AsyncIterator[Head | bytes | Unserved | Cut]:
        """Serve one request; see `messages`."""
        async for part in self._replica.serve(request):
            yield part

    async def report(self) -> dict[str, Any]:
        """How the replica is, with its node."""
        node = ray.util.get_node_ip_address()
        return {**await asyncio.to_thread(self._replica.report), "node": node}

    async def set_asleep(self, replica: str, asleep: bool) -> dict[str, Any] | None:
        """Put this replica to sleep or wake it; None if another one is meant.

        Returns the report afterwards, or `error` with why it may not.
        """
        if replica != self._replica.replica:
            return None
        error = await self._replica.set_asleep(asleep)
        return await self.report() if error is None else {"error": error}

    async def record_routing_stats(self) -> dict[str, Any]:
        """Called by Ray every `report_every` seconds; routers get it."""
        return await asyncio.to_thread(self._replica.report)

    def check_health(self) -> None:
        """Called by Ray. Raises `ClusterError` if the engine has failed; returns at once."""
        if self._replica.problem is not None:
            raise ClusterError(self._replica.problem)

    async def __del__(self) -> None:
        """Called by Ray when the replica ends in order."""
        await self._replica.stop()

    def _check_node(self) -> None:
        """Ray must not place more on a node than its ledgers hold. Raises `ClusterError`."""
        mine = ray.get_runtime_context().get_node_id()
        resources = [node["Resources"] for node in ray.nodes() if node["NodeID"] == mine]
        placed_bytes = int(sum(each.get(RESOURCE, 0) for each in resources)) * _MIB
        held_bytes = self._replica.device_capacity_bytes()
        if placed_bytes > held_bytes > 0:
            raise ClusterError(
                f"Ray counts {format_size(placed_bytes)} on this node, and its ledgers hold"
                f" {format_size(held_bytes)}: start Ray there with --resources="
                f"'{{\"{RESOURCE}\": {held_bytes // _MIB}}}', or raise KVELASTIC_HOST_MEMORY"
            )
