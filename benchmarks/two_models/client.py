"""A burst as its users see it: every request goes out at its own time and streams its answer."""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

DEADLINE_S = 600.0
WORDS = range(1000, 40_000)
"""Token ids that prompts are made of: ordinary ones, above every special token of SmolLM2."""


@dataclass(frozen=True)
class Request:
    at_s: float
    """When it is sent, after the burst's begin."""
    prompt: list[int]
    answer_tokens: int


@dataclass
class Answer:
    """What came back; times count from when the request was due, not from when a thread sent it."""

    due_s: float = 0.0
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    tokens: list[int] = field(default_factory=list)
    failure: Exception | None = None
    """Why there is no whole answer."""


def make_burst(
    count: int,
    prompt_tokens: int,
    answer_tokens: int,
    over_s: float,
    seed: str,
    words: Sequence[int] = WORDS,
) -> list[Request]:
    """Requests at random times within `over_s`, the same for the same seed.

    Prompts and answers are up to an eighth shorter than what is given, never longer. No two prompts
    share a block, so nothing is served out of the prefix cache.
    """
    pick = random.Random(seed)
    times = sorted(pick.uniform(0, over_s) for _ in range(count))
    return [
        Request(
            at_s - times[0],
            pick.choices(words, k=prompt_tokens - pick.randrange(prompt_tokens // 8)),
            answer_tokens - pick.randrange(answer_tokens // 8),
        )
        for at_s in times
    ]


class RequestFailedError(Exception):
    """The server answered, and not with an answer; or it went away."""


def run_burst(port: int, requests: Sequence[Request]) -> list[Answer]:
    """As `send_burst`; raises RequestFailedError if a request fails."""
    answers = send_burst(port, requests)
    failures = [answer.failure for answer in answers if answer.failure]
    if failures:
        raise RequestFailedError(f"{len(failures)} requests failed: {failures[0]!r}")
    return answers


def send_burst(port: int, requests: Sequence[Request], model: str = "m") -> list[Answer]:
    """Send them all, each at its time, and wait for the last.

    The threads are daemons: whoever is interrupted waits for none of them.
    """
    answers = [Answer() for _ in requests]
    begin_s = time.monotonic()

    def one(request: Request, answer: Answer) -> None:
        answer.due_s = begin_s + request.at_s
        time.sleep(max(0.0, answer.due_s - time.monotonic()))
        try:
            _stream(port, request, answer, model)
        except (OSError, http.client.HTTPException, ValueError, RequestFailedError) as error:
            answer.failure = error

    threads = [
        threading.Thread(target=one, args=pair, daemon=True)
        for pair in zip(requests, answers, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def _stream(port: int, request: Request, answer: Answer, model: str) -> None:
    body = {
        "model": model,
        "prompt": request.prompt,
        "max_tokens": request.answer_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
    }
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)
    try:
        connection.request(
            "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
        response = connection.getresponse()
        if response.status != 200:
            raise RequestFailedError(f"status {response.status}: {response.read()[:500]!r}")
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[len(b"data: ") :])
            if "error" in event:
                raise RequestFailedError(f"the stream ended with {event['error']}")
            for choice in event["choices"]:
                if choice["token_ids"]:
                    now_s = time.monotonic()
                    answer.first_token_s = answer.first_token_s or now_s - answer.due_s
                    answer.last_token_s = now_s - answer.due_s
                    answer.tokens += choice["token_ids"]
    finally:
        connection.close()
    if len(answer.tokens) != request.answer_tokens:
        raise RequestFailedError(
            f"{len(answer.tokens)} tokens came instead of {request.answer_tokens}"
        )
