"""Requests that need more than the limit allows: every surface says so, and what helps."""

from __future__ import annotations

import http.client
import json
import shlex
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
from called_kvctl import kvctl
from engine_server import Request
from vllm_server import KV_BYTES, PAGE_BYTES, VllmServer
from waiting import DEADLINE_S, wait_until

from kvelastic.instance.reading import look_at
from kvelastic.shared import segment

pytestmark = pytest.mark.timeout(600)

# One page has 31 blocks of 32 tokens beside the null block.
LARGE = Request([3 + index % 500 for index in range(1000)], 20)
SMALL = [Request([7, 8, 9 + index], 5) for index in range(2)]


@pytest.fixture
def limited(elastic: VllmServer, instance_name: str) -> Iterator[VllmServer]:
    """vLLM with a limit of one page; without one afterwards."""
    segment.request(instance_name, limit_bytes=PAGE_BYTES, wait_s=5)
    yield elastic
    segment.request(instance_name, limit_bytes=KV_BYTES, wait_s=5)


def explained(name: str) -> dict[str, dict[str, str]]:
    lines = json.loads(kvctl("explain", name, "--json").stdout)["lines"]
    return {line["about"]: line for line in lines}


def test_request_above_the_limit_is_reported_with_advice(stock, limited, instance_name) -> None:
    expected = stock.complete_all([LARGE, *SMALL])
    with ThreadPoolExecutor(3) as threads:
        answers = [threads.submit(limited.complete, LARGE)]
        wait_until(lambda: look_at(instance_name).requests_waiting == 1)
        answers += [threads.submit(limited.complete, small) for small in SMALL]
        wait_until(lambda: look_at(instance_name).requests_waiting == 3)

        status = look_at(instance_name)
        assert (status.word, status.first_needs_bytes) == ("stuck", 2 * PAGE_BYTES)
        assert status.first_may_need_bytes == 2 * PAGE_BYTES
        line = explained(instance_name)["waiting"]
        assert line["what"].startswith("3 requests wait for memory. The first needs 4.00 MiB (2 ")
        assert "its limit allows 2.00 MiB (1 page)" in line["what"]
        assert "stuck" in kvctl("list").stdout
        findings = json.loads(kvctl("doctor", "--json").stdout)
        (finding,) = [
            one
            for one in findings
            if one["check"] == "instances.waiting" and instance_name in one["what"]
        ]
        assert (finding["state"], finding["do"]) == ("problem", line["do"])
        scraped = kvctl("metrics").stdout
        for name, value in (("requests_waiting", 3), ("limit_too_low", 1)):
            begins = f'kvelastic_instance_{name}{{device="host",engine="vLLM"'
            (sample,) = [
                one
                for one in scraped.splitlines()
                if one.startswith(begins) and f'name="{instance_name}"' in one
            ]
            assert float(sample.split()[-1]) == value
        assert f"kvctl limit {instance_name} 4M" in limited.text()

        program, *words = shlex.split(line["do"])
        assert program == "kvctl"
        assert kvctl(*words, "--wait", "5").exit_code == 0
        assert [answer.result(timeout=DEADLINE_S) for answer in answers] == expected
    wait_until(lambda: look_at(instance_name).requests_waiting == 0)
    assert "waiting" not in explained(instance_name)
    assert look_at(instance_name).word == "applied"


def test_aborted_request_leaves_the_memory_wait(limited, instance_name) -> None:
    body = {"model": "m", "prompt": LARGE.prompt, "max_tokens": LARGE.max_tokens}
    with closing(http.client.HTTPConnection("127.0.0.1", limited.port)) as client:
        client.request(
            "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
        wait_until(lambda: look_at(instance_name).word == "stuck")
    wait_until(lambda: look_at(instance_name).requests_waiting == 0)
