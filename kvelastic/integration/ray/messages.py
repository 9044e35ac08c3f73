"""Messages between the front, the router and the replicas: plain values, pickled by Ray.

A replica's response is a stream::

    Unserved                        # no response: another replica may serve the request
    Head, bytes, bytes, ...         # the engine's complete response
    Head, bytes, ..., Cut           # the engine's response, broken off
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from kvelastic.controller.http.headers import Headers


@dataclass(frozen=True)
class EngineRequest:
    """One client's request for an engine."""

    method: str
    path: str
    query: bytes = b""
    headers: Headers = field(default_factory=list)
    body: bytes = b""
    prefix: tuple[bytes, ...] = ()
    """Hashes of its prompt's prefixes (`prompt_prefix`)."""
    tried: frozenset[str] = frozenset()
    """Replicas that failed to serve it."""
    sleepers: frozenset[str] = frozenset()
    """Replicas that refused it as asleep. The request wakes only these."""
    number: int = 0
    """Names this attempt in the front's process (`watch`)."""


ASLEEP: Final = "replica_asleep"
"""Code of `Unserved`: the replica sleeps and is not in the request's `sleepers`."""


@dataclass(frozen=True)
class Head:
    """The start of a response, with the first piece of its body."""

    status: int
    headers: Headers
    replica: str
    first: bytes = b""

    @property
    def is_stream(self) -> bool:
        """True if the body is an event stream."""
        return any(
            name == b"content-type" and value.startswith(b"text/event-stream")
            for name, value in self.headers
        )


@dataclass(frozen=True)
class Unserved:
    """The replica has not started a response; `message` has the reason."""

    status: int
    code: str
    message: str
    replica: str
    retry_after_s: float | None = None


@dataclass(frozen=True)
class Cut:
    """The response ends here and is incomplete."""

    message: str


MODEL: Final = "*"
"""In the path of an operator's request: the name of the replica's model."""


@dataclass(frozen=True)
class Control:
    """The response of a replica's controller to an operator's request."""

    replica: str
    instance: str
    status: int
    headers: Headers
    body: bytes
    node: str = ""
    """The address of its machine."""
