"""AIBrix's runtime agent, from its own package, runs vLLM on kvelastic as it does on kvcached."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from client_environments import aibrix_environment
from engine_server import EngineServer
from ports import free_port
from vllm_server import (
    BLOCK_TOKENS,
    KV_BYTES,
    MAX_MODEL_TOKENS,
    VllmServer,
    engine_environment,
    make_requests,
)
from waiting import wait_until

from kvelastic.shared import ledger, segment

pytestmark = pytest.mark.timeout(1200)  # three servers start

NAME = f"kvc_aibrix_{os.getpid()}"
SHM = Path("/dev/shm")
MIB = 1 << 20


class Agent(VllmServer):
    """The agent. `complete` and what else VllmServer has go to the engine that it starts."""

    def __init__(self, folder: Path, log: Path) -> None:
        self.agent_port = free_port()
        command = [str(aibrix_environment()), "-m", "aibrix.app", "--host", "127.0.0.1"]
        environment = engine_environment(
            AIBRIX_ENGINE_REGISTRY_PATH=str(folder / "engines.json"),
            AIBRIX_WEIGHT_CACHE_DIR=str(folder / "weights"),
            PROMETHEUS_MULTIPROC_DIR=str(folder / "metrics"),
            LOG_PATH=str(folder / "agent.log"),
            INFERENCE_ENGINE_ENDPOINT="http://127.0.0.1:1",
        )
        EngineServer.__init__(
            self, [*command, "--port", str(self.agent_port)], environment, log, free_port()
        )
        self._refusals = []

    def is_up(self) -> bool:
        try:
            return self.get("/healthz") == {"status": "ok"}
        except OSError:
            assert self.process.poll() is None, self.tail()
            return False

    def get(self, path: str) -> Any:
        return self._call("GET", path)

    def do(self, what: str, **body: Any) -> dict[str, Any]:
        """One call of the agent's protocol."""
        done: dict[str, Any] = self._call("POST", f"/v1/runtime/models/{what}", body)
        return done

    def model(self) -> dict[str, Any]:
        """What the agent reports to AIBrix's controller about its one model."""
        (found,) = self.get("/v1/runtime/snapshot")["models"]
        return dict(found)

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        port, self.port = self.port, self.agent_port
        try:
            status, text = self.request(path, method, body=body)
        finally:
            self.port = port
        assert status == 200, f"{status}: {text!r}\n{self.tail()}"
        return json.loads(text)


def is_applied(limit_bytes: int) -> bool:
    """Whether the instance has acknowledged the limit and holds no more."""
    found = segment.inspect(NAME)
    return (
        found.ack["state"] == "applied"
        and found.usage["limit_bytes"] == limit_bytes >= found.usage["mapped_bytes"]
    )


@pytest.fixture
def agent(tmp_path: Path, log_folder: Path) -> Iterator[Agent]:
    with Agent(tmp_path, log_folder / "aibrix.log") as started:
        wait_until(started.is_up, "the agent does not answer")
        yield started


def test_agent_runs_a_model_from_activate_to_deactivate(
    agent: Agent, stock: VllmServer, tiny_model: Path
) -> None:
    requests = make_requests(12, seed=43)
    expected = stock.complete_all(requests)
    arguments = {
        "--dtype": "float32",
        "--host": "127.0.0.1",
        "--enforce-eager": "",
        "--no-enable-sleep-mode": "",  # vLLM refuses the option on a CPU, where sleep needs none
        "--max-model-len": str(MAX_MODEL_TOKENS),
        "--max-num-seqs": "16",
        "--block-size": str(BLOCK_TOKENS),
        "--kv-cache-memory-bytes": str(KV_BYTES),
    }
    started = agent.do(
        "activate",
        model_name="m",
        artifact_url=str(tiny_model),
        ipc_name=NAME,
        port=agent.port,
        engine_config={"args": arguments},
    )
    assert (started["status"], started["ipc_name"]) == ("success", NAME)
    agent.wait_until_ready()
    wait_until(lambda: agent.model()["phase"] == "active", "the agent does not see it")
    assert agent.complete_all(requests) == expected

    for number, limit_bytes in enumerate((24 * MIB, 32 * MIB)):
        done = agent.do(
            "kv-limit", model_name="m", limit_bytes=limit_bytes, operation_id=f"limit{number}"
        )
        assert done["applied"]
        wait_until(partial(is_applied, limit_bytes), "the limit is not applied")
        assert agent.complete_all(requests) == expected
        assert segment.inspect(NAME).usage["mapped_bytes"] <= limit_bytes
    wait_until(lambda: agent.model()["kv_capacity_bytes"] == 32 * MIB)
    assert 0 < agent.model()["kv_used_bytes"] <= 32 * MIB

    assert agent.do("sleep", model_name="m", level=1, operation_id="sleep")["applied"]
    assert agent.model()["phase"] == "sleeping"
    assert segment.inspect(NAME).usage["mapped_bytes"] == 0
    wait_until(lambda: agent.model()["kv_used_bytes"] == 0, "a sleeping model holds memory")
    assert agent.do("wake", model_name="m", operation_id="wake")["applied"]
    wait_until(lambda: agent.model()["phase"] == "active", "it does not wake")
    assert agent.complete_all(requests) == expected

    agent.family()
    agent.do("deactivate", model_name="m")
    wait_until(lambda: agent.get("/v1/runtime/snapshot")["models"] == [], "it does not end")
    assert not list(SHM.glob(f"{NAME}*"))
    assert NAME not in {info.name for info in segment.list_segments()}
    agent.stop()
    assert not any(NAME in str(info) for info in ledger.list_ledgers())
