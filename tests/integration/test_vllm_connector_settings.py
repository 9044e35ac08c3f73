"""Which connector vLLM gets with tiers, and what is refused with the reason."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvelastic.errors import UnsupportedEngineError
from kvelastic.integration.vllm import connector_settings
from kvelastic.integration.vllm.tier_refusals import (
    refuse_cache_for_tiers,
    refuse_for_tiers,
    refuse_without_tiers,
)


def connector(**fields: Any) -> SimpleNamespace:
    return SimpleNamespace(**{**connector_settings.fields(), **fields})


def vllm_config(**changes: Any) -> SimpleNamespace:
    given = {
        "kv_transfer_config": connector(),
        "cache_config": SimpleNamespace(enable_prefix_caching=True),
        "speculative_config": None,
        "parallel_config": SimpleNamespace(decode_context_parallel_size=1),
    }
    return SimpleNamespace(**{**given, **changes})


def test_connector_is_configured_by_default() -> None:
    for configured in (None, SimpleNamespace(kv_connector=None)):
        made = connector_settings.filled_in(configured, SimpleNamespace, offloads=False)
        assert connector_settings.is_ours(made)
        assert made.kv_load_failure_policy == "recompute", "a failed load must not fail a request"


def test_configured_own_connector_is_kept() -> None:
    ours = connector()
    assert connector_settings.filled_in(ours, SimpleNamespace, offloads=False) is ours


def test_role_configures_the_transfer_connector() -> None:
    named = SimpleNamespace(kv_connector=connector_settings.TRANSFER, kv_connector_extra_config={})
    for configured in (None, named):
        made = connector_settings.filled_in(
            configured, SimpleNamespace, offloads=False, transfers=True
        )
        assert connector_settings.exchanges(made)
        kept = connector_settings.filled_in(made, SimpleNamespace, offloads=False, transfers=True)
        assert kept is made
    with pytest.raises(UnsupportedEngineError, match="KVELASTIC_TIERS and the KV connector"):
        connector_settings.filled_in(named, SimpleNamespace, offloads=False)
    nixl = SimpleNamespace(kv_connector="NixlConnector")
    with pytest.raises(UnsupportedEngineError, match="KVELASTIC_ROLE and the KV connector Nixl"):
        connector_settings.filled_in(nixl, SimpleNamespace, offloads=False, transfers=True)


def test_role_on_a_gpu_is_rejected() -> None:
    ours = SimpleNamespace(**connector_settings.fields(transfers=True))
    on = {kind: SimpleNamespace(device_type=kind) for kind in ("cpu", "cuda")}
    refuse_for_tiers(vllm_config(kv_transfer_config=ours, device_config=on["cpu"]))
    with pytest.raises(UnsupportedEngineError, match="KVELASTIC_ROLE on a GPU"):
        refuse_for_tiers(vllm_config(kv_transfer_config=ours, device_config=on["cuda"]))


@pytest.mark.parametrize("name", ["OffloadingConnector", "NixlConnector", "MultiConnector"])
def test_other_connectors_are_rejected(name: str) -> None:
    other = SimpleNamespace(kv_connector=name, kv_connector_extra_config={})
    with pytest.raises(UnsupportedEngineError, match=f"the KV connector {name} are both set"):
        connector_settings.filled_in(other, SimpleNamespace, offloads=False)


def test_vllm_offloading_is_rejected() -> None:
    with pytest.raises(UnsupportedEngineError, match="--kv-offloading-size"):
        connector_settings.filled_in(None, SimpleNamespace, offloads=True)


def test_supported_configuration_is_accepted() -> None:
    refuse_for_tiers(vllm_config())
    refuse_without_tiers(vllm_config(kv_transfer_config=None))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"kv_transfer_config": None}, "a KV connector other than"),
        ({"cache_config": SimpleNamespace(enable_prefix_caching=False)}, "prefix-caching"),
        ({"speculative_config": object()}, "speculative"),
        ({"parallel_config": SimpleNamespace(decode_context_parallel_size=2)}, "decode_context"),
        (
            {"kv_transfer_config": connector(kv_connector_extra_config={
                "spec_module_path": connector_settings.SPEC_MODULE, "blocks_per_chunk": 2,
            })},
            "a record is one block",
        ),
    ],
)  # fmt: skip
def test_unsupported_configuration_is_rejected_with_the_reason(
    changes: dict[str, Any], why: str
) -> None:
    with pytest.raises(UnsupportedEngineError, match=why):
        refuse_for_tiers(vllm_config(**changes))


def test_own_connector_without_tiers_is_rejected() -> None:
    with pytest.raises(UnsupportedEngineError, match="neither KVELASTIC_TIERS nor KVELASTIC_ROLE"):
        refuse_without_tiers(vllm_config())


def cache(*kinds: str) -> SimpleNamespace:
    groups = [SimpleNamespace(kv_cache_spec=type(one, (), {})()) for one in kinds]
    return SimpleNamespace(kv_cache_groups=groups)


@pytest.mark.parametrize("kind", ["MambaSpec", "ChunkedLocalAttentionSpec"])
def test_layers_without_token_keys_are_rejected(kind: str) -> None:
    refuse_cache_for_tiers(cache("FullAttentionSpec", "SlidingWindowSpec"))
    with pytest.raises(UnsupportedEngineError, match=kind):
        refuse_cache_for_tiers(cache("FullAttentionSpec", kind))
