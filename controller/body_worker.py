"""The process that reads large bodies: `python -m kvelastic.controller.body_worker`.

The controller starts it with one end of a socket pair as its standard input, sends it a body's
file with a question, and gets an answer, one at a time. It ends when the controller does: signals
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
from kvelastic.controller.refusal import Refusal

MESSAGE_BYTES: Final = 128 << 10
"""Bound of a question and of an answer: a name of `MAX_NAME_BYTES` fits, escaped."""


class Question(msgspec.Struct):
    """What is asked of the file that comes with it."""

    form: Form
    boundary: bytes
    """Of a multipart form; else empty."""


class Answer(msgspec.Struct):
    """Where the name stands, or why the request is refused; neither: there is none."""

    field: ModelField | None = None
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
            message, files, _, _ = socket.recv_fds(controller, MESSAGE_BYTES, 1)
            if not message:
                return
            try:
                answer = _answer(message, files[0])
            finally:
                for file in files:
                    os.close(file)
            try:
                controller.send(msgspec.json.encode(answer))
            except BrokenPipeError:
                return


def _answer(message: bytes, file: int) -> Answer:
    question = msgspec.json.decode(message, type=Question)
    with mmap.mmap(file, 0, prot=mmap.PROT_READ) as body:
        try:
            return Answer(find_model(body, question.form, question.boundary))
        except Refusal as refusal:
            return Answer(None, refusal.code, refusal.message, refusal.param)


if __name__ == "__main__":
    main()
