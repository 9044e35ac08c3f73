"""KV connectors over kvelastic: answers are right, KV comes back, and what is copied stays put."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from vllm_server import KV_BYTES, PAGE_BYTES, VllmServer, make_requests
from waiting import DEADLINE_S, wait_until

from kvelastic.errors import UnsupportedEngineError
from kvelastic.integration.vllm.refusals import refuse_cache_configuration, refuse_configuration
from kvelastic.shared import segment

pytestmark = pytest.mark.timeout(900)

NAME = f"kvelastic_conn_{os.getpid()}"
REQUESTS = make_requests(8, seed=41, shortest=100)
OFFLOADING = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
        "spec_name": "HostOffloading",
        "spec_module_path": "host_offload",
        "cpu_bytes_to_use": 64 << 20,
        "offload_prompt_only": False,
    },
}


@pytest.fixture
def offloading(tiny_model: Path, log_folder: Path, tmp_path: Path) -> Iterator[VllmServer]:
    """vLLM with kvelastic, offloading to the host and, beside it, to a folder."""
    to_a_folder = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }
    both = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [OFFLOADING, to_a_folder]},
    }
    environment = {
        "ENABLE_KVELASTIC": "true",
        "KVELASTIC_IPC_NAME": NAME,
        "KVELASTIC_SANITY_CHECK": "true",
        "VLLM_SERVER_DEV_MODE": "1",
        "PYTHONPATH": str(Path(__file__).parent),
    }
    arguments = ["--kv-transfer-config", json.dumps(both)]
    log = log_folder / "connectors.log"
    with VllmServer(tiny_model, log, environment, arguments) as server:
        yield server.wait_until_ready()


def test_blocks_being_copied_are_neither_unmapped_nor_moved(stock, offloading) -> None:
    expected = stock.complete_all(REQUESTS)
    assert offloading.complete_all(REQUESTS) == expected

    # All requests have ended, and the copies of their blocks are still on their way: without a pin
    # the thread that copies would read pages that are gone, and the worker would die of it.
    with segment.post(NAME, segment.Request(limit_bytes=PAGE_BYTES)) as requested:
        wait_until(lambda: requested.now().state != "none", "no answer to the limit")
        assert requested.now().over_bytes > 0, "nothing was being copied"
    end_s = time.monotonic() + DEADLINE_S
    while segment.inspect(NAME).usage["mapped_bytes"] > PAGE_BYTES:
        assert time.monotonic() < end_s, "what was copied did not go"
        offloading.complete(REQUESTS[0]._replace(max_tokens=1, prompt=[3, 4, 5]))  # a step
    segment.request(NAME, limit_bytes=KV_BYTES, wait_s=DEADLINE_S)

    before = offloading.metrics()["external_prefix_cache_hits_total"]
    offloading.post("/reset_prefix_cache")
    assert offloading.complete_all(REQUESTS) == expected
    assert offloading.metrics()["external_prefix_cache_hits_total"] > before + 500

    # Under a limit below the working set, with loads and stores all the time.
    segment.request(NAME, limit_bytes=3 * PAGE_BYTES, wait_s=DEADLINE_S)
    for _ in range(2):
        offloading.post("/reset_prefix_cache")
        assert offloading.complete_all(REQUESTS) == expected
    offloading.post("/sleep?level=1")
    offloading.post("/wake_up")
    assert offloading.complete_all(REQUESTS) == expected
    assert offloading.stop() == 0
    log = offloading.log.read_text(errors="replace")
    assert "IntegrityError" not in log
    assert "sanity check failed" not in log


# --- what is refused ------------------------------------------------------------------------------


def configured(connector: object) -> SimpleNamespace:
    return SimpleNamespace(
        parallel_config=SimpleNamespace(data_parallel_size=1),
        attention_config=SimpleNamespace(hisparse_config=None),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        device_config=SimpleNamespace(device_type="cpu"),
        kv_transfer_config=connector,
    )


def connector(name: str, **more: object) -> SimpleNamespace:
    given = {"kv_connector_module_path": None, "kv_connector_extra_config": {}, **more}
    return SimpleNamespace(kv_connector=name, **given)


@pytest.mark.parametrize("name", ["ExampleConnector", "OffloadingConnector", "MultiConnector"])
def test_supported_connectors_are_accepted(name: str) -> None:
    refuse_configuration(configured(connector(name)))
    refuse_configuration(configured(None))


@pytest.mark.parametrize(
    ("refused", "why"),
    [
        (connector("NixlConnector"), "registers the whole KV cache"),
        (connector("LMCacheConnectorV1"), "not tested with pages that are unmapped"),
        (connector("SimpleCPUOffloadConnector"), "one layer"),
        (connector("Mine", kv_connector_module_path="mine"), "from its own module"),
        (
            connector("DecodeBenchConnector", kv_connector_extra_config={"startup_fill": True}),
            "have no memory",
        ),
        (
            connector(
                "MultiConnector",
                kv_connector_extra_config={
                    "connectors": [OFFLOADING, {"kv_connector": "NixlConnector"}]
                },
            ),
            "NixlConnector: it registers",
        ),
    ],
)
def test_unsupported_connectors_are_refused_with_the_reason(refused, why: str) -> None:
    with pytest.raises(UnsupportedEngineError, match=why):
        refuse_configuration(configured(refused))


def test_offloading_of_sliding_windows_is_refused() -> None:
    class SlidingWindowSpec:
        has_layer_views = True

    config = SimpleNamespace(
        kv_cache_groups=[SimpleNamespace(kv_cache_spec=SlidingWindowSpec())], kv_cache_tensors=[]
    )
    refuse_cache_configuration(configured(connector("ExampleConnector")), config)
    with pytest.raises(UnsupportedEngineError, match="without reporting which"):
        refuse_cache_configuration(configured(connector("OffloadingConnector")), config)
