"""The demo's HTTP client: one question, or a burst of questions."""

from __future__ import annotations

import http.client
import json
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

TOPICS = ["a river", "a lighthouse", "the sea", "a small town", "an old clock", "snow", "a train"]
AT_ONCE = 16
REQUEST_DEADLINE_S = 900.0


class RequestFailedError(Exception):
    """The server returned an error."""


def ask(port: int, question: str, max_tokens: int, model: str) -> str:
    """Return the model's answer at temperature 0.

    Raises RequestFailedError for a status other than 200, and OSError or HTTPException if the
    server is unreachable or disconnects.
    """
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": max_tokens,
        "temperature": 0,
    }
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=REQUEST_DEADLINE_S)
    try:
        connection.request(
            "POST",
            "/v1/chat/completions",
            json.dumps(body),
            {"Content-Type": "application/json"},
        )
        response = connection.getresponse()
        text = response.read()
    finally:
        connection.close()
    if response.status != 200:
        raise RequestFailedError(f"status {response.status}: {text.decode()[:500]}")
    answer: str = json.loads(text)["choices"][0]["message"]["content"]
    return answer.strip()


class Burst:
    """Requests `count` stories of different lengths, sixteen at a time, when the block is entered.

    with Burst(port, 40, "m") as burst:
        stories = burst.wait()
    Leaving the block early (Ctrl-C) does not wait, and cancels requests that are not sent yet.
    """

    def __init__(self, port: int, count: int, model: str) -> None:
        self._port = port
        self._model = model
        self._count = count
        self._threads = ThreadPoolExecutor(AT_ONCE)
        self._futures: list[Future[str]] = []

    def __enter__(self) -> Burst:
        for i in range(self._count):
            story = f"Write a story about {TOPICS[i % len(TOPICS)]}. "
            story += "Make it long and calm. " * (i % 12 * 5)
            length = 64 + 16 * (i % 8)
            future = self._threads.submit(ask, self._port, story, length, self._model)
            self._futures.append(future)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def wait(self, count: int | None = None) -> list[str]:
        """Wait for the first `count` answers, or all; return them. Raises the errors of `ask`."""
        return [future.result() for future in self._futures[:count]]

    @property
    def done(self) -> int:
        """Number of answers so far."""
        return sum(future.done() for future in self._futures)
