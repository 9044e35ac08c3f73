"""The routes of the API, in the order in which they are matched."""

from __future__ import annotations

from typing import Final

from kvelastic.controller.api import (
    metrics,
    routes_dashboard,
    routes_logs,
    routes_memory,
    routes_models,
    routes_sleep,
    routes_tiers,
)
from kvelastic.controller.api.routes import Handler, Who

ROUTES: Final[tuple[tuple[str, str, Who, Handler], ...]] = (
    ("GET", "/v1/models", Who.API, routes_models.list_openai_models),
    ("GET", "/v1/models/{model:path}", Who.API, routes_models.get_openai_model),
    ("GET", "/health", Who.ALL, routes_models.health),
    ("GET", "/health/{model:path}", Who.API, routes_models.model_health),
    ("GET", "/models", Who.API, routes_models.list_models),
    ("GET", "/models/idle", Who.API, routes_models.idle_models),
    ("GET", "/models/active", Who.API, routes_models.active_models),
    ("GET", "/traffic/stats", Who.API, routes_models.traffic_stats),
    ("GET", "/traffic/stats/{model:path}", Who.API, routes_models.model_traffic_stats),
    ("GET", "/version", Who.ALL, routes_models.version),
    ("GET", "/admin/models/{model:path}/logs", Who.ADMIN, routes_logs.engine_logs),
    ("GET", "/models/{model:path}/logs", Who.ADMIN, routes_logs.follow_log),
    ("GET", "/sleep/status", Who.API, routes_sleep.sleep_status),
    ("GET", "/sleep/candidates", Who.API, routes_sleep.sleep_candidates),
    ("POST", "/action/sleep/{model:path}", Who.ADMIN, routes_sleep.put_to_sleep),
    ("POST", "/action/wakeup/{model:path}", Who.ADMIN, routes_sleep.wake_up),
    ("PATCH", "/memory/{model:path}/tiers/{tier}", Who.ADMIN, routes_tiers.change_tier),
    ("POST", "/memory/{model:path}/tiers/{tier}/trim", Who.ADMIN, routes_tiers.trim_tier),
    ("POST", "/memory/{model:path}/tiers/clear", Who.ADMIN, routes_tiers.clear_tiers),
    ("POST", "/memory/{model:path}/tiers/erase", Who.ADMIN, routes_tiers.erase_records),
    ("POST", "/memory/{model:path}/tiers/verify", Who.ADMIN, routes_tiers.verify_tiers),
    ("GET", "/links", Who.API, routes_memory.links),
    # After the routes of tiers, which these would match as a model's name with slashes.
    ("GET", "/memory", Who.API, routes_memory.all_memory),
    ("POST", "/memory/{model:path}/trim", Who.ADMIN, routes_memory.trim),
    ("GET", "/memory/{model:path}", Who.API, routes_memory.memory_of),
    ("PATCH", "/memory/{model:path}", Who.ADMIN, routes_memory.change_memory),
    ("GET", "/devices", Who.API, routes_memory.devices),
    ("GET", "/devices/history", Who.API, routes_dashboard.devices_history),
    ("POST", "/admin/reload", Who.ADMIN, routes_models.reload_settings),
    ("GET", "/metrics", Who.API, metrics.metrics),
)
"""Method, path, authorization and handler; /openapi.json describes them."""
