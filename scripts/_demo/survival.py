"""The demo's part about tiers: a long prompt whose blocks outlive the cache, and the server.

    asked = [ask_long(server, "cold"), ask_long(server, "own prefix cache")]
    print(table(asked))

Each answer is asked for as a stream, so that its first token has a time; what vLLM counts before
and after says how many tokens of the prompt were computed, and where the others came from.
"""

from __future__ import annotations

import http.client
import json
import time
from typing import NamedTuple

from client import REQUEST_DEADLINE_S, RequestFailedError
from vllm_server import VllmServer

DAYS = 64
ANSWER_TOKENS = 24
CARGO = ["salt", "wool", "copper", "barley", "tar", "glass", "rope", "honey"]
PORTS = ["Aldmouth", "Brine Cove", "Cedar Quay", "Dunmere", "Eastholm"]


class Asked(NamedTuple):
    """How one answer came about; tokens are of the prompt."""

    what: str
    answer: str
    first_token_s: float
    tokens: int
    own: int
    """Found in vLLM's own prefix cache."""
    loaded: int
    """Found in tiers."""

    @property
    def computed(self) -> int:
        return self.tokens - self.own - self.loaded


def log_of_a_ship() -> str:
    """About 1,600 tokens that were in no question before."""
    days = [
        f"Day {day}: the ship carried {7 * day % 90 + 3} barrels of {CARGO[day * 5 % 8]}"
        f" to {PORTS[day * 3 % 5]}; the crew slept well."
        for day in range(1, DAYS + 1)
    ]
    return "This is the log of a ship. " + " ".join(days) + " Sum up the log in one sentence."


def ask_long(server: VllmServer, what: str) -> Asked:
    """Ask, and say how it came about. Raises as `client.ask`."""
    before = server.metrics()
    answer, first_token_s, tokens = _stream(server.port, log_of_a_ship())
    after = server.metrics()
    names = ("prefix_cache_hits_total", "external_prefix_cache_hits_total")
    own, loaded = (int(after.get(name, 0) - before.get(name, 0)) for name in names)
    return Asked(what, answer, first_token_s, tokens, own, loaded)


def _stream(port: int, question: str) -> tuple[str, float, int]:
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": question}],
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=REQUEST_DEADLINE_S)
    begun_s = time.monotonic()
    text, first_token_s, tokens = "", 0.0, 0
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
            if event.get("usage"):
                tokens = event["usage"]["prompt_tokens"]
    finally:
        connection.close()
    return text.strip(), first_token_s, tokens


def table(asked: list[Asked]) -> str:
    """A line an answer: when its first token came, and what was computed for it."""
    widest = max(len(one.what) for one in asked)
    lines = [f"  {'':{widest}}  first token  of the prompt: computed  own cache  from the disk"]
    lines += [
        f"  {one.what:{widest}}  {one.first_token_s:9.2f} s  {one.computed:23}  {one.own:9}"
        f"  {one.loaded:13}"
        for one in asked
    ]
    return "\n".join(lines)
