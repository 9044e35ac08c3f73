"""Names kvelastic's KV connectors in vLLM's settings.

`KVELASTIC_TIERS` must be enough to enable tiers. So if no connector is configured, this module
configures vLLM's OffloadingConnector with our spec (`tier_spec`). With `KVELASTIC_ROLE` it
configures our subclass of that connector (`transfer_connector`). Any other OffloadingConnector gets
our class, too (`connector_class`). Imports no vLLM at load.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from kvelastic.errors import UnsupportedEngineError

OFFLOADING_CONNECTOR: Final = "OffloadingConnector"
SEVERAL: Final = "MultiConnector"
OUR_MODULE: Final = "kvelastic.integration.vllm.connector_class"
"""Has a class of the same name, which vLLM prefers to its own."""
TRANSFER: Final = "KvelasticTransfer"
TRANSFER_MODULE: Final = "kvelastic.integration.vllm.transfer_connector"
SPEC_NAME: Final = "TierSpec"
SPEC_MODULE: Final = "kvelastic.integration.vllm.tier_spec"


def fields(*, transfers: bool = False) -> dict[str, Any]:
    """Return our values for the fields of vLLM's `KVTransferConfig`.

    `transfers`: blocks are exchanged with other engines (`KVELASTIC_ROLE`). A failed load is
    recomputed; by default vLLM fails the request.
    """
    connector: dict[str, Any] = {"kv_connector": OFFLOADING_CONNECTOR}
    if transfers:
        connector = {"kv_connector": TRANSFER, "kv_connector_module_path": TRANSFER_MODULE}
    return {
        **connector,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"spec_name": SPEC_NAME, "spec_module_path": SPEC_MODULE},
    }


def is_ours(connector: Any) -> bool:
    """Return True if this connector configuration names our spec."""
    if getattr(connector, "kv_connector", None) not in (OFFLOADING_CONNECTOR, TRANSFER):
        return False
    extra = connector.kv_connector_extra_config or {}
    return bool(extra.get("spec_module_path") == SPEC_MODULE)


def exchanges(connector: Any) -> bool:
    """Return True if this is our connector that exchanges blocks with other engines."""
    return is_ours(connector) and connector.kv_connector == TRANSFER


def filled_in(
    configured: Any, make: Callable[..., Any], *, offloads: bool, transfers: bool = False
) -> Any:
    """Return our connector, or `configured` if it is already ours.

    `make` is vLLM's `KVTransferConfig`. `offloads`: vLLM's own --kv-offloading-size is set.
    `transfers` as in `fields`. Raises `UnsupportedEngineError` for any other connector.
    """
    if is_ours(configured) and exchanges(configured) == transfers:
        return configured
    if transfers and getattr(configured, "kv_connector", None) == TRANSFER and not offloads:
        return make(**fields(transfers=True))  # named without the rest
    configured_name = None if configured is None else configured.kv_connector
    if offloads or configured_name is not None:
        named = "--kv-offloading-size" if offloads else f"the KV connector {configured_name}"
        ours = "KVELASTIC_ROLE" if transfers else "KVELASTIC_TIERS"
        raise UnsupportedEngineError(
            f"{ours} and {named} are both set. Both would load KV for the same request, and "
            "vLLM asks only the first. Unset one of the two."
        )
    return make(**fields(transfers=transfers))


def create_engine_config(
    original: Callable[..., Any], arguments: Any, *args: Any, **kwargs: Any
) -> Any:
    """Wrap vLLM's parsing of arguments: configure the connector."""
    from vllm.config import KVTransferConfig

    from kvelastic import config

    arguments.kv_transfer_config = filled_in(
        arguments.kv_transfer_config,
        KVTransferConfig,
        offloads=arguments.kv_offloading_size is not None,
        transfers=config.load().role is not None,
    )
    return original(arguments, *args, **kwargs)


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
