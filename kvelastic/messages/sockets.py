"""The sockets of servers at `unix:///path` or `tcp://host:port`, and connections to them.

A Unix socket's file has mode 0600. A new server removes the file of a killed one. The file of a
server that does not listen yet looks the same. So servers start under a lock of the folder.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kvelastic.address import Address
from kvelastic.errors import ChannelClosedError, ChannelError
from kvelastic.file_lock import lock_within

_BACKLOG: Final = 128
_FOLDER_WAIT_S: Final = 2.0
_FULL_BACKLOG_INTERVAL_S: Final = 0.01


class ListeningSocket:
    """A non-blocking listening socket. `close()` it; that removes a Unix socket's file."""

    def __init__(self, address: Address) -> None:
        """Listen at `address`. Raises `ChannelError` if it is in use or cannot be used."""
        self._inode: tuple[int, int] | None = None
        family = _family(address)
        try:
            self.socket = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:
            raise ChannelError(f"no socket can be opened: {error}; raise `ulimit -n`") from error
        try:
            if address.is_unix:
                os.fchmod(self.socket.fileno(), 0o600)  # the mode that bind gives to the file
                self._listen_at(Path(address.path))
            else:
                self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                self.socket.bind((address.host, address.port))
                self.socket.listen(_BACKLOG)
            self.socket.setblocking(False)
        except OSError as error:
            self.close()
            raise ChannelError(
                f"cannot listen at {address}: {error}; choose another address"
            ) from error
        except BaseException:
            self.close()
            raise
        self.address: Final = (
            address
            if address.is_unix
            else Address(host=address.host, port=self.socket.getsockname()[1])
        )
        """The address with the actual port."""

    def _listen_at(self, path: Path) -> None:
        with _locked_folder(path.parent):
            with contextlib.suppress(FileNotFoundError):
                remove_if_dead(path)
            self.socket.bind(str(path))
            found = path.lstat()
            self._path, self._inode = path, (found.st_dev, found.st_ino)
            self.socket.listen(_BACKLOG)

    def close(self) -> None:
        """Stop listening. Idempotent."""
        inode, self._inode = self._inode, None
        if inode is not None:
            # While this socket listens, no other server removes its file and takes the name.
            with contextlib.suppress(OSError):
                found = self._path.lstat()
                if (found.st_dev, found.st_ino) == inode:  # an operator may have removed the file
                    self._path.unlink()
        self.socket.close()


def remove_if_dead(path: Path) -> None:
    """Remove the socket file of a dead server; keep a live server's, and other files.

    Raises OSError if there is no such file.
    """
    found = path.lstat()
    if not stat.S_ISSOCK(found.st_mode) or found.st_uid != os.geteuid():
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # a full backlog means a live server
        if probe.connect_ex(str(path)) == errno.ECONNREFUSED:
            path.unlink()


@contextlib.contextmanager
def _locked_folder(folder: Path) -> Iterator[None]:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if not lock_within(fd, _FOLDER_WAIT_S):
            raise ChannelError(f"another process holds a lock of {folder}; choose another folder")
        yield
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)  # a child that another thread has forked shares the lock
        os.close(fd)


def connect_socket(address: Address, timeout_s: float) -> socket.socket:
    """Return a connected socket with this timeout. Blocks for at most `timeout_s` seconds.

    Raises `ChannelClosedError` if no server listens there or it does not accept in time, and
    `ChannelError` if this process has no descriptor left.
    """
    try:
        connected = socket.socket(_family(address), socket.SOCK_STREAM)
    except OSError as error:
        raise ChannelError(f"no socket can be opened: {error}; raise `ulimit -n`") from error
    try:
        connected.settimeout(timeout_s)
        if address.is_unix:
            _connect_unix(connected, address.path, timeout_s)
        else:
            connected.connect((address.host, address.port))
    except OSError as error:
        connected.close()
        if isinstance(error, (BlockingIOError, TimeoutError)):
            raise ChannelClosedError(f"{address} does not accept in {timeout_s:g} s") from error
        raise ChannelClosedError(f"no process listens at {address}: {error}") from error
    return connected


def _connect_unix(connecting: socket.socket, path: str, timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            return connecting.connect(path)
        except BlockingIOError:  # the backlog is full; the kernel does not tell when it has room
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise
        time.sleep(min(_FULL_BACKLOG_INTERVAL_S, left_s))


def _family(address: Address) -> socket.AddressFamily:
    if address.is_unix:
        return socket.AF_UNIX
    return socket.AF_INET6 if ":" in address.host else socket.AF_INET
