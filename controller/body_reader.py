"""Has large bodies read by a process of its own, so that the loop goes on meanwhile.

A parser in a thread would hold Python's lock. There is one such process, started when it is first
needed; it reads one body at a time, and the others wait.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import subprocess
import sys
from typing import Final

import msgspec

from kvelastic.controller.body_worker import MESSAGE_BYTES, Answer, Question
from kvelastic.controller.model_field import Form, ModelField
from kvelastic.controller.refusal import Refusal

_log = logging.getLogger("kvelastic.controller")

TIMEOUT_S: Final = 15.0
"""For one body, the start of the process included; 64 MiB take it less than one."""


class _EndedError(Exception):
    """The process ended before it answered."""


class BodyReader:
    """The process, as the loop sees it."""

    def __init__(self) -> None:
        self._asking = asyncio.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    @property
    def pid(self) -> int | None:
        """Of the process; None while there is none."""
        return None if self._process is None else self._process.pid

    async def find_model(self, file: int, form: Form, boundary: bytes) -> ModelField | None:
        """The model that the body in a file names. Raises `Refusal` (400, 503).

        The file is the caller's, and is not closed before this returns. Where the process has
        died, another one is asked once.
        """
        question = msgspec.json.encode(Question(form, boundary))
        async with self._asking:
            try:
                try:
                    answer = await self._ask(question, file)
                except _EndedError:
                    answer = await self._ask(question, file)
            except (_EndedError, OSError, asyncio.TimeoutError) as error:
                _log.error("no large body can be read: %s", error or "no answer in time")
                raise Refusal(
                    503, "reader_failed", "The body could not be read; try again.", 1.0
                ) from None
        if answer.code:
            raise Refusal(400, answer.code, answer.message, param=answer.param)
        return answer.field

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

    async def _ask(self, question: bytes, file: int) -> Answer:
        try:
            ours = self._start() if self._socket is None else self._socket
            try:
                socket.send_fds(ours, [question], [file])
                received = asyncio.get_running_loop().sock_recv(ours, MESSAGE_BYTES)
                answer = await asyncio.wait_for(received, TIMEOUT_S)
            except (ConnectionError, BrokenPipeError):
                answer = b""
            if not answer:
                raise _EndedError("its process ended")
            return msgspec.json.decode(answer, type=Answer)
        except BaseException:
            self.stop()  # or the next one would get this one's answer
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
