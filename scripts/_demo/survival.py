"""The demo's part about tiers: a long prompt whose blocks survive in a tier.

    asked = [ask_long(where, "cold", LOG), ask_long(where, "own prefix cache", LOG)]
    print(table(asked))

Each answer is streamed, to measure the time to the first token. The engine reports in it how many
prompt tokens it did not compute, and the instance's tier status file how many of these came from a
tier.
"""

from __future__ import annotations

import http.client
import json
import time
from typing import NamedTuple

from client import REQUEST_DEADLINE_S, RequestFailedError

from kvelastic.shared import segment, tier_status

BOARD_DEADLINE_S = 10.0
COPIED_DEADLINE_S = 120.0
IDLE_S = 5.0
"""The default of `KVELASTIC_TIER_IDLE_SECONDS`."""
QUIET_S = 2.0
DAYS = 64
ANSWER_TOKENS = 24
CARGO = ["salt", "wool", "copper", "barley", "tar", "glass", "rope", "honey"]
PORTS = ["Aldmouth", "Brine Cove", "Cedar Quay", "Dunmere", "Eastholm"]


class Where(NamedTuple):
    """The server, model and instance to use."""

    port: int
    model: str
    instance: str
    block_tokens: int


class Asked(NamedTuple):
    """The measurements of one answer, in tokens of the prompt."""

    what: str
    answer: str
    first_token_s: float
    tokens: int
    own: int
    """Found in the engine's own prefix cache."""
    loaded: int
    """Found in tiers."""

    @property
    def computed(self) -> int:
        return self.tokens - self.own - self.loaded


def _prompt(first: str) -> str:
    """Return a prompt of about 1,600 tokens that no other question contains."""
    days = [
        f"Day {day}: the ship carried {7 * day % 90 + 3} barrels of {CARGO[day * 5 % 8]}"
        f" to {PORTS[day * 3 % 5]}; the crew slept well."
        for day in range(1, DAYS + 1)
    ]
    return f"{first} {' '.join(days)} Sum it up in one sentence."


LOG = _prompt("This is the log of a ship.")
DIARY = _prompt("This is the diary of a sailor.")
NOTES = _prompt("These are the notes of a harbour master.")
"""They begin differently, so they share no block with `LOG`."""


def ask_long(where: Where, what: str, prompt: str) -> Asked:
    """Ask a question and return its measurements.

    Raises the errors of `client.ask`, and RequestFailedError if the tiers publish nothing.
    """
    before = _loaded_tokens(where)
    answer, first_token_s, tokens, cached = _stream(where, prompt)
    loaded = _loaded_tokens(where) - before
    # vLLM does not count as cached what another engine has computed for this request.
    return Asked(what, answer, first_token_s, tokens, max(0, cached - loaded), loaded)


def wait_until_copied(instance: str, least_s: float = IDLE_S + QUIET_S) -> float:
    """Wait for at least `least_s`, and until no tier received a record for `QUIET_S`.

    Returns the seconds until the last record arrived, or `least_s`. Raises RequestFailedError.
    """
    begun_s = last_s = time.monotonic()
    records = -1
    while (now_s := time.monotonic()) < max(begun_s + least_s, last_s + QUIET_S):
        if now_s > begun_s + COPIED_DEADLINE_S:
            raise RequestFailedError(
                f"{instance} still copies blocks to tiers after {COPIED_DEADLINE_S:g} s"
            )
        status = tier_status.read(segment.inspect(instance))
        held = sum(tier.puts for tier in status.tiers) if status is not None else 0
        if held != records:
            records, last_s = held, now_s
        time.sleep(0.05)
    return max(least_s, last_s - begun_s)


def _loaded_tokens(where: Where) -> int:
    """Return the tokens loaded from tiers so far, by statistics published after this call."""
    now_ns = time.time_ns()
    end_s = time.monotonic() + BOARD_DEADLINE_S
    while time.monotonic() < end_s:
        status = tier_status.read(segment.inspect(where.instance))
        if status is not None and status.published_realtime_ns > now_ns:
            return status.blocks.loaded * where.block_tokens
        time.sleep(0.05)
    raise RequestFailedError(
        f"{where.instance} published no tier statistics within {BOARD_DEADLINE_S:g} s"
    )


def _stream(where: Where, question: str) -> tuple[str, float, int, int]:
    """Return the answer, seconds to its first token, prompt tokens, and those not computed."""
    body = {
        "model": where.model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    connection = http.client.HTTPConnection("127.0.0.1", where.port, timeout=REQUEST_DEADLINE_S)
    begun_s = time.monotonic()
    text, first_token_s, tokens, cached = "", 0.0, 0, 0
    try:
        connection.request(
            "POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
        response = connection.getresponse()
        if response.status != 200:
            raise RequestFailedError(f"status {response.status}: {response.read().decode()[:500]}")
        for line in response:
            data = line.removeprefix(b"data: ").strip()
            if not data or data == b"[DONE]":
                continue
            event = json.loads(data)
            part = event["choices"][0]["delta"].get("content") if event["choices"] else None
            if part and not text:
                first_token_s = time.monotonic() - begun_s
            text += part or ""
            if usage := event.get("usage"):
                tokens = usage["prompt_tokens"]
                cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    finally:
        connection.close()
    return text.strip(), first_token_s, tokens, cached


def table(asked: list[Asked], source: str = "the disk") -> str:
    """Return a line per answer: the time of its first token, and the tokens computed for it."""
    widest = max(len(one.what) for one in asked)
    loaded = f"from {source}"
    lines = [f"  {'':{widest}}  first token  of the prompt: computed  own cache  {loaded}"]
    lines += [
        f"  {one.what:{widest}}  {one.first_token_s:9.2f} s  {one.computed:23}  {one.own:9}"
        f"  {one.loaded:{len(loaded)}}"
        for one in asked
    ]
    return "\n".join(lines)
