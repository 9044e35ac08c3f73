"""Mooncake's client over a dict, that fails, hangs and damages on demand.

server = Server()
store = MooncakeStore("none:1", record_bytes, make_client=lambda: StandIn(server))
server.fail_at(3)          # the third call from now on does not work
"""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Callable, Sequence

from kvelastic.tiers.stores.mooncake.client import NO_ROOM, NOT_FOUND

RPC_FAIL = -900


class Server:
    """What a master and its clients' memory are together."""

    def __init__(self) -> None:
        self.records: dict[str, bytes] = {}
        self.lock = threading.Lock()
        self.calls = 0
        self.room: int | None = None
        self.is_gone = False
        self.hangs: threading.Event | None = None
        """Calls wait for it."""
        self.on_write: Callable[[], None] = lambda: None
        self._fail_at = 0

    def fail_at(self, turn: int) -> None:
        """The turn-th call from now on fails; 0: none."""
        self.calls, self._fail_at = 0, turn

    def begin_call(self) -> bool:
        """Whether the call works; every other failure is an exception, as of a library."""
        hangs = self.hangs
        if hangs is not None:
            hangs.wait()
        with self.lock:
            self.calls += 1
            fails = self.is_gone or self.calls == self._fail_at
            if fails and self.calls % 2:
                raise RuntimeError("the call failed")
            return not fails


class StandIn:
    """One client."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.registered: tuple[int, int] | None = None
        if not server.begin_call():
            raise OSError("nobody is there")

    def _check(self, address: int, size: int) -> None:
        assert self.registered is not None
        start, length = self.registered
        assert start <= address, "memory that was not registered"
        assert address + size <= start + length, "memory that was not registered"

    def register_buffer(self, buffer_ptr: int, size: int) -> int:
        self.registered = (buffer_ptr, size)
        return 0

    def unregister_buffer(self, buffer_ptr: int) -> int:
        self.registered = None
        return 0

    def batch_is_exist(self, keys: Sequence[str]) -> list[int]:
        if not self.server.begin_call():
            return [RPC_FAIL] * len(keys)
        return [int(key in self.server.records) for key in keys]

    def batch_put_from(
        self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]
    ) -> list[int]:
        if not self.server.begin_call():
            return [RPC_FAIL] * len(keys)
        codes = []
        for key, address, size in zip(keys, buffer_ptrs, sizes, strict=True):
            self._check(address, size)
            contents = ctypes.string_at(address, size)
            self.server.on_write()
            with self.server.lock:
                full = self.server.room is not None and len(self.server.records) >= self.server.room
                if key not in self.server.records and full:
                    codes.append(NO_ROOM)
                    continue
                self.server.records.setdefault(key, contents)
                codes.append(0)
        return codes

    def batch_get_into(
        self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]
    ) -> list[int]:
        if not self.server.begin_call():
            return [RPC_FAIL] * len(keys)
        codes = []
        for key, address, size in zip(keys, buffer_ptrs, sizes, strict=True):
            self._check(address, size)
            contents = self.server.records.get(key)
            if contents is None:
                codes.append(NOT_FOUND)
                continue
            ctypes.memmove(address, contents, min(len(contents), size))
            codes.append(len(contents) if len(contents) <= size else -600)
        return codes

    def batch_remove(self, keys: Sequence[str], force: bool) -> list[int]:
        if not self.server.begin_call():
            return [RPC_FAIL] * len(keys)
        with self.server.lock:
            return [NOT_FOUND if self.server.records.pop(key, None) is None else 0 for key in keys]

    def remove_by_regex(self, regex_pattern: str, force: bool) -> int:
        if not self.server.begin_call():
            return RPC_FAIL
        with self.server.lock:
            found = [key for key in self.server.records if re.search(regex_pattern, key)]
            for key in found:
                del self.server.records[key]
        return len(found)

    def close(self) -> int:
        self.server.begin_call()
        return 0
