"""The Ray Serve router, which chooses a replica for a request by `ranking`."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from kvelastic.integration.ray.messages import EngineRequest
from kvelastic.integration.ray.ranking import SeenPrefixes, Standing, ranks


class KvRouter(RequestRouter):  # type: ignore[misc] # Ray may not be installed
    """Ranks the replicas, one router per handle. Within a rank Ray takes the shortest queue.

    It does not use Ray's `FIFOMixin`, so a replica chosen for one request is not used for another.
    """

    def initialize_state(self, **_: Any) -> None:
        """Initialize the state. Ray calls this once."""
        self._seen = SeenPrefixes()
        self._turn = 0

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return the candidates by rank."""
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        self._seen.keep_only(by_name)
        request = _request_of(pending_request)
        standings = [
            Standing.of(
                name,
                replica.routing_stats,
                self._seen.hits(name, request.prefix),
                name in request.tried,
                name in request.sleepers,
            )
            for name, replica in by_name.items()
        ]
        self._turn += 1  # rotate: among equal queues Ray always takes the first
        found = []
        for rank in ranks(standings):
            first = self._turn % len(rank)
            found.append([by_name[name] for name in (*rank[first:], *rank[:first])])
        return found

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """Record that the replica now has the request's prefix."""
        self._seen.add(replica_id.unique_id, _request_of(pending_request).prefix)


def _request_of(pending: PendingRequest | None) -> EngineRequest:
    for argument in [] if pending is None else pending.args:
        if isinstance(argument, EngineRequest):
            return argument
    return EngineRequest("GET", "/")
