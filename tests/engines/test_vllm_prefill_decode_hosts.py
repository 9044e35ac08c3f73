"""A prefill engine on one host and a decode engine on another, as docs/prefill_decode.md has it."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import needs
import pytest
from asking_threads import beside
from engine_server import Request
from hosts import Host, link
from prefill_decode_servers import RoleServer, wait_until_blocks_move
from vllm_server import BLOCK_TOKENS, make_requests
from waiting import wait_until

pytestmark = [pytest.mark.timeout(900), pytest.mark.matrix, needs.hosts]

PREFILL_ADDRESS, DECODE_ADDRESS = "10.99.8.1", "10.99.8.2"
REQUESTS = [one._replace(max_tokens=8) for one in make_requests(12, seed=48, shortest=200)]


class HostServer(RoleServer):
    """vLLM on a host. It listens on that host's loopback address."""

    def __init__(self, host: Host, role: str, model: Path, log: Path, **further: str) -> None:
        self._host = host
        super().__init__(role, model, log, under=host.command(), **further)

    def request(self, *arguments: Any, **more: Any) -> tuple[int, bytes]:
        with self._host.network():
            return super().request(*arguments, **more)

    def _published(self) -> tuple[Any, int]:
        kvctl = (sys.executable, "-m", "cli", "tiers", "show", self.name, "--json")
        command = self._host.command(*kvctl)
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        (shown,) = json.loads(said)
        return datetime.fromisoformat(shown["published"]), shown["tiers"][-1]["hits"]


class Pair(NamedTuple):
    prefill: HostServer
    decode: HostServer
    decode_host: Host
    answers: list[list[int]]
    """One engine's tokens for the requests."""

    def tokens(self, request: Request) -> list[int]:
        return self.decode.complete_with(request, self.prefill.prefill(request))

    def all_tokens(self) -> list[list[int]]:
        with ThreadPoolExecutor(4) as threads:
            return list(threads.map(self.tokens, REQUESTS))

    def forget(self) -> None:
        """The decode engine has no blocks any more, so that it needs those of the other."""
        self.decode.post("/reset_prefix_cache")

    def set_wire(self, state: str) -> None:
        """`down` or `up`."""
        command = self.decode_host.command("ip", "link", "set", "wire1", state)
        subprocess.run(command, check=True)


@pytest.fixture(scope="module")
def pair(tiny_model: Path, log_folder: Path) -> Iterator[Pair]:
    secret = log_folder / "secret"
    secret.touch(0o600)
    secret.write_text(secrets.token_hex(32))
    of_both = {"KVELASTIC_LINK_SECRET": str(secret)}
    of_prefill = {
        "KVELASTIC_PREFILL_ADDRESS": f"tcp://{PREFILL_ADDRESS}:26000",
        "KVELASTIC_LINK_ALLOW": "10.99.8.0/24",
        "KVELASTIC_LINK_DATA_PORTS": "26100-26131",
    }
    logs = [log_folder / f"{role}_host.log" for role in ("prefill", "decode")]
    with Host() as one, Host() as other:
        link(one, other, PREFILL_ADDRESS, DECODE_ADDRESS)
        with (
            HostServer(one, "prefill", tiny_model, logs[0], **of_both, **of_prefill) as prefill,
            HostServer(other, "decode", tiny_model, logs[1], **of_both) as decode,
        ):
            prefill.wait_until_ready()
            decode.wait_until_ready()
            wait_until_blocks_move(prefill, decode)
            yield Pair(prefill, decode, other, prefill.complete_all(REQUESTS))


def test_blocks_cross_the_network(pair: Pair) -> None:
    before = pair.decode.pulled()
    assert pair.tokens(REQUESTS[0]) == pair.answers[0]
    blocks = len(REQUESTS[0].prompt) // BLOCK_TOKENS
    assert pair.decode.pulled() == before + blocks


def test_cut_network_is_computed_until_it_heals(pair: Pair) -> None:
    pair.forget()
    pair.set_wire("down")
    try:
        assert pair.all_tokens() == pair.answers
    finally:
        pair.set_wire("up")
    before = pair.decode.pulled()

    def is_pulled() -> bool:
        pair.forget()
        assert pair.tokens(REQUESTS[1]) == pair.answers[1]
        return pair.decode.pulled() > before

    wait_until(is_pulled, "the decode engine does not ask the other one again")


def test_network_cut_in_the_middle_keeps_tokens(pair: Pair) -> None:
    def cut(is_over: threading.Event) -> None:
        while not is_over.wait(0.7):
            pair.set_wire("down")
            is_over.wait(0.3)
            pair.set_wire("up")

    with beside(cut):
        for _ in range(5):
            pair.forget()
            assert pair.all_tokens() == pair.answers
