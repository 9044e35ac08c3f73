"""What both kinds of clients do: wait for a server, and look at what it answers."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final, TypeVar

from kvelastic.errors import ChannelClosedError, ChannelError, ChannelTimeoutError, MessageError
from kvelastic.messages import Address, Connection, Endpoint, Message

_log = logging.getLogger("kvelastic.flexkv")
Answer = TypeVar("Answer", bound=Message)
ANSWER_S: Final = 30.0
"""For what is answered at once; the server's engine may be busy with others."""
START_S: Final = 300.0
"""For a server to come: it starts with the first of several engines, which may load for long."""
_SAY_AFTER_S: Final = 10.0
_AGAIN_S: Final = 0.05


def connect_when_there(
    endpoint: Endpoint,
    address: Address,
    deadline_s: float,
    is_over: Callable[[], bool] = lambda: False,
) -> Connection:
    """A connection as soon as somebody listens there. Looks every 50 ms, for no kernel tells.

    Blocks until `deadline_s` (of `time.monotonic`): `ChannelTimeoutError` then, and `ChannelError`
    once `is_over`.
    """
    say_at_s = time.monotonic() + _SAY_AFTER_S
    while True:
        try:
            return endpoint.connect(address)
        except ChannelClosedError as error:  # noqa: PERF203  # it waits in between
            if is_over():
                raise ChannelError("this client is closed") from error
            if time.monotonic() >= deadline_s:
                raise ChannelTimeoutError(
                    f"no server has come to {address}: {error}. Start it, or set"
                    " FLEXKV_SERVER_RECV_PORT to its endpoint"
                ) from error
            if time.monotonic() >= say_at_s:
                say_at_s = float("inf")
                _log.info("Waiting for a server at %s.", address)
            time.sleep(_AGAIN_S)


def expect(answered: Message, answer: type[Answer]) -> Answer:
    """The answer that is due. Raises `MessageError` for another message."""
    if not isinstance(answered, answer):
        raise MessageError(f"a {type(answered).__name__} came instead of a {answer.__name__}")
    return answered
