"""Reads and translates large bodies in a separate process, so that the loop is not blocked.

A parser in a thread would hold the GIL. There is one such process, started at its first use. It
reads one body at a time; other bodies wait.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
from typing import Final

import msgspec

from kvelastic.controller.http.refusal import Refusal
from kvelastic.controller.routing.body_worker import (
    MESSAGE_BYTES,
    Answer,
    FindModel,
    FromOpenAI,
    Question,
    ToOpenAI,
)
from kvelastic.controller.routing.model_field import Form, ModelField
from kvelastic.controller.timeout import timeout

_log = logging.getLogger("kvelastic.controller")

TIMEOUT_S: Final = 15.0
"""Timeout for one body, including the start of the process. 64 MiB take less than 1 s."""


class _EndedError(Exception):
    """The process ended before it sent a result."""


class BodyReader:
    """The loop's interface to the process. Use it in the event loop."""

    def __init__(self) -> None:
        self._asking = asyncio.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    @property
    def pid(self) -> int | None:
        """The id of the process; None while it does not run."""
        return None if self._process is None else self._process.pid

    async def find_model(self, file: int, form: Form, boundary: bytes) -> ModelField | None:
        """Return the model named in the body in `file`, or None. Raises `Refusal` (400, 503).

        The caller keeps the file open until this returns. If the process has died, a new one is
        tried once.
        """
        return (await self._answer(FindModel(form, boundary), [file])).field

    async def translate(self, question: ToOpenAI | FromOpenAI, file: int, into: int) -> Answer:
        """Translate the body in `file` and write the result to the empty file `into`.

        Raises `Refusal` (400, 413, 503; 502 for an invalid response of an engine). The caller keeps
        both files open until this returns. If the process has died, a new one is tried once.
        """
        return await self._answer(question, [file, into])

    async def _answer(self, question: Question, files: list[int]) -> Answer:
        message = msgspec.msgpack.encode(question)
        async with self._asking:
            try:
                try:
                    answer = await self._ask(message, files)
                except _EndedError:
                    for file in files[1:]:
                        os.ftruncate(file, 0)
                        os.lseek(file, 0, os.SEEK_SET)
                    answer = await self._ask(message, files)
            except (_EndedError, OSError, asyncio.TimeoutError) as error:
                _log.error("no large body can be read: %s", error or "no answer in time")
                raise Refusal(
                    503, "reader_failed", "The body could not be read; try again.", 1.0
                ) from None
        if answer.code:
            raise Refusal(answer.status, answer.code, answer.message, param=answer.param)
        return answer

    def stop(self) -> None:
        """Kill the process. Idempotent."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._process is not None:
            self._process.kill()
            code = self._process.wait()
            self._process = None
            _log.debug("the reader of large bodies has ended: %d", code)

    async def _ask(self, message: bytes, files: list[int]) -> Answer:
        try:
            ours = self._start() if self._socket is None else self._socket
            try:
                socket.send_fds(ours, [message], files)
                received = asyncio.get_running_loop().sock_recv(ours, MESSAGE_BYTES)
                async with timeout(TIMEOUT_S):
                    answer = await received
            except (ConnectionError, BrokenPipeError):
                answer = b""
            if not answer:
                raise _EndedError("its process ended")
            return msgspec.msgpack.decode(answer, type=Answer)
        except BaseException:
            self.stop()  # otherwise the next question would receive this result
            raise

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._socket = ours
            ours.setblocking(False)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kvelastic.controller.routing.body_worker"],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
            )
        return ours
