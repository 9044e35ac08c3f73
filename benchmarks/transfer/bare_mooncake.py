"""Mooncake's transfer engine over TCP between two processes, and nothing around it.

    if not why_missing():
        with BareMooncake(total_bytes, piece_bytes, sources, targets) as engine:
            engine.read()       # GB/s

Its two ports are open to everybody on all interfaces for as long; the memory behind them holds
nothing. As a program it is the owner: `python -m benchmarks.transfer.bare_mooncake TOTAL_BYTES
PIECE_BYTES` prints the engine's port and where its memory lies, and ends with its input.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from types import TracebackType
from typing import Any

from benchmarks.transfer.memory import mapped
from kvelastic import _vmm


def why_missing() -> str:
    """What keeps the engine from being loaded; empty: nothing."""
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # it says a dozen lines otherwise
    try:
        import_module("mooncake.engine")
    except ImportError as error:  # no wheel, or a library of Debian's that it needs
        return str(error)
    return ""


def _engine(memory: _vmm.Range) -> Any:
    """An engine of this process, the memory registered. Raises `OSError` where it refuses."""
    engine = import_module("mooncake.engine").TransferEngine()
    if engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") != 0:
        raise OSError("Mooncake's engine does not begin")
    if engine.register_memory(memory.address, memory.range_bytes) != 0:
        raise OSError("Mooncake's engine does not take memory")
    return engine


class BareMooncake:
    """See the module."""

    def __init__(
        self, total_bytes: int, piece_bytes: int, sources: Sequence[int], targets: Sequence[int]
    ) -> None:
        """`sources` and `targets` are offsets of pieces in memory of `total_bytes` on each side."""
        self._memory = mapped(total_bytes, piece_bytes)
        self._engine = _engine(self._memory)
        self._owner = subprocess.Popen(
            [sys.executable, "-m", __name__, str(total_bytes), str(piece_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._owner.stdout is not None
        port, base = self._owner.stdout.readline().split()
        self._peer = f"127.0.0.1:{port}"
        self._into = [self._memory.address + at for at in targets]
        self._of = [int(base) + at for at in sources]
        self._sizes = [piece_bytes] * len(self._of)

    def __enter__(self) -> BareMooncake:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._engine.unregister_memory(self._memory.address)
        self._owner.kill()
        self._owner.communicate()

    def read(self) -> float:
        """All pieces once; GB/s."""
        begin_s = time.perf_counter()
        answer = self._engine.batch_transfer_sync_read(
            self._peer, self._into, self._of, self._sizes
        )
        took_s = time.perf_counter() - begin_s
        if answer != 0:
            raise OSError(f"Mooncake's engine answered {answer} to a read")
        return sum(self._sizes) / took_s / 1e9


def _own(total_bytes: int, piece_bytes: int) -> None:
    assert not why_missing()
    memory = mapped(total_bytes, piece_bytes)
    engine = _engine(memory)
    print(engine.get_rpc_port(), memory.address, flush=True)
    with suppress(KeyboardInterrupt):
        sys.stdin.read()


if __name__ == "__main__":
    _own(int(sys.argv[1]), int(sys.argv[2]))
