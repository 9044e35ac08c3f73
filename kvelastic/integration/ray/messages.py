"""What the front, the router and the replicas send to each other: plain values, pickled by Ray.

A replica's answer is a stream::

    Unserved                        # nothing of an answer: another replica may have the request
    Head, bytes, bytes, ...         # the engine's answer, whole
    Head, bytes, ..., Cut           # the engine's answer, broken off
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from kvelastic.controller.headers import Headers


@dataclass(frozen=True)
class EngineRequest:
    """One client's request, as an engine is to get it."""

    method: str
    path: str
    query: bytes = b""
    headers: Headers = field(default_factory=list)
    body: bytes = b""
    prefix: tuple[bytes, ...] = ()
    """Of its prompt (`prompt_prefix`)."""
    tried: frozenset[str] = frozenset()
    """Replicas that did not serve it."""
    sleepers: frozenset[str] = frozenset()
    """Replicas that have said that they sleep. Only these it wakes."""


ASLEEP: Final = "replica_asleep"
"""Code of `Unserved`: the replica sleeps, and the request did not know it."""


@dataclass(frozen=True)
class Head:
    """The beginning of an answer, sent with the first piece of its body."""

    status: int
    headers: Headers
    replica: str
    first: bytes = b""

    @property
    def is_stream(self) -> bool:
        """Whether the body is a stream of events."""
        return any(
            name == b"content-type" and value.startswith(b"text/event-stream")
            for name, value in self.headers
        )


@dataclass(frozen=True)
class Unserved:
    """The replica has not begun to answer, and says why."""

    status: int
    code: str
    message: str
    replica: str
    retry_after_s: float | None = None


@dataclass(frozen=True)
class Cut:
    """The answer ends here, and is not whole."""

    message: str
