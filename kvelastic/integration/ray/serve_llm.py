"""The server class for Ray Serve LLM's own application, with an elastic KV cache.

    LLMConfig(
        ...,
        server_cls="kvelastic.integration.ray.serve_llm:KvLLMServer",
        runtime_env={"env_vars": {"ENABLE_KVELASTIC": "true", "KVELASTIC_MIN": "2G"}},
    )

vLLM runs in Ray's replica here, not in a separate server. So the replica has no controller: it
sleeps only when `sleep` is called, and a request wakes it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable
from typing import Any

from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.llm import LLMConfig
from ray.serve.llm.deployment import LLMServer

from kvelastic.controller.models.gate import State
from kvelastic.integration.ray.node_room import ledger_report
from kvelastic.integration.ray.replica import instance_name
from kvelastic.integration.ray.router import KvRouter
from kvelastic.integration.ray.settings import RESOURCE, resource_mib
from kvelastic.units import parse_size

_REPORT_EVERY_S = 0.5


class KvLLMServer(LLMServer):  # type: ignore[misc] # Ray may not be installed
    """One replica of a model. Its instance in the node's ledger is named `ray-MODEL-REPLICA`."""

    async def __init__(  # type: ignore[misc] # Ray awaits it
        self, llm_config: LLMConfig, **further: Any
    ) -> None:
        """Wait until the engine is ready."""
        replica = serve.get_replica_context().replica_id.unique_id
        self._instance = instance_name(llm_config.model_id, replica)
        self._state = State.AWAKE
        self._changing = asyncio.Lock()
        os.environ["KVELASTIC_IPC_NAME"] = self._instance  # the engine's processes inherit it
        await super().__init__(llm_config, **further)

    @classmethod
    def get_deployment_options(cls, llm_config: LLMConfig) -> dict[str, Any]:
        """Return Ray's options, with `KvRouter`, and with the guarantee as a resource.

        What `deployment_config` sets stays. Raises `InvalidArgumentError` if `KVELASTIC_MIN` is not
        a size.
        """
        variables = (llm_config.runtime_env or {}).get("env_vars", {})
        guarantee_bytes = parse_size(variables.get("KVELASTIC_MIN", "0"))
        deployment = dict(llm_config.deployment_config)
        actor = dict(deployment.get("ray_actor_options") or {})
        if guarantee_bytes:
            placed_mib = float(resource_mib(guarantee_bytes))
            actor["resources"] = {RESOURCE: placed_mib, **(actor.get("resources") or {})}
        deployment["ray_actor_options"] = actor
        copy = llm_config.model_copy(update={"deployment_config": deployment})
        router = RequestRouterConfig(
            request_router_class=KvRouter,
            request_router_kwargs={"model": llm_config.model_id},
            request_routing_stats_period_s=_REPORT_EVERY_S,
        )
        options: dict[str, Any] = super().get_deployment_options(copy)
        return {"request_router_config": router, **options}

    async def record_routing_stats(self) -> dict[str, Any]:
        """Return Ray's report and the one for `KvRouter`."""
        state, is_awake = self._state, self._is_awake
        found = await asyncio.to_thread(ledger_report, self._instance, is_awake=is_awake)
        from_ray = await super().record_routing_stats() or {}
        return {**from_ray, **found, "instance": self._instance, "state": state.value}

    @property
    def _is_awake(self) -> bool:
        return self._state is State.AWAKE

    async def sleep(self, **options: Any) -> None:
        """Put the engine and its memory to sleep, until `wakeup` or the next request."""
        async with self._changing:
            await self._change(State.FALLING_ASLEEP, State.ASLEEP, super().sleep(**options))

    async def wakeup(self, **options: Any) -> None:
        """Wake the engine."""
        async with self._changing:
            await self._change(State.WAKING, State.AWAKE, super().wakeup(**options))

    async def _change(self, through: State, to: State, call: Awaitable[None]) -> None:
        before, self._state = self._state, through
        try:
            await call
            before = to
        finally:
            self._state = before

    async def _run_request(self, *request: Any, **how: Any) -> Any:
        """Run a request. The first one wakes a sleeping engine, and the others wait for that."""
        if not self._is_awake:
            async with self._changing:
                if not self._is_awake:
                    await self._change(State.WAKING, State.AWAKE, super().wakeup())
        return await super()._run_request(*request, **how)
