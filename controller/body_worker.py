"""The process that reads and translates large bodies: `python -m kvelastic.controller.body_worker`.

The controller starts it with one end of a socket pair as its standard input, sends it a body's
file with a question, and gets an answer, one at a time. A translation goes into a second file that
comes with the question. It ends when the controller does: signals
that are meant for the controller (Ctrl-C, a service's stop) are not its end, or requests that are
still being drained would lose it.
"""

from __future__ import annotations

import mmap
import os
import signal
import socket
from typing import Final

import msgspec

from kvelastic.controller.model_field import (
    Form,
    ModelField,
    find_in_json,
    find_in_urlencoded,
)
from kvelastic.controller.multipart_field import find_in_multipart
from kvelastic.controller.ollama_answer import BadAnswerError, Times, whole
from kvelastic.controller.ollama_request import Call, Head, read, to_openai
from kvelastic.controller.refusal import Refusal

MESSAGE_BYTES: Final = 128 << 10
"""Bound of a question and of an answer: a name of `MAX_NAME_BYTES` fits, escaped."""


class FindModel(msgspec.Struct, tag=True):
    """Which model does the body in the file name?"""

    form: Form
    boundary: bytes
    """Of a multipart form; else empty."""


class ToOpenAI(msgspec.Struct, tag=True):
    """Make the request of Ollama's API in the file one of OpenAI's."""

    call: Call
    name: str
    engine: str


class FromOpenAI(msgspec.Struct, tag=True):
    """Make the answer of OpenAI's API in the file one of Ollama's."""

    call: Call
    model: str
    times: Times
    created_at: str


Question = FindModel | ToOpenAI | FromOpenAI


class Answer(msgspec.Struct):
    """What was found or made, or why the body is refused (`status` and what follows)."""

    field: ModelField | None = None
    """Of `FindModel`: where the name stands; None: there is none."""
    head: Head | None = None
    path: str = ""
    """Of `ToOpenAI`; nothing is made of a request that is for loading only."""
    status: int = 0
    code: str = ""
    message: str = ""
    param: str | None = None


def find_model(body: bytes | mmap.mmap, form: Form, boundary: bytes) -> ModelField | None:
    """The model that a body names, whatever its form. Raises `Refusal` (400)."""
    if form is Form.JSON:
        return find_in_json(body)
    if form is Form.URLENCODED:
        return find_in_urlencoded(body)
    return find_in_multipart(body, boundary)


def main() -> None:
    """Answer until the other end is closed."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with socket.socket(fileno=0) as controller:
        while True:
            message, files, _, _ = socket.recv_fds(controller, MESSAGE_BYTES, 2)
            if not message:
                return
            try:
                answer = _answer(message, files)
            finally:
                for file in files:
                    os.close(file)
            try:
                controller.send(msgspec.msgpack.encode(answer))
            except BrokenPipeError:
                return


def _answer(message: bytes, files: list[int]) -> Answer:
    question = msgspec.msgpack.decode(message, type=Question)
    with mmap.mmap(files[0], 0, prot=mmap.PROT_READ) as body:
        try:
            if isinstance(question, FindModel):
                return Answer(find_model(body, question.form, question.boundary))
            return _translate(question, bytes(body), files[1])
        except Refusal as refusal:
            return Answer(
                status=refusal.status,
                code=refusal.code,
                message=refusal.message,
                param=refusal.param,
            )
        except BadAnswerError as error:
            return Answer(status=502, code="engine_failed", message=str(error))


def _translate(question: ToOpenAI | FromOpenAI, body: bytes, into: int) -> Answer:
    if isinstance(question, FromOpenAI):
        answer = Answer()
        made = whole(question.call, question.model, body, question.times, question.created_at)
    else:
        asked = read(question.call, body)
        answer = Answer(head=asked.head)
        if asked.is_load:
            return answer
        answer.path, made = to_openai(asked, question.name, question.engine)
    rest = memoryview(made)
    while rest:
        rest = rest[os.write(into, rest) :]
    return answer


if __name__ == "__main__":
    main()
