"""Loads that failed, from the scheduler, which learns of them, to a worker, which vLLM asks.

vLLM takes failed blocks from its workers' output alone, and in the same step as the end of the load
or before it. So the scheduler tells one worker, and says that a load is over only in the step whose
output names its blocks. To tell one alone matters: of two, the later one would name blocks that are
another request's by then.
"""

from __future__ import annotations

import threading
import time
from typing import Annotated, Final

from kvelastic.errors import ChannelClosedError, KvelasticError
from kvelastic.flexkv.server.utils import default_endpoint, socket_address
from kvelastic.messages import Connection, Endpoint, Message, Meta, Protocol, Request

_AGAIN_S: Final = 0.05


class FailedBlocks(Message):
    """Blocks of the engine that could not be loaded."""

    block_ids: Annotated[list[int], Meta(max_length=1 << 16)]


_PROTOCOL: Final = Protocol("flexkv-load-errors", version=1, messages=(FailedBlocks,))


def _endpoint(engine: str) -> str:
    return default_endpoint(f"{engine}_errors")


class LoadErrorSender:
    """The scheduler's end; `engine` names it for its own workers."""

    def __init__(self, engine: str) -> None:
        address = socket_address(_endpoint(engine))
        self._endpoint = Endpoint(_PROTOCOL, _refuse, listen=[address], name="flexkv-errors")
        self._told: Connection | None = None
        self._untold: set[int] = set()

    def tell(self, block_ids: set[int]) -> None:
        """These have failed. Does not block; kept until a worker is there."""
        self._untold |= block_ids
        self.flush()

    def flush(self) -> None:
        """Tell what was not told so far."""
        if not self._untold:
            return
        if self._told is None or not self._told.is_open:
            self._told = next((one for one in self._endpoint.connections if one.is_open), None)
        if self._told is not None:
            try:
                self._told.notify(FailedBlocks(block_ids=sorted(self._untold)))
            except ChannelClosedError:
                return
            self._untold.clear()

    def close(self) -> None:
        """Safe to repeat."""
        self._endpoint.close()


class LoadErrorReceiver:
    """A worker's end."""

    def __init__(self, engine: str) -> None:
        self._address = socket_address(_endpoint(engine))
        self._lock = threading.Lock()
        self._block_ids: set[int] = set()
        self._is_closed = False
        self._endpoint = Endpoint(_PROTOCOL, self._hear, name="flexkv-errors")
        self._thread = threading.Thread(target=self._connect, name="flexkv-errors", daemon=True)
        self._thread.start()

    def take(self) -> set[int]:
        """What has failed since the last call."""
        with self._lock:
            taken, self._block_ids = self._block_ids, set()
        return taken

    def close(self) -> None:
        """Safe to repeat."""
        self._is_closed = True
        self._endpoint.close()
        self._thread.join()

    def _connect(self) -> None:
        # The scheduler begins after its workers.
        while not self._is_closed:
            try:
                self._endpoint.connect(self._address)
                return
            except KvelasticError:  # noqa: PERF203  # it waits in between
                time.sleep(_AGAIN_S)

    def _hear(self, request: Request) -> None:
        assert isinstance(request.message, FailedBlocks)
        with self._lock:
            self._block_ids.update(request.message.block_ids)


def _refuse(request: Request) -> None:
    raise ChannelClosedError("a scheduler takes no messages")
