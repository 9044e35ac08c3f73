"""The process that reads and translates large bodies.

python -m kvelastic.controller.routing.body_worker

The controller starts it with one end of a socket pair as standard input. It sends a question with a
body's file and receives an answer, one at a time. A translation is written to a second file that
comes with the question. The process ignores signals meant for the controller (Ctrl-C, a service's
stop), because requests that are being drained still need it. It ends when the controller ends.
"""

from __future__ import annotations

import mmap
import os
import signal
import socket
from typing import Final

import msgspec

from kvelastic.controller.http.refusal import Refusal
from kvelastic.controller.routing.model_field import (
    Form,
    ModelField,
    find_in_json,
    find_in_urlencoded,
)
from kvelastic.controller.routing.multipart_field import find_in_multipart
from kvelastic.controller.routing.ollama_answer import BadAnswerError, Times, whole
from kvelastic.controller.routing.ollama_request import Call, Head, read, to_openai

MESSAGE_BYTES: Final = 128 << 10
"""Maximum size of a question and of an answer. An escaped name of `MAX_NAME_BYTES` fits."""


class FindModel(msgspec.Struct, tag=True):
    """Asks for the model named in the file's body."""

    form: Form
    boundary: bytes
    """The boundary of a multipart form; else empty."""


class ToOpenAI(msgspec.Struct, tag=True):
    """Asks to translate the file's request from Ollama's API to OpenAI's."""

    call: Call
    name: str
    engine: str


class FromOpenAI(msgspec.Struct, tag=True):
    """Asks to translate the file's response from OpenAI's API to Ollama's."""

    call: Call
    model: str
    times: Times
    created_at: str


Question = FindModel | ToOpenAI | FromOpenAI


class Answer(msgspec.Struct):
    """The result, or the refusal of the body (`status` and the fields after it)."""

    field: ModelField | None = None
    """For `FindModel`: the name and its position; None if the body names no model."""
    head: Head | None = None
    path: str = ""
    """For `ToOpenAI`: the path at the engine; empty for a request that only loads a model."""
    status: int = 0
    code: str = ""
    message: str = ""
    param: str | None = None


def find_model(body: bytes | mmap.mmap, form: Form, boundary: bytes) -> ModelField | None:
    """Return the model named in a body of the given form, or None. Raises `Refusal` (400)."""
    if form is Form.JSON:
        return find_in_json(body)
    if form is Form.URLENCODED:
        return find_in_urlencoded(body)
    return find_in_multipart(body, boundary)


def main() -> None:
    """Serve questions until the controller closes the socket. Blocks."""
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
