"""Builds the Serve application: one deployment per model, and the front before them.

serve.run(build({"models": [{"name": "chat", "command": [...]}]}), name="kvelastic")
# in Serve's file:   import_path: kvelastic.integration.ray.app:build    and   args: {models: ...}
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from kvelastic.integration.ray.autoscaling import Autoscaler
from kvelastic.integration.ray.engine import KvEngine
from kvelastic.integration.ray.front import KvFront
from kvelastic.integration.ray.router import KvRouter
from kvelastic.integration.ray.settings import (
    RESOURCE,
    AutoscaleSettings,
    ClusterModel,
    ClusterSettings,
    parse,
)

_FRONT_REQUESTS = 10_000
_LET_GO_S = 5.0
_REPORTS = 4
"""Minimum number of a replica's reports over which its queue is averaged."""


def build(args: Mapping[str, Any]) -> Application:
    """Return the application for a configuration (docs/cluster.md). Starts nothing.

    Raises `ClusterConfigError`.
    """
    settings = parse(args)
    models = {
        model.name: _engine_of(settings, model).bind(settings, model.name)
        for model in settings.models
    }
    front = settings.front
    deployment = serve.deployment(
        KvFront,
        num_replicas=front.replicas,
        max_replicas_per_node=front.replicas_per_node,
        max_ongoing_requests=_FRONT_REQUESTS,
        health_check_period_s=settings.health.period,
        health_check_timeout_s=settings.health.timeout,
        ray_actor_options={"num_cpus": front.num_cpus, "resources": front.resources},
    )
    return deployment.bind(settings, models)


def _engine_of(settings: ClusterSettings, model: ClusterModel) -> serve.Deployment:
    resources = dict(model.resources)
    if model.placed_mib:
        resources[RESOURCE] = float(model.placed_mib)
    scale = model.autoscale
    drain_s = 0.0 if scale is None else scale.drain
    return serve.deployment(
        KvEngine,
        name=f"KvEngine:{model.name}".replace("/", "_").replace("#", "_"),
        num_replicas=model.replicas if scale is None else None,
        autoscaling_config=None if scale is None else _scaling(settings, model.replicas, scale),
        max_replicas_per_node=model.replicas_per_node,
        max_ongoing_requests=model.most_requests,
        health_check_period_s=settings.health.period,
        health_check_timeout_s=settings.health.timeout,
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=drain_s + model.stop_timeout + _LET_GO_S,
        ray_actor_options={
            "num_cpus": model.num_cpus,
            "num_gpus": model.num_gpus,
            "resources": resources,
        },
        request_router_config=RequestRouterConfig(
            request_router_class=KvRouter,
            request_router_kwargs={
                "model": model.name,
                "period_s": settings.health.period,
                "silence_s": settings.health.silence,
                "rules": None if scale is None else asdict(scale.rules),
            },
            request_routing_stats_period_s=settings.report_every,
            request_routing_stats_timeout_s=max(5.0, settings.report_every),
        ),
    )


def _scaling(
    settings: ClusterSettings, replicas: int, scale: AutoscaleSettings
) -> AutoscalingConfig:
    policy = AutoscalingPolicy(
        policy_function=f"{Autoscaler.__module__}:{Autoscaler.__name__}",
        policy_kwargs=asdict(scale.rules),
    )
    with warnings.catch_warnings():
        # Ray 2.60 deprecates metrics_interval_s in favour of two environment variables. It does
        # not read them: the field alone sets the interval (10 s by default).
        warnings.filterwarnings("ignore", "The `metrics_interval_s` field", DeprecationWarning)
        return AutoscalingConfig(
            min_replicas=replicas,
            max_replicas=scale.most_replicas,
            target_ongoing_requests=scale.requests,
            upscale_delay_s=scale.start_after,
            downscale_delay_s=scale.end_after,
            metrics_interval_s=settings.report_every,
            look_back_period_s=max(scale.start_after, _REPORTS * settings.report_every),
            policy=policy,
        )
