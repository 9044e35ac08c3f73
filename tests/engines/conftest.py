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
    from vllm_server import VllmServer

HERE = Path(__file__).parent
PROGRAMS = HERE.parent / "programs"

shared_servers: list[VllmServer] = []
"""Those that are running, for all tests of this folder."""
sglang_ends = contextlib.ExitStack()
"""Ends the shared SGLang servers."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.engine)
            item.add_marker(needs.vllm)


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
        for server in shared_servers:
            if server.process.poll() is None:
                server.stop()


@pytest.fixture(scope="session")
def servers(tiny_model: Path, log_folder: Path, instance_name: str) -> Iterator[tuple]:
    """Stock vLLM and vLLM with kvelastic, started together."""
    from vllm_server import VllmServer

    elastic = {
        "ENABLE_KVELASTIC": "true",
        "KVELASTIC_IPC_NAME": instance_name,
        # It runs to the end of the session: in the ledger of the other tests it would hold them to
        # its own idea of the device's capacity.
        "KVELASTIC_LEDGER": f"test-{os.getpid()}-servers",
        "KVELASTIC_MAX_CACHED_TOKENS": "-1",
        "KVELASTIC_IDLE_TRIM_SECONDS": "0.5",
        "KVELASTIC_SANITY_CHECK": "true",
        "VLLM_SERVER_DEV_MODE": "1",  # /sleep and /wake_up
    }
    with (
        VllmServer(tiny_model, log_folder / "stock.log") as stock,
        VllmServer(tiny_model, log_folder / "elastic.log", elastic) as with_kvelastic,
    ):
        shared_servers.extend((stock, with_kvelastic))
        yield stock.wait_until_ready(), with_kvelastic.wait_until_ready()


@pytest.fixture
def stock(servers: tuple):
    """Stock vLLM, running."""
    return servers[0]


@pytest.fixture
def elastic(servers: tuple, instance_name: str) -> Iterator:
    """vLLM with kvelastic, running, without a limit; the limit is lifted again afterwards."""
    from vllm_server import KV_BYTES

    from kvelastic import segment

    yield servers[1]
    if servers[1].process.poll() is None:
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
