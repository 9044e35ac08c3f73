"""Two nodes, memory that both can see, and how they travel; shared by the tests of transfer."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvelastic.messages import Address, SecretFile, parse_address
from kvelastic.transfer import Link, Node, Piece

SECRET = "0123456789abcdef" * 4
KINDS = ("memory", "unix stream", "tcp")


class Memory:
    """Bytes of this process with an address."""

    def __init__(self, content: bytes) -> None:
        self.buffer = ctypes.create_string_buffer(content, len(content))
        self.address = ctypes.addressof(self.buffer)
        self.size = len(content)

    @property
    def content(self) -> bytes:
        return self.buffer.raw

    def piece(self, offset: int = 0, size: int | None = None) -> Piece:
        return self.address + offset, self.size - offset if size is None else size


def secret_file(folder: Path) -> SecretFile:
    path = folder / "secret"
    if not path.exists():
        path.touch(0o600)
        path.write_text(SECRET)
    return SecretFile(path)


def address_of(kind: str, folder: Path, name: str = "node") -> Address:
    return parse_address("tcp://127.0.0.1:0" if kind == "tcp" else f"unix://{folder}/{name}")


@contextmanager
def linked(kind: str, owner: Node, reader: Node) -> Iterator[Link]:
    """The reader's link to an owner that listens; bytes travel as `kind` says, both ways."""
    link = reader.link(owner.addresses[0], timeout_s=300)
    if kind == "unix stream":
        link.reads_memory = False
        for other in owner.links:
            other.reads_memory = False
    yield link
