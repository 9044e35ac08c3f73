"""The Ray Serve router, which chooses a replica for a request by `ranking`."""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Mapping
from typing import Any, Final

from ray.exceptions import RayError
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from kvelastic.integration.ray.autoscaling import Rules
from kvelastic.integration.ray.messages import EngineRequest
from kvelastic.integration.ray.ranking import SeenPrefixes, Standing, ranks
from kvelastic.integration.ray.watch import watch_of

_PING_S: Final = 60.0
"""Ray's name for how long a ping may take; it is sent on the connection and not enforced."""
_NONE_S: Final = 0.05
"""How long a request waits before it looks again for a replica that responds."""


class KvRouter(RequestRouter):  # type: ignore[misc] # Ray may not be installed
    """Ranks the replicas, one router per handle. Within a rank Ray takes the shortest queue.

    It does not use Ray's `FIFOMixin`, so a replica chosen for one request is not used for another.
    """

    def initialize_state(
        self,
        model: str = "",
        period_s: float = 0.5,
        silence_s: float = 2.0,
        rules: Mapping[str, float] | None = None,
        **_: Any,
    ) -> None:
        """Initialize the state. Ray calls this once, in the router's event loop."""
        self._seen = SeenPrefixes()
        self._turn = 0
        self._rules = None if rules is None else Rules(**rules)
        self._watch = watch_of(model, period_s, silence_s)
        self._kept: dict[str, RunningReplica] = {}
        self._pings: dict[str, asyncio.Task[None]] = {}
        self._watching = asyncio.get_running_loop().create_task(
            _look_forever(weakref.ref(self), period_s)
        )

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return the candidates by rank."""
        silent = self._watch.silent()
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        self._seen.keep_only(by_name)
        request = _request_of(pending_request)
        standings = [
            Standing.of(
                name,
                replica.routing_stats,
                queue=self.replica_queue_len_cache.get(replica.replica_id),
                hits=self._seen.hits(name, request.prefix),
                is_tried=name in request.tried,
                is_asleep=name in request.sleepers,
            )
            for name, replica in by_name.items()
            if name not in silent
        ]
        self._turn += 1  # rotate: among equal queues Ray always takes the first
        found = []
        for rank in ranks(standings, self._rules):
            first = self._turn % len(rank)
            found.append([by_name[name] for name in (*rank[first:], *rank[:first])])
        if not found:  # all are silent; Ray calls again at once, and would never let others run
            await asyncio.sleep(_NONE_S)
        return found

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """Record that the replica serves the request and now has its prefix."""
        request = _request_of(pending_request)
        self._seen.add(replica_id.unique_id, request.prefix)
        self._watch.accepted(request.number, replica_id.unique_id)

    def look(self, elapsed_s: float) -> None:
        """Ask each replica for a response, and count the silence of those that owe one.

        A replica that Ray has removed is watched until its requests have ended.
        """
        listed = {each.replica_id.unique_id: each for each in self.curr_replicas.values()}
        serving = self._watch.serving()
        kept = {name: each for name, each in self._kept.items() if name in serving}
        self._kept = kept | listed
        self._watch.reported({name: each.routing_stats for name, each in listed.items()})
        self._watch.look(self._kept, elapsed_s)
        for name, replica in self._kept.items():
            if name not in self._pings:
                ping = self._ping(name, replica)
                self._pings[name] = asyncio.get_running_loop().create_task(ping)
        for name in self._pings.keys() - self._kept.keys():
            self._pings[name].cancel()

    async def _ping(self, name: str, replica: RunningReplica) -> None:
        try:
            queue = await replica.get_queue_len(deadline_s=_PING_S)
        except RayError:  # it has ended or cannot be reached, so it stays silent
            pass
        else:
            self._watch.responded(name)
            if self.replica_queue_len_cache.get(replica.replica_id) is None:
                # Else the next request would wait until Ray has asked for it again.
                self.on_new_queue_len_info(replica.replica_id, queue)
        finally:
            del self._pings[name]


async def _look_forever(router: weakref.ref[KvRouter], period_s: float) -> None:
    last_s = time.monotonic()
    while True:
        await asyncio.sleep(period_s)
        now_s = time.monotonic()
        found = router()
        if found is None:
            return
        found.look(now_s - last_s)
        last_s = now_s
        del found


def _request_of(pending: PendingRequest | None) -> EngineRequest:
    for argument in [] if pending is None else pending.args:
        if isinstance(argument, EngineRequest):
            return argument
    return EngineRequest("GET", "/")
