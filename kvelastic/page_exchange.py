"""Handing pages of a GPU to another process: descriptors over a Unix socket, to the same user only.

    with PageServer(path) as server:                 # the process that has the pages
        server.send(driver, handles)                 # waits for one receiver

    handles = receive_pages(path, driver)            # the process that wants them

A page stays alive until every process has destroyed its handle. Nothing is pickled: a message is a
header of fixed size, and the descriptors travel beside it (SCM_RIGHTS).
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from kvelastic import _vmm
from kvelastic.errors import ChannelClosedError, ChannelError, ChannelTimeoutError

_HEADER: Final = struct.Struct("<4sII")  # magic, version, pages
_MAGIC: Final = b"kvpx"
_VERSION: Final = 1
_PAGES_PER_MESSAGE: Final = 200  # the kernel takes 253 descriptors at once
_CREDENTIALS: Final = struct.Struct("3i")  # pid, uid, gid
DEFAULT_TIMEOUT_S: Final = 30.0


class PageServer:
    """Listens at `path`, a socket only this user can reach; use it as a context manager.

    Raises `ChannelError` if the path is taken or cannot be made.
    """

    def __init__(self, path: Path, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(timeout_s)
        before = os.umask(0o177)
        try:
            self._socket.bind(str(path))
        except OSError as error:
            self._socket.close()
            raise ChannelError(f"cannot listen at {path}: {error}; choose another path") from error
        finally:
            os.umask(before)
        self._socket.listen(1)

    def send(self, driver: _vmm.CudaDriver, handles: Sequence[int]) -> int:
        """Give the pages to the next receiver of this user; returns its pid. Blocks.

        The handles stay the caller's. Others that connect are turned away, and it waits on. Raises
        `ChannelTimeoutError` if nobody comes, `ChannelClosedError` if the receiver goes, and
        `DriverError` if a page cannot be exported.
        """
        while True:
            try:
                peer, _ = self._socket.accept()
            except TimeoutError as error:
                raise ChannelTimeoutError(
                    f"nobody has come for the pages at {self._path}"
                ) from error
            with peer:
                pid, uid = peer_of(peer)
                if uid != os.geteuid():
                    continue
                peer.settimeout(self._socket.gettimeout())
                _send_all(peer, driver, handles)
                return pid

    def close(self) -> None:
        """Stop listening and remove the socket. Safe to repeat."""
        self._socket.close()
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()

    def __enter__(self) -> PageServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def peer_of(connected: socket.socket) -> tuple[int, int]:
    """Who is at the other end, as the kernel knows it: pid and user id."""
    raw = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return pid, uid


def receive_pages(
    path: Path, driver: _vmm.CudaDriver, timeout_s: float = DEFAULT_TIMEOUT_S
) -> list[int]:
    """Handles of the pages that the server at `path` gives; this process destroys them in the end.

    Raises `ChannelError` for a server of another user or another version, `ChannelTimeoutError`,
    `ChannelClosedError`, and `DriverError` if a page cannot be imported; no handle is kept then.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.settimeout(timeout_s)
        try:
            server.connect(str(path))
        except OSError as error:
            raise ChannelClosedError(f"no page server at {path}: {error}") from error
        pid, uid = peer_of(server)
        if uid != os.geteuid():
            raise ChannelError(f"the page server at {path} (process {pid}) is user {uid}'s")
        handles: list[int] = []
        try:
            expected = None
            while expected is None or len(handles) < expected:
                expected = _receive_some(server, driver, handles)
        except BaseException:
            for handle in handles:
                driver.destroy(handle, driver.granularity_bytes)
            raise
        return handles


def _send_all(peer: socket.socket, driver: _vmm.CudaDriver, handles: Sequence[int]) -> None:
    header = _HEADER.pack(_MAGIC, _VERSION, len(handles))
    for first in range(0, max(len(handles), 1), _PAGES_PER_MESSAGE):
        descriptors: list[int] = []
        try:
            for handle in handles[first : first + _PAGES_PER_MESSAGE]:
                descriptors.append(driver.export_page(handle))  # noqa: PERF401  # closed on failure
            socket.send_fds(peer, [header], descriptors)
        except TimeoutError as error:
            raise ChannelTimeoutError("the receiver does not take the pages") from error
        except OSError as error:
            raise ChannelClosedError(f"the receiver has gone: {error}") from error
        finally:
            for descriptor in descriptors:
                os.close(descriptor)


def _receive_some(server: socket.socket, driver: _vmm.CudaDriver, handles: list[int]) -> int:
    try:
        message, descriptors, _, _ = socket.recv_fds(server, _HEADER.size, _PAGES_PER_MESSAGE)
    except TimeoutError as error:
        raise ChannelTimeoutError("the page server sends nothing") from error
    try:
        if not message:
            raise ChannelClosedError("the page server has gone before all pages came")
        magic, version, pages = (
            _HEADER.unpack(message) if len(message) == _HEADER.size else ("", 0, 0)
        )
        if (magic, version) != (_MAGIC, _VERSION):
            raise ChannelError(f"not a page server of version {_VERSION}; run the same kvelastic")
        handles.extend(driver.import_page(descriptor) for descriptor in descriptors)
        return int(pages)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
