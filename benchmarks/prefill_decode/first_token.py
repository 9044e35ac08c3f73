"""The first token on a decode engine: blocks pulled beside the prompt computed there."""

from __future__ import annotations

from collections.abc import Sequence

from engine_server import Request
from vllm_server import BLOCK_TOKENS

from benchmarks.harness import Figure
from benchmarks.pages import Table
from benchmarks.prefill_decode.engines import (
    Engines,
    WayError,
    prefilled,
    prompt,
    streamed,
    without_hits,
)
from benchmarks.vllm.streams import Answer

NEW_TOKENS = 8
PULLED, THROUGH, COMPUTED, AGAIN, CACHED = (
    "pulled",
    "computed by the prefill engine, then pulled",
    "computed there",
    "computed there again",
    "in its own cache",
)


def measure(engines: Engines, prompts: Sequence[int], rounds: int) -> Table:
    """Measure prompts of so many tokens, in turns; the first round is not counted."""
    samples: dict[int, dict[str, list[float]]] = {tokens: {} for tokens in prompts}
    differing = compared = 0
    for number in range(rounds + 1):
        for tokens in prompts:
            request = Request(prompt(f"first token {tokens} {number}", tokens), NEW_TOKENS)
            first_s, differ = _round(engines, request)
            differing, compared = differing + differ, compared + 2
            for name, value in first_s.items() if number else ():
                samples[tokens].setdefault(name, []).append(value)
    notes = [
        f"{rounds} rounds.",
        f"Answers that differ from one engine's: {differing} of {compared}.",
    ]
    rows = ((PULLED, CACHED), (PULLED, COMPUTED), (THROUGH, COMPUTED), (AGAIN, COMPUTED))
    return Table.of_figures(
        [
            Figure(f"{tokens} tokens, {name}", "s", found[name], "", beside, found[beside])
            for tokens, found in samples.items()
            for name, beside in rows
        ],
        notes,
    )


def _round(engines: Engines, request: Request) -> tuple[dict[str, float], int]:
    """Return the seconds to the first token in each way, and how many of two answers differ."""
    decode = engines.decode
    engines.forget()
    ticket, prefill_s = prefilled(engines.prefill, request)
    before = decode.pulled()
    with without_hits(decode):
        pulled = streamed(decode, request, kv_transfer_params=ticket)
    blocks, expected = decode.pulled() - before, len(request.prompt) // BLOCK_TOKENS
    if blocks != expected:
        raise WayError(f"{blocks} of {expected} blocks were pulled:\n{decode.tail()}")
    cached = streamed(decode, request)
    computed, again = (_computed(engines, request) for _ in range(2))
    first_s = {
        PULLED: pulled.first_token_s,
        THROUGH: prefill_s + pulled.first_token_s,
        CACHED: cached.first_token_s,
        COMPUTED: computed.first_token_s,
        AGAIN: again.first_token_s,
    }
    return first_s, sum(answer.tokens != computed.tokens for answer in (pulled, cached))


def _computed(engines: Engines, request: Request) -> Answer:
    engines.forget()
    with without_hits(engines.decode):
        return streamed(engines.decode, request)
