"""Addresses of servers: `unix:///path` or `tcp://host:port`.

parse_address("tcp://10.0.0.1:5000").port    # 5000
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Final

from kvelastic.errors import InvalidArgumentError

MOST_PATH_BYTES: Final = 107
"""Maximum path of a Unix socket: the kernel's 108 bytes, minus the terminating zero."""


@dataclass(frozen=True)
class Address:
    """A Unix socket's path, or a TCP host and port. A listener on port 0 uses any free port."""

    path: str = ""
    host: str = ""
    port: int = 0

    @property
    def is_unix(self) -> bool:
        """Whether this is the path of a Unix socket."""
        return bool(self.path)

    @property
    def is_loopback(self) -> bool:
        """Whether only this host can connect to it."""
        return self.is_unix or ip_address(self.host).is_loopback

    def __str__(self) -> str:
        if self.is_unix:
            return f"unix://{self.path}"
        return (
            f"tcp://[{self.host}]:{self.port}"
            if ":" in self.host
            else (f"tcp://{self.host}:{self.port}")
        )


def is_loopback(host: str) -> bool:
    """Return True for a loopback address and for localhost, False for any other name."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def parse_address(text: str) -> Address:
    """Parse `unix:///run/kv`, `tcp://10.0.0.1:5000` or `tcp://[::1]:5000`.

    `localhost` means 127.0.0.1. Other host names are not resolved, because that blocks and its
    result can change. Raises `InvalidArgumentError`.
    """
    kind, _, rest = text.partition("://")
    if kind == "unix" and rest.startswith("/") and "\0" not in rest:
        with contextlib.suppress(UnicodeEncodeError):
            if len(os.fsencode(rest)) <= MOST_PATH_BYTES:
                return Address(path=rest)
    if kind == "tcp":
        host, _, port = rest.rpartition(":")
        host = "127.0.0.1" if host == "localhost" else host.removeprefix("[").removesuffix("]")
        with contextlib.suppress(ValueError):
            if port.isascii() and port.isdigit() and int(port) < 1 << 16:
                return Address(host=str(ip_address(host)), port=int(port))
    raise InvalidArgumentError(
        f"{text!r} is no address; use unix:///path (at most {MOST_PATH_BYTES} bytes) or"
        " tcp://a.b.c.d:port"
    )
