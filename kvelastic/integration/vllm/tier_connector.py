"""Which KV connector vLLM is given where tiers are wanted.

`KVELASTIC_TIERS` alone is to switch tiers on, so that vLLM's OffloadingConnector with our spec
(`tier_spec`) is filled in where no connector is configured. Pure: imports no vLLM.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from kvelastic.errors import UnsupportedEngineError

CONNECTOR: Final = "OffloadingConnector"
SPEC_NAME: Final = "TierSpec"
SPEC_MODULE: Final = "kvelastic.integration.vllm.tier_spec"


def fields() -> dict[str, Any]:
    """What is filled in, as the fields of vLLM's `KVTransferConfig`.

    A load that fails is computed again: vLLM's default fails the request.
    """
    return {
        "kv_connector": CONNECTOR,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"spec_name": SPEC_NAME, "spec_module_path": SPEC_MODULE},
    }


def is_ours(connector: Any) -> bool:
    """Whether this configuration of a connector names our spec."""
    if getattr(connector, "kv_connector", None) != CONNECTOR:
        return False
    extra = connector.kv_connector_extra_config or {}
    return bool(extra.get("spec_module_path") == SPEC_MODULE)


def filled_in(configured: Any, make: Callable[..., Any], *, offloads: bool) -> Any:
    """The connector to run with: ours, or `configured` where that is ours already.

    `make` is vLLM's `KVTransferConfig`; `offloads`: vLLM's own --kv-offloading-size is set. Raises
    `UnsupportedEngineError` for any other connector.
    """
    if is_ours(configured):
        return configured
    configured_name = None if configured is None else configured.kv_connector
    if offloads or configured_name is not None:
        named = "--kv-offloading-size" if offloads else f"the KV connector {configured_name}"
        raise UnsupportedEngineError(
            f"KVELASTIC_TIERS is set, and {named} is configured besides: both would bring KV back "
            "for the same request, and vLLM asks the first of them only. Unset one of the two."
        )
    return make(**fields())


def create_engine_config(
    original: Callable[..., Any], arguments: Any, *args: Any, **kwargs: Any
) -> Any:
    """Wraps vLLM's making of its configuration from arguments: fills the connector in."""
    from vllm.config import KVTransferConfig

    arguments.kv_transfer_config = filled_in(
        arguments.kv_transfer_config,
        KVTransferConfig,
        offloads=arguments.kv_offloading_size is not None,
    )
    return original(arguments, *args, **kwargs)
