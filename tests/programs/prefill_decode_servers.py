"""Two vLLM, one that computes prompts and one that decodes them, and a proxy between them.

What the proxy sends is what vLLM's own example sends (toy_proxy_server.py of its NIXL tests).
"""

from __future__ import annotations

import http.client
import itertools
import json
import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from engine_server import Request
from under_tiers import status_file_of
from vllm_server import BLOCK_TOKENS, VllmServer
from waiting import wait_until

from kvelastic.shared.link_status import nodes

PREFILL = f"kvelastic_prefill_{os.getpid()}"
DECODE = f"kvelastic_decode_{os.getpid()}"
_NAMES = {"prefill": PREFILL, "decode": DECODE}
ASKED = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class Answer(NamedTuple):
    tokens: list[int]
    pulled: int
    """Blocks read from the prefill engine."""


class RoleServer(VllmServer):
    """vLLM with a role and no other tier."""

    def __init__(
        self,
        role: str,
        model: Path,
        log: Path,
        arguments: Sequence[str] = (),
        under: Sequence[str] = (),
        **further: str,
    ) -> None:
        self.name = further.get("KVELASTIC_IPC_NAME", _NAMES[role])
        environment = {
            "ENABLE_KVELASTIC": "true",
            "KVELASTIC_ROLE": role,
            "KVELASTIC_IPC_NAME": self.name,
            "KVELASTIC_TIER_COMPARE": "false",  # such a model computes faster
            "KVELASTIC_SANITY_CHECK": "true",
            "VLLM_SERVER_DEV_MODE": "1",
            **further,
        }
        super().__init__(model, log, environment, arguments, under)

    def prefill(self, request: Request) -> dict[str, Any] | None:
        """The first part of a proxy: return the parameters for the decode engine.

        None if the request was aborted.
        """
        body = {"model": "m", "prompt": request.prompt, "max_tokens": 1, "temperature": 0}
        answer = json.loads(self.post("/v1/completions", **body, kv_transfer_params=ASKED))
        found: dict[str, Any] | None = answer["kv_transfer_params"]
        return found

    def decode(self, request: Request, parameters: dict[str, Any] | None) -> Answer:
        """The second part of a proxy."""
        before = self.pulled()
        tokens = self.complete_with(request, parameters)
        return Answer(tokens, self.pulled() - before)

    def complete_with(self, request: Request, parameters: dict[str, Any] | None) -> list[int]:
        """Like `decode`, and returns the tokens only."""
        (choice,) = self._choices(request.prompt, request.max_tokens, kv_transfer_params=parameters)
        tokens: list[int] = choice["token_ids"]
        return tokens

    def pulled(self) -> int:
        """Blocks read from other engines: the tiers' own figure, once they have published again."""
        for _ in range(2):  # what is published now may have been read before
            last, _hits = self._published()
            wait_until(partial(self._has_published_since, last))
        return self._published()[1]

    def _published(self) -> tuple[Any, int]:
        """When the tiers have last published, and the blocks that they had read."""
        status = status_file_of(self.name)
        return status.published_realtime_ns, status.tiers[-1].hits

    def _has_published_since(self, last: Any) -> bool:
        return bool(self._published()[0] > last)

    def held(self) -> int:
        """How many requests its node holds for others, half a second ago at most."""
        pid = self.processes()["core"].pid
        (node,) = [one for one in nodes() if one.pid == pid]
        return node.held_requests


def wait_until_blocks_move(prefill: RoleServer, decode: RoleServer) -> None:
    """Return once both have identified their weights: before that, prompts are computed."""
    before = decode.pulled()
    seeds = itertools.count(1000)  # a prompt that is new to both each time

    def has_pulled() -> bool:
        pick = random.Random(next(seeds))
        request = Request([pick.randrange(3, 512) for _ in range(3 * BLOCK_TOKENS)], 1)
        decode.complete_with(request, prefill.prefill(request))
        return decode.pulled() > before

    wait_until(has_pulled, "the engines have not identified their weights")


@dataclass
class Proxy:
    """Sends each request to both. If the prefill engine fails, the decode engine computes all."""

    prefill: RoleServer
    decode: RoleServer
    failed: list[tuple[float, float, str]] = field(default_factory=list)
    """Requests that the prefill engine failed: when they were sent and failed, and how."""

    def complete(self, request: Request) -> list[int]:
        """The decode engine's tokens."""
        sent_s = time.monotonic()
        parameters = None
        try:
            parameters = self.prefill.prefill(request)
        except (OSError, http.client.HTTPException, AssertionError) as error:
            self.failed.append((sent_s, time.monotonic(), f"{type(error).__name__}: {error}"))
        return self.decode.complete_with(request, parameters)
