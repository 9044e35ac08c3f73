"""vLLM with a Mooncake Store: records outlive the engine, and answers the store's master."""

from __future__ import annotations

import importlib.util
from contextlib import ExitStack
from pathlib import Path

import pytest
from ports import free_port
from real_mooncake import lender, master
from tiered_server import TieredServer, check_found
from vllm_server import VllmServer, make_requests
from waiting import wait_until

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        importlib.util.find_spec("mooncake") is None,
        reason="Mooncake is not installed: pip install 'kvelastic[remote]'",
    ),
]

REQUESTS = make_requests(6, seed=62, shortest=200)


def test_objects_outlive_engine_and_requests_survive_master_kill(
    stock: VllmServer, tiny_model: Path, log_folder: Path, tmp_path: Path
) -> None:
    expected = stock.complete_all(REQUESTS)
    port = free_port()
    tiers = {"KVELASTIC_TIERS": f"mooncake:127.0.0.1:{port}"}

    def start(log: str) -> TieredServer:
        return TieredServer(tiny_model, log_folder / log, tmp_path / "no_disk", **tiers)

    with ExitStack() as before_the_fall:
        first = before_the_fall.enter_context(master(port))
        before_the_fall.enter_context(lender(port))
        with start("mooncake.log") as server:
            server.wait_until_ready()
            assert server.complete_all(REQUESTS) == expected
            server.post("/sleep?level=1")  # demotes all
            server.kill()
        with start("mooncake_again.log") as again:
            again.wait_until_ready()
            for request, tokens in zip(REQUESTS, expected, strict=True):
                check_found(again.ask(request), request, tokens)
            assert again.metrics()["external_prefix_cache_hits_total"] > 1000

            first.kill()
            before_the_fall.close()
            again.evict()
            assert again.complete_all(REQUESTS) == expected

            with master(port), lender(port):

                def is_found_again() -> bool:
                    again.post("/sleep?level=1")  # a page holds all of one request
                    again.post("/wake_up")
                    answer = again.ask(REQUESTS[0])
                    assert answer.tokens == expected[0]
                    return answer.loaded > 0

                # A tier that failed is left alone for a minute at most.
                wait_until(is_found_again, "the master came back, and nothing is stored", 100)
            again.check_end()
