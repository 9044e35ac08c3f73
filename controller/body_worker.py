"""The process that reads and translates large bodies: `python -m kvelastic.controller.body_worker`.

The controller starts it with one end of a socket pair as its standard input. A message is one call
of a function of this module, with a body's file; the result, or the exception, goes back. The
process ends when the controller does. It ignores signals that are meant for the controller (Ctrl-C,
a service's stop), because requests that are still being drained need it.
"""

from __future__ import annotations

import mmap
import os
import pickle
import signal
import socket
from typing import Any, Final

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
"""Bound of a call and of its result: a name of `MAX_NAME_BYTES` fits."""


def find_model(body: bytes | mmap.mmap, form: Form, boundary: bytes) -> ModelField | None:
    """The model that a body names, whatever its form. Raises `Refusal` (400)."""
    if form is Form.JSON:
        return find_in_json(body)
    if form is Form.URLENCODED:
        return find_in_urlencoded(body)
    return find_in_multipart(body, boundary)


def request_to_openai(
    body: mmap.mmap, into: int, call: Call, name: str, engine: str
) -> tuple[Head, str]:
    """Write a request of Ollama's API as one of OpenAI's; returns what remains, and the path.

    A request that only loads a model writes nothing and has no path. Raises `Refusal` (400, 413).
    """
    asked = read(call, bytes(body))
    if asked.is_load:
        return asked.head, ""
    path, made = to_openai(asked, name, engine)
    _write(into, made)
    return asked.head, path


def answer_from_openai(
    body: mmap.mmap, into: int, call: Call, model: str, times: Times, created_at: str
) -> None:
    """Write an answer of OpenAI's API as one of Ollama's. Raises `BadAnswerError`."""
    _write(into, whole(call, model, bytes(body), times, created_at))


def main() -> None:
    """Serve calls until the other end is closed."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with socket.socket(fileno=0) as controller:
        while True:
            message, files, _, _ = socket.recv_fds(controller, MESSAGE_BYTES, 2)
            if not message:
                return
            try:
                result = _call(message, files)
            finally:
                for file in files:
                    os.close(file)
            try:
                controller.send(pickle.dumps(result))
            except BrokenPipeError:
                return


def _call(message: bytes, files: list[int]) -> Any:
    function, arguments = pickle.loads(message)
    with mmap.mmap(files[0], 0, prot=mmap.PROT_READ) as body:
        try:
            return function(body, *files[1:], *arguments)
        except (Refusal, BadAnswerError) as error:
            return error


def _write(file: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(file, rest) :]


if __name__ == "__main__":
    main()
