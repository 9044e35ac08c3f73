"""vLLM with a disk tier: what its cache gave up comes back, with the tokens that stock computes."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from asking_threads import beside
from shared_servers import SharedServers
from simulated_machine import SimulatedMachine
from tiered_server import NAME, Answer, TieredServer, check_found
from under_tiers import changing_limits
from vllm_server import KV_BYTES, PAGE_BYTES, make_requests

from kvelastic.shared import segment

pytestmark = pytest.mark.timeout(600)

PROGRAMS = Path(__file__).parents[1] / "programs"
REQUESTS = make_requests(10, seed=61, shortest=200)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiers") / "disk"


@pytest.fixture(scope="module")
def expected(servers: SharedServers) -> list[list[int]]:
    answers: list[list[int]] = servers[0].complete_all(REQUESTS)
    return answers


@pytest.fixture(scope="module")
def tiered(
    tiny_model: Path, log_folder: Path, folder: Path, expected: list[list[int]]
) -> Iterator[TieredServer]:
    """One that has answered all requests once."""
    with TieredServer(tiny_model, log_folder / "tiers.log", folder) as server:
        server.wait_until_ready()
        assert server.complete_all(REQUESTS) == expected
        yield server


@contextmanager
def disturbed(server: TieredServer) -> Iterator[None]:
    """In the body clients leave, caches are reset, and the engine sleeps and wakes."""

    def disturb(is_over: threading.Event) -> None:
        body = {"model": "m", "prompt": REQUESTS[1].prompt, "max_tokens": 50, "stream": True}
        while not is_over.is_set():
            leaving = http.client.HTTPConnection("127.0.0.1", server.port, timeout=300)
            leaving.request(
                "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
            )
            is_over.wait(0.03)
            leaving.close()
            server.post("/reset_prefix_cache?reset_running_requests=true")
            server.post("/sleep?level=1&mode=wait")
            server.post("/wake_up")

    with beside(disturb):
        yield


def test_evicted_prefixes_are_loaded_from_the_tier(tiered, expected) -> None:
    tiered.evict()
    loaded = 0
    for request, tokens in zip(REQUESTS, expected, strict=True):
        answer = tiered.ask(request)
        check_found(answer, request, tokens)
        loaded += answer.loaded
    assert loaded > 1000, "nothing had been evicted"


def test_sleep_demotes_blocks_for_reuse_after_wake(tiered, expected) -> None:
    for _ in range(2):
        tiered.post("/sleep?level=1")
        tiered.post("/wake_up")
        answer = tiered.ask(REQUESTS[0])
        assert answer.own == 0, "vLLM's own cache has slept"
        check_found(answer, REQUESTS[0], expected[0])


def test_different_cache_salt_finds_nothing(tiered, expected) -> None:
    tiered.evict()
    before = tiered.metrics()
    body = {"model": "m", "prompt": REQUESTS[0].prompt, "max_tokens": 1, "cache_salt": "other"}
    connection = http.client.HTTPConnection("127.0.0.1", tiered.port, timeout=300)
    connection.request(
        "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
    )
    assert connection.getresponse().status == 200
    connection.close()
    after = tiered.metrics()
    for name in ("prefix_cache_hits_total", "external_prefix_cache_hits_total"):
        assert after[name] == before[name]


def test_changing_limits_keep_the_tokens(tiered, expected) -> None:
    with changing_limits(NAME, PAGE_BYTES, at_last_bytes=KV_BYTES):
        rounds = [tiered.complete_all(REQUESTS) for _ in range(3)]
    assert rounds == [expected] * 3


def test_restarted_server_finds_objects_but_not_after_reset(
    tiered, expected, tiny_model, log_folder, folder
) -> None:
    tiered.post("/sleep?level=1")  # demotes all
    tiered.kill()
    log = log_folder / "tiers_again.log"
    with TieredServer(tiny_model, log, folder) as again:
        again.wait_until_ready()
        for request, tokens in zip(REQUESTS, expected, strict=True):
            answer = again.ask(request)
            check_found(answer, request, tokens)
        assert again.metrics()["external_prefix_cache_hits_total"] > 1000

        again.post("/reset_prefix_cache")
        assert again.ask(REQUESTS[0]) == Answer(expected[0], 0, 0)
        again.post("/sleep?level=1")
        again.post("/wake_up")
        answer = again.ask(REQUESTS[0])
        assert answer.own == 0
        check_found(answer, REQUESTS[0], expected[0])

        # Records that have lost their bytes are misses, and computed again.
        again.post("/sleep?level=1")
        again.post("/wake_up")
        (file,) = folder.glob("*.kv")
        size_bytes = file.stat().st_size
        with file.open("r+b") as opened:
            opened.seek(size_bytes // 256)
            opened.write(bytes(size_bytes - size_bytes // 256))
        assert again.complete_all(REQUESTS) == expected
        again.check_end()
        assert "could not be read from the tiers" in log.read_text(errors="replace")


def test_cache_groups_with_sliding_windows_use_the_tier(log_folder, tmp_path) -> None:
    model = tmp_path / "model"
    program = PROGRAMS / "tiny_architectures.py"
    subprocess.run([sys.executable, program, "full_and_sliding", model], check=True)
    with TieredServer(model, log_folder / "tiers_windows.log", tmp_path / "disk") as server:
        server.wait_until_ready()
        expected = server.complete_all(REQUESTS)
        server.evict()
        answers = [server.ask(request) for request in REQUESTS]
        assert [answer.tokens for answer in answers] == expected
        assert sum(answer.loaded for answer in answers) > 500
        segment.request(NAME, limit_bytes=3 * PAGE_BYTES, wait_s=60)
        with disturbed(server):
            assert [server.complete_all(REQUESTS) for _ in range(2)] == [expected] * 2
        assert server.complete_all(REQUESTS) == expected
        server.check_end()


def test_gpu_cache_uses_a_host_tier(tiny_model, log_folder, tmp_path, expected) -> None:
    """Over the simulated device: copies go through the driver, in the worker's process."""
    with (
        SimulatedMachine(tmp_path, memory_bytes=256 << 20) as machine,
        TieredServer(
            tiny_model,
            log_folder / "tiers_gpu.log",
            tmp_path / "disk",
            KVELASTIC_TIERS="host:64M",
            **machine.engine_environment(),
        ) as server,
    ):
        server.wait_until_ready()
        assert server.complete_all(REQUESTS) == expected
        server.evict()
        for request, tokens in zip(REQUESTS, expected, strict=True):
            check_found(server.ask(request), request, tokens)
        server.post("/sleep?level=1")
        server.post("/wake_up")
        answer = server.ask(REQUESTS[0])
        assert answer.own == 0
        check_found(answer, REQUESTS[0], expected[0])
        server.check_end()
