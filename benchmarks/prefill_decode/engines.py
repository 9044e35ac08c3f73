"""Three vLLM on kvelastic: one for prompts, one for tokens, and one for both.

All processes of the first have half of the cores, those of the second the other half, and the third
has all cores. Only one arrangement has work at a time.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from engine_server import Request
from prefill_decode_servers import RoleServer
from vllm_server import VllmServer

from benchmarks.harness import half_of_the_cores
from benchmarks.vllm.models import Model
from benchmarks.vllm.streams import Answer, stream_all
from kvelastic.shared import ledger, segment

KV_BLOCKS = 512
"""Of 32 tokens, in each engine."""
VOCABULARY = range(3, 512)
"""Token ids that each of the models has."""
_IDLE_S = 1.2
"""vLLM's worker spins for a second after its last work."""
_WAKE = Request([5, 6, 7, 8], 1)


class WayError(Exception):
    """A prompt's blocks came from elsewhere than the measurement says."""


class Engines(NamedTuple):
    prefill: RoleServer
    decode: RoleServer
    both: VllmServer

    def forget(self) -> None:
        """Empty all prefix caches."""
        for server in self:
            server.post("/reset_prefix_cache")


@contextmanager
def engines(model: Model, folder: Path) -> Iterator[Engines]:
    """Start the three at the same time, and end them. Raises AssertionError if one ends."""
    name = f"bench-prefill-decode-{os.getpid()}"
    shape = ("--kv-cache-memory-bytes", str(KV_BLOCKS * model.block_bytes))
    every_core = os.sched_getaffinity(0)
    halves = {
        role: set(map(int, half_of_the_cores(second=role == "decode").split(",")))
        for role in ("prefill", "decode")
    }

    def environment(cores: set[int]) -> dict[str, str]:
        return {
            "KVELASTIC_LEDGER": name,
            "KVELASTIC_SANITY_CHECK": "false",  # RoleServer's, for tests
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(cores))),
            "VLLM_RPC_BASE_PATH": str(folder),
            "VLLM_SERVER_DEV_MODE": "1",
        }

    def half(role: str) -> RoleServer:
        own = environment(halves[role])
        os.sched_setaffinity(0, halves[role])  # which the server inherits
        return RoleServer(role, model.folder, folder / f"{role}.log", shape, **own)

    try:
        with ExitStack() as ends:
            prefill, decode = (ends.enter_context(half(role)) for role in halves)
            os.sched_setaffinity(0, every_core)
            own = {
                "ENABLE_KVELASTIC": "true",
                "KVELASTIC_IPC_NAME": name,
                **environment(every_core),
            }
            log = folder / "both.log"
            both = ends.enter_context(VllmServer(model.folder, log, own, shape))
            started = Engines(prefill, decode, both)
            for server in started:
                server.wait_until_ready()
            yield started
            for server in started:
                server.stop()
    finally:
        os.sched_setaffinity(0, every_core)
        ledger.reap()
        segment.reap()


def prompt(seed: str, tokens: int) -> list[int]:
    """Return a random prompt, the same for each use of the seed."""
    return random.Random(seed).choices(VOCABULARY, k=tokens)


@contextmanager
def without_hits(server: VllmServer) -> Iterator[None]:
    """Raise `WayError` if the body's prompts hit the server's own prefix cache.

    vLLM does not empty a cache whose blocks are in use, and replies as if it had.
    """
    before = server.metrics()["prefix_cache_hits_total"]
    yield
    if hits := server.metrics()["prefix_cache_hits_total"] - before:
        raise WayError(f"{hits:.0f} tokens were in the prefix cache:\n{server.tail()}")


def prefilled(server: RoleServer, request: Request) -> tuple[dict[str, Any], float]:
    """Return the ticket and the seconds to compute it. Returns once the worker is idle."""
    server.complete(_WAKE)
    begin_s = time.perf_counter()
    ticket = server.prefill(request)
    assert ticket is not None
    total_s = time.perf_counter() - begin_s
    time.sleep(_IDLE_S)
    return ticket, total_s


def streamed(server: VllmServer, request: Request, **parameters: Any) -> Answer:
    """Return a lone request's answer. The worker is awake: an idle one polls every 0.1 s."""
    server.complete(_WAKE)
    (answer,) = stream_all(server.port, [request], 1, **parameters)
    return answer
