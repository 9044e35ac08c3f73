"""Two data-parallel engines of two ranks each, as processes: one is killed, the others go on."""

from __future__ import annotations

import json
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from flexkv_clients import MODEL, RANKS, TOKENS, cache_shape
from processes import PROGRAMS, LineProgram
from waiting import wait_until

from kvelastic.flexkv.common.config import CacheConfig, ModelConfig
from kvelastic.flexkv.common.memory_handle import TensorSharedHandle, shared_zeros
from kvelastic.flexkv.server.server import KVServer

pytestmark = pytest.mark.slow


class Client:
    """A process that is started anew when it has been killed."""

    def __init__(self, role: str, facts: dict[str, object], fds: list[int]) -> None:
        self.role, self.facts, self.fds = role, facts, fds
        self.start()

    def start(self) -> None:
        """`is_registered` waits for the end of that."""
        self.process = LineProgram(
            PROGRAMS / "flexkv_clients.py", self.role, json.dumps(self.facts), pass_fds=self.fds
        )

    def is_registered(self) -> bool:
        return self.process.read() == "registered"

    def begin(self, steps: int) -> None:
        """Let an engine take steps; each writes a line."""
        self.process.send(str(steps))


class Engines:
    """A server in this process, and the clients around it."""

    def __init__(self, folder: Path, cache: CacheConfig, seed: int) -> None:
        self.port = f"ipc://{folder}/s"
        self.server = KVServer(ModelConfig(**MODEL), cache, server_recv_port=self.port)
        self.handles = [
            [TensorSharedHandle(shared_zeros(cache_shape(), "float16")) for _ in range(RANKS)]
            for _ in range(2)
        ]
        self.ranks = [
            Client(
                "tp",
                {
                    "port": self.server.gpu_register_port,
                    "dp": dp,
                    "rank": rank,
                    "fd": self.handles[dp][rank].fd,
                },
                [self.handles[dp][rank].fd],
            )
            for dp in range(2)
            for rank in range(RANKS)
        ]
        self.engines = [
            Client(
                "dp",
                {
                    "port": self.port,
                    "dp": dp,
                    "fds": [one.fd for one in self.handles[dp]],
                    "seed": seed + dp,
                },
                [one.fd for one in self.handles[dp]],
            )
            for dp in range(2)
        ]
        assert all(one.is_registered() for one in self.clients)

    @property
    def clients(self) -> list[Client]:
        return [*self.ranks, *self.engines]

    def close(self) -> None:
        for one in self.clients:
            one.process.kill()
        self.server.close()
        for group in self.handles:
            for handle in group:
                handle.close()


@contextmanager
def engines_over(folder: Path, seed: int) -> Iterator[Engines]:
    cache = CacheConfig(
        tokens_per_block=TOKENS,
        num_cpu_blocks=16,
        enable_ssd=True,
        ssd_cache_dir=str(folder / "ssd"),
        num_ssd_blocks=64,
    )
    with ExitStack() as stack:
        engines = Engines(folder, cache, seed)
        stack.callback(engines.close)
        yield engines


def seen(engine: Client, count: int) -> Counter[str]:
    """What that many steps came to; a block with wrong bytes is never among it."""
    lines = Counter(engine.process.read() for _ in range(count))
    assert "WRONG" not in lines
    return lines


def until(engine: Client, outcome: str) -> None:
    for _ in range(5000):
        engine.begin(1)
        if outcome in seen(engine, 1):
            return
    raise AssertionError(f"no {outcome} in 5000 steps")


def wait_until_nothing_is_held(server: KVServer) -> None:
    """Wait until what killed clients held has been given back, and look whether that is all."""
    wait_until(lambda: not server.open_tasks and not server.registered_ranks)
    server.check_integrity()


STEPS = 200


def kill_one_at_random(engines: Engines, pick: random.Random) -> None:
    killed = pick.choice(engines.clients)
    before = [pick.randrange(1, 30) for _ in engines.engines]
    for engine, count in zip(engines.engines, before, strict=True):
        engine.begin(STEPS)
        seen(engine, count)
    killed.process.kill()
    for engine, count in zip(engines.engines, before, strict=True):
        if engine is killed:
            continue
        lines = seen(engine, STEPS - count)
        if engine.facts["dp"] != killed.facts["dp"]:
            failed = {line for line in lines if "error" in line or line.endswith("failed")}
            assert not failed, lines
        # An engine without one of its ranks goes on, and copies nothing.
    # At once: whether the server has noticed that the old one is gone is no matter of the new one.
    killed.start()
    assert killed.is_registered()
    for engine in engines.engines:
        until(engine, "get-success")


@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(seed, marks=pytest.mark.soak) for seed in (2, 3))]
)
def test_killed_client_does_not_affect_others(tmp_path: Path, seed: int) -> None:
    with engines_over(tmp_path, seed) as engines:
        kill_one_at_random(engines, random.Random(seed))
        for one in (*engines.engines, *engines.ranks):
            assert one.process.finish() == 0
        wait_until_nothing_is_held(engines.server)


@pytest.mark.soak
def test_repeatedly_killed_clients_recover(tmp_path: Path) -> None:
    pick = random.Random(os.getpid())
    end_s = time.monotonic() + 300
    with engines_over(tmp_path, 9) as engines:
        while time.monotonic() < end_s:
            kill_one_at_random(engines, pick)
        for one in engines.clients:
            one.process.kill()
        wait_until_nothing_is_held(engines.server)


def test_killing_all_clients_releases_everything(tmp_path: Path) -> None:
    with engines_over(tmp_path, 4) as engines:
        for engine in engines.engines:
            until(engine, "left")
        for one in engines.clients:
            one.process.process.kill()  # all of them, and no one is waited for before
        for one in engines.clients:
            one.process.kill()
        wait_until_nothing_is_held(engines.server)
