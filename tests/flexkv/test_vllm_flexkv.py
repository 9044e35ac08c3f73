"""vLLM's own FlexKVConnectorV1 on the alias: a prompt comes back from host and from disk.

On the CPU nothing insists on CUDA: the adapter gives the cache memory that can be handed over, by
vLLM's own hook for that.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from engine_server import Request
from processes import PROGRAMS, run_python
from vllm_server import BLOCK_TOKENS, KV_BYTES, VllmServer
from waiting import wait_until

from kvelastic.tiers.stores.disk.format import HEADER_BYTES, entries, unpack_header

pytestmark = [pytest.mark.timeout(900), pytest.mark.engine]

CONNECTOR = json.dumps(
    {
        "kv_connector": "FlexKVConnectorV1",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
    }
)


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    run_python(PROGRAMS / "tiny_model.py", folder)
    return folder


HOST_BLOCKS = 30
PROMPT_BLOCKS = 9
PROMPTS = [
    Request(random.Random(seed).choices(range(3, 512), k=PROMPT_BLOCKS * BLOCK_TOKENS + 5), 8)
    for seed in range(6)
]
"""54 blocks that have nothing in common: more than the host's tier holds."""


def disk_objects(folder: Path) -> int:
    """Return how many blocks the files of a disk tier list."""
    count = 0
    for file in folder.glob("*.kv"):
        with file.open("rb") as data:
            header = unpack_header(data.read(HEADER_BYTES), file.stat().st_size)
            if header is not None:
                geometry, file_id = header
                table = data.read(geometry.data_offset - HEADER_BYTES)
                count += sum(entry is not None for _, entry in entries(table, file_id))
    return count


def answers(server: VllmServer) -> list[list[int]]:
    """One after the other: what a load holds of the host's tier is another one's afterwards."""
    return [server.complete(request) for request in PROMPTS]


def test_prompt_is_loaded_from_host_and_disk(tiny_model: Path, tmp_path: Path) -> None:
    block_bytes = KV_BYTES // 1024
    environment = {
        "KVELASTIC_FLEXKV_ALIAS": "true",
        "FLEXKV_CPU_CACHE_GB": repr(HOST_BLOCKS * block_bytes / 2**30),
        "FLEXKV_SSD_CACHE_GB": "0.25",
        "FLEXKV_SSD_CACHE_DIR": str(tmp_path / "ssd"),
        "VLLM_SERVER_DEV_MODE": "1",
        "XDG_RUNTIME_DIR": str(tmp_path),  # its sockets, which a killed engine leaves
    }
    log = tmp_path / "vllm.log"
    arguments = ["--kv-transfer-config", CONNECTOR]
    with VllmServer(tiny_model, log, environment, arguments) as server:
        server.wait_until_ready()
        # Nothing is kept yet: these tokens are stock vLLM's.
        stock = answers(server)
        for _ in range(2):
            before = server.metrics()["external_prefix_cache_hits_total"]
            server.post("/reset_prefix_cache")
            assert answers(server) == stock
            found = server.metrics()["external_prefix_cache_hits_total"] - before
            assert found == len(PROMPTS) * PROMPT_BLOCKS * BLOCK_TOKENS
        assert found > HOST_BLOCKS * BLOCK_TOKENS, "the host alone would do"
        # A record that is torn is computed, and never answered with other tokens.
        for file in sorted((tmp_path / "ssd").rglob("*")):
            if file.is_file() and file.stat().st_size > block_bytes:
                with file.open("r+b") as records:
                    for at in range(0, file.stat().st_size, block_bytes // 4):
                        records.seek(at)
                        records.write(b"torn")
        server.post("/reset_prefix_cache")
        assert answers(server) == stock
        assert server.stop() == 0
    text = log.read_text(errors="replace")
    assert "Recovered from KV load failure" in text
    # vLLM kills its engine at once when it is told to end, and complains of that.
    assert "Traceback" not in text.split("[shutdown]")[0]


def test_named_weights_find_the_disk_after_restart(tiny_model: Path, tmp_path: Path) -> None:
    environment = {
        "KVELASTIC_FLEXKV_ALIAS": "true",
        "FLEXKV_CPU_CACHE_GB": "0.125",
        "FLEXKV_SSD_CACHE_GB": "0.25",
        "FLEXKV_SSD_CACHE_DIR": str(tmp_path / "ssd"),
        "XDG_RUNTIME_DIR": str(tmp_path),
    }
    arguments = ["--kv-transfer-config", CONNECTOR]
    seen = []
    for run, weights in enumerate(("commit 7", "commit 7", "commit 8")):
        own = {**environment, "FLEXKV_WEIGHTS": weights}
        with VllmServer(tiny_model, tmp_path / f"{run}.log", own, arguments) as server:
            server.wait_until_ready()
            told = server.complete(PROMPTS[0])
            hits = server.metrics()["external_prefix_cache_hits_total"]
            seen.append((told, hits))
            # vLLM kills its engine at once when it is told to end.
            if run == 0:
                wait_until(lambda: disk_objects(tmp_path / "ssd") >= PROMPT_BLOCKS)
            assert server.stop() == 0
    tokens = PROMPT_BLOCKS * BLOCK_TOKENS
    assert [hits for _, hits in seen] == [0, tokens, 0]
    assert seen[0][0] == seen[1][0] == seen[2][0]
