"""The protocol that the tests of messages speak, and a server of it as a program.

python spoken.py ADDRESS [SECRET]        answers until it is killed; prints "ready ADDRESS"
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Annotated

from kvelastic.errors import LimitError
from kvelastic.messages import (
    Endpoint,
    Message,
    Meta,
    Protocol,
    Request,
    SecretFile,
    parse_address,
)

SECRET = "0123456789abcdef" * 4


class Ask(Message):
    name: Annotated[str, Meta(max_length=64)]


class Numbers(Message):
    values: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(max_length=1000)]


class Answer(Message):
    size_bytes: int
    text: Annotated[str, Meta(max_length=100_000)] = ""


PROTOCOL = Protocol("spoken", version=3, messages=(Ask, Numbers, Answer), most_bytes=1 << 17)


def answer(request: Request) -> None:
    message = request.message
    match message:
        case Ask(name="refuse"):
            raise LimitError("no more than this")
        case Ask(name="fail"):
            raise ZeroDivisionError("a secret of the inside")
        case Ask(name="silent"):
            request.connection.kept = request  # type: ignore[attr-defined]
        case Ask(name="large"):
            request.answer(Answer(0, "x" * 100_000))
        case Ask(name="descriptor"):
            read, write = os.pipe()
            os.write(write, b"through a pipe")
            try:
                request.answer(Answer(1), [read])
            finally:
                os.close(read)
                os.close(write)
        case Ask(name="later"):
            threading.Thread(target=request.answer, args=(Answer(7),)).start()
        case Ask(name="take"):
            taken = request.take_descriptors()
            text = b"".join(os.read(fd, 100) for fd in taken)
            for fd in taken:
                os.close(fd)
            request.answer(Answer(len(taken), text.decode()))
        case Ask(name=name):
            request.answer(Answer(len(name), name))
        case Numbers(values=values):
            request.answer(Answer(sum(values)))


if __name__ == "__main__":
    secret = SecretFile(Path(sys.argv[2])) if len(sys.argv) > 2 else None
    with Endpoint(PROTOCOL, answer, listen=[parse_address(sys.argv[1])], secret=secret) as server:
        print("ready", server.addresses[0], flush=True)
        sys.stdin.read()
