"""Fixtures for tests with real servers: they start slowly, so most tests share two of an engine."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import needs
import pytest

if TYPE_CHECKING:
    from sglang_pair import Pair, Pairs
    from shared_servers import SharedServers
    from vllm_server import VllmServer

HERE = Path(__file__).parent
PROGRAMS = HERE.parent / "programs"

ENDS_SERVERS = "test_vllm_tiers_chaos.py"
vllm_servers: list[SharedServers] = []
"""Those of this session, once a test has asked for them."""
sglang_ends = contextlib.ExitStack()
"""Ends the shared SGLang servers."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = [place for place, item in enumerate(items) if item.path.parent == HERE]
    # What ends the shared servers comes last, so that they are not started again.
    ordered = sorted((items[place] for place in places), key=_ends_servers)
    for place, item in zip(places, ordered, strict=True):
        item.add_marker(pytest.mark.engine)
        item.add_marker(needs.vllm)
        items[place] = item


def _ends_servers(item: pytest.Item) -> bool:
    return item.path.name == ENDS_SERVERS


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny_model")
    subprocess.run([sys.executable, PROGRAMS / "tiny_model.py", folder], check=True)
    return folder


@pytest.fixture(scope="session")
def log_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vllm_logs")


@pytest.fixture(scope="session")
def instance_name() -> str:
    """The name of the shared server's segment."""
    return f"kvelastic_test_{os.getpid()}"


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    """The shared servers end with the last test here: others look at what runs on this machine.

    SGLang's end with their own last test, for one of them uses the processor while it idles.
    """
    if nextitem is None or not nextitem.path.name.startswith("test_sglang_"):
        sglang_ends.close()
    if nextitem is None or HERE not in nextitem.path.parents:
        for servers in vllm_servers:
            servers.end()


@pytest.fixture(scope="session")
def servers(tiny_model: Path, log_folder: Path, instance_name: str) -> Iterator[SharedServers]:
    from shared_servers import SharedServers

    shared = SharedServers(tiny_model, log_folder, instance_name)
    vllm_servers.append(shared)
    yield shared
    shared.end()


@pytest.fixture
def stock(servers: SharedServers) -> VllmServer:
    """Stock vLLM, running."""
    return servers[0]


@pytest.fixture
def elastic(servers: SharedServers, instance_name: str) -> Iterator[VllmServer]:
    """vLLM with kvelastic, running, without a limit; the limit is lifted again afterwards."""
    from vllm_server import KV_BYTES

    from kvelastic.shared import segment

    server = servers[1]
    yield server
    if server.process.poll() is None:
        segment.request(instance_name, limit_bytes=KV_BYTES, asleep=False, wait_s=5)


@pytest.fixture(scope="session")
def sglang_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from sglang_pair import make_model

    return make_model(tmp_path_factory.mktemp("tiny_model_for_sglang"))


@pytest.fixture(scope="session")
def sglang_pairs(sglang_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pairs]:
    """Elastic SGLang in both layouts."""
    from sglang_pair import Pairs

    pairs = Pairs(sglang_model, tmp_path_factory.mktemp("sglang_logs"))
    sglang_ends.callback(pairs.end)
    yield pairs
    sglang_ends.close()


@pytest.fixture(
    params=["true", pytest.param("false", marks=pytest.mark.matrix)], ids=["paged", "per buffer"]
)
def pair(request: pytest.FixtureRequest, sglang_pairs: Pairs) -> Iterator[Pair]:
    """One layout after the other; the limit is lifted again afterwards."""
    pair = sglang_pairs[request.param]
    yield pair
    if pair.server.process.poll() is None:
        pair.limit(None)


@pytest.fixture
def soak_seconds(request: pytest.FixtureRequest) -> float:
    """How long tests under load go on: 20 seconds, with `--soak` ten minutes."""
    return 600.0 if request.config.getoption("--soak", default=False) else 20.0
