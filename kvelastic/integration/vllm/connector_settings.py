"""Names kvelastic's OffloadingConnector in vLLM's settings. Imports no vLLM."""

from __future__ import annotations

from typing import Any, Final

OFFLOADING_CONNECTOR: Final = "OffloadingConnector"
SEVERAL: Final = "MultiConnector"
OUR_MODULE: Final = "kvelastic.integration.vllm.connector_class"
"""Has a class of the same name, which vLLM prefers to its own."""


def name_our_class(configured: Any) -> None:
    """Replace every `OffloadingConnector` in vLLM's `KVTransferConfig`, which may be None."""
    if configured is None:
        return
    if configured.kv_connector == OFFLOADING_CONNECTOR:
        configured.kv_connector_module_path = OUR_MODULE
    if configured.kv_connector == SEVERAL:
        _name_inside(configured.kv_connector_extra_config or {})


def _name_inside(extra: dict[str, Any]) -> None:
    for one in extra.get("connectors", ()):
        if one.get("kv_connector") == OFFLOADING_CONNECTOR:
            one["kv_connector_module_path"] = OUR_MODULE
        _name_inside(one.get("kv_connector_extra_config") or {})
