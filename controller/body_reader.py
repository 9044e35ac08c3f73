"""Has large bodies read and translated by a process of its own: the loop goes on meanwhile.

A parser in a thread would hold Python's lock: for 0.2 s with 16 MiB of JSON that msgspec only
skips, for 2 s with 16 MiB that are translated. There is one such process, started when it is first
needed; it reads one body at a time, and the others wait.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Final, TypeVar

from kvelastic.controller.body_worker import MESSAGE_BYTES
from kvelastic.controller.refusal import Refusal

_log = logging.getLogger("kvelastic.controller")

TIMEOUT_S: Final = 15.0
"""For one body, the start of the process included; 64 MiB take it less than one."""
_Result = TypeVar("_Result")


class _EndedError(Exception):
    """The process ended before it answered."""


class BodyReader:
    """The process, as the loop sees it."""

    def __init__(self) -> None:
        self._asking = asyncio.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    async def call(
        self, function: Callable[..., _Result], files: list[int], *arguments: object
    ) -> _Result:
        """Call a function of `body_worker` there, with a body's file mapped, and return its result.

        Further files are empty ones to write into. The caller keeps all files open until this
        returns. Where the process has died, another one is asked once. Raises what the function
        raises, and `Refusal` (503).
        """
        message = pickle.dumps((function, arguments))
        async with self._asking:
            try:
                try:
                    result = await self._ask(message, files)
                except _EndedError:
                    for file in files[1:]:
                        os.ftruncate(file, 0)
                        os.lseek(file, 0, os.SEEK_SET)
                    result = await self._ask(message, files)
            except (_EndedError, OSError, asyncio.TimeoutError) as error:
                _log.error("no large body can be read: %s", error or "no answer in time")
                raise Refusal(
                    503, "reader_failed", "The body could not be read; try again.", 1.0
                ) from None
        found = pickle.loads(result)
        if isinstance(found, Exception):
            raise found
        return found  # type: ignore[no-any-return]

    def stop(self) -> None:
        """End it, at once."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._process is not None:
            self._process.kill()
            code = self._process.wait()
            self._process = None
            _log.debug("the reader of large bodies has ended: %d", code)

    async def _ask(self, message: bytes, files: list[int]) -> bytes:
        try:
            ours = self._start() if self._socket is None else self._socket
            try:
                socket.send_fds(ours, [message], files)
                received = asyncio.get_running_loop().sock_recv(ours, MESSAGE_BYTES)
                result = await asyncio.wait_for(received, TIMEOUT_S)
            except (ConnectionError, BrokenPipeError):
                result = b""
            if not result:
                raise _EndedError("its process ended")
            return result
        except BaseException:
            self.stop()  # or the next one would get this one's result
            raise

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._socket = ours
            ours.setblocking(False)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kvelastic.controller.body_worker"],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
            )
        return ours
