"""Has large bodies read and translated by a process of its own: the loop goes on meanwhile.

A parser in a thread would hold Python's lock. There is one such process, started when it is first
needed; it reads one body at a time, and the others wait.
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

from kvelastic.controller.body_worker import (
    MESSAGE_BYTES,
    Answer,
    FindModel,
    FromOpenAI,
    Question,
    ToOpenAI,
)
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
        return (await self._answer(FindModel(form, boundary), [file])).field

    async def translate(self, question: ToOpenAI | FromOpenAI, file: int, into: int) -> Answer:
        """Translate what is in `file`, and write it to `into`, an empty file.

        Raises `Refusal` (400, 413, 503; 502 for an answer that cannot be used). As `find_model`.
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
        """End it, at once."""
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
                answer = await asyncio.wait_for(received, TIMEOUT_S)
            except (ConnectionError, BrokenPipeError):
                answer = b""
            if not answer:
                raise _EndedError("its process ended")
            return msgspec.msgpack.decode(answer, type=Answer)
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
