"""vLLM with tiers in a folder of its own, and what it finds again."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from engine_server import Request
from under_tiers import disk_tier, status_file_of
from vllm_server import BLOCK_TOKENS, KV_BYTES, PAGE_BYTES, VllmServer

from kvelastic.shared import segment
from kvelastic.shared.tier_status import TiersStatus

NAME = f"kvelastic_tiers_{os.getpid()}"
"""Of the instance; one of them runs at a time."""


class Answer(NamedTuple):
    tokens: list[int]
    own: int
    """Tokens found in vLLM's own prefix cache."""
    loaded: int
    """Tokens found in the tiers."""


class TieredServer(VllmServer):
    """vLLM with kvelastic and one disk tier in a folder of its own."""

    def __init__(
        self,
        model: Path,
        log: Path,
        folder: Path,
        arguments: Sequence[str] = (),
        under: Sequence[str] = (),
        **further: str,
    ) -> None:
        folder.mkdir(mode=0o700, exist_ok=True)
        environment = {
            **disk_tier(folder),
            "KVELASTIC_IPC_NAME": NAME,
            "KVELASTIC_MAX_CACHED_TOKENS": "-1",
            "KVELASTIC_SANITY_CHECK": "true",
            "VLLM_SERVER_DEV_MODE": "1",
            **further,
        }
        super().__init__(model, log, environment, arguments, under)

    def ask(self, request: Request, **fields: Any) -> Answer:
        """`fields` of the request besides, `model` say."""
        before = self.metrics()
        (choice,) = self._choices(request.prompt, request.max_tokens, **fields)
        after = self.metrics()
        names = ("prefix_cache_hits_total", "external_prefix_cache_hits_total")
        return Answer(choice["token_ids"], *(int(after[name] - before[name]) for name in names))

    def status_file(self) -> TiersStatus:
        return status_file_of(NAME)

    def evict(self) -> None:
        """A limit of one page, and back."""
        segment.request(NAME, limit_bytes=PAGE_BYTES, wait_s=60)
        assert segment.inspect(NAME).usage["mapped_bytes"] <= PAGE_BYTES
        segment.request(NAME, limit_bytes=KV_BYTES, wait_s=10)

    def check_end(self) -> None:
        assert self.stop() == 0
        log = self.log.read_text(errors="replace")
        for word in ("IntegrityError", "sanity check failed"):
            assert word not in log


def check_found(answer: Answer, request: Request, tokens: list[int]) -> None:
    """At most the last block is computed, or of a whole one its last token."""
    assert answer.tokens == tokens
    assert len(request.prompt) - answer.own - answer.loaded <= BLOCK_TOKENS
