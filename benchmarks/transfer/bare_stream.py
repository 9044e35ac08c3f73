"""A bare TCP stream between two processes: gathered on one side, scattered on the other.

    with BareStream(total_bytes, piece_bytes) as stream:
        stream.receive()            # GB/s

What a transfer over TCP does besides (leases, checksums, memory that may go) is not there. As a
program it is the sender: `bare_stream.py TOTAL_BYTES PIECE_BYTES` prints its port, and sends all
once for each byte that it receives.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from types import TracebackType

_MOST_PIECES = 1024
"""Of one call: the kernel's IOV_MAX."""


def _calls(memory: memoryview, piece_bytes: int) -> Iterator[list[memoryview]]:
    """The pieces of each call, every second one of the first half and of the second in turn."""
    count = len(memory) // piece_bytes
    order = [at // 2 + (at % 2) * (count // 2) for at in range(count // 2 * 2)]
    pieces = [memory[at * piece_bytes : (at + 1) * piece_bytes] for at in order]
    for at in range(0, len(pieces), _MOST_PIECES):
        yield pieces[at : at + _MOST_PIECES]


def _after(pieces: list[memoryview], done: int) -> list[memoryview]:
    """What is left of them after so many bytes."""
    at = 0
    while at < len(pieces) and done >= len(pieces[at]):
        done -= len(pieces[at])
        at += 1
    return [pieces[at][done:], *pieces[at + 1 :]] if at < len(pieces) else []


class BareStream:
    """See the module."""

    def __init__(self, total_bytes: int, piece_bytes: int) -> None:
        self._into = memoryview(bytearray(total_bytes))
        self._piece_bytes = piece_bytes
        self._sender = subprocess.Popen(
            [sys.executable, "-m", __name__, str(total_bytes), str(piece_bytes)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._sender.stdout is not None
        port = int(self._sender.stdout.readline())
        self._stream = socket.create_connection(("127.0.0.1", port))

    def __enter__(self) -> BareStream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._stream.close()
        self._sender.kill()
        self._sender.communicate()

    def receive(self) -> float:
        """All pieces once; GB/s."""
        begin_s = time.perf_counter()
        self._stream.sendall(b"1")
        received = 0
        for pieces in _calls(self._into, self._piece_bytes):
            left = pieces
            while left:
                got = self._stream.recvmsg_into(left)[0]
                assert got > 0, "the sender has ended"
                received += got
                left = _after(left, got)
        return received / (time.perf_counter() - begin_s) / 1e9


def _send(total_bytes: int, piece_bytes: int) -> None:
    memory = memoryview(bytearray(b"x" * total_bytes))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        print(listening.getsockname()[1], flush=True)
        stream, _ = listening.accept()
        with stream:
            while stream.recv(1):
                for pieces in _calls(memory, piece_bytes):
                    left = pieces
                    while left:
                        left = _after(left, stream.sendmsg(left))


if __name__ == "__main__":
    _send(int(sys.argv[1]), int(sys.argv[2]))
