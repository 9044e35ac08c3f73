"""Finds the processes that listen on a port, to check that responses come from the own engine.

It reads /proc and blocks for milliseconds. Call it in a thread.
"""

from __future__ import annotations

import ipaddress
import os
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import psutil

_SHOWN_CHARS: Final = 100


@dataclass(frozen=True)
class Listener:
    """A process that accepts connections to 127.0.0.1 on the port."""

    pid: int | None
    """None if it belongs to another user, so that its id is not visible."""
    is_public: bool
    """True if it also listens on addresses other than loopback."""

    def __str__(self) -> str:
        if self.pid is None:
            return "a process of another user"
        command = ""
        with suppress(psutil.Error):
            command = program_of(psutil.Process(self.pid).cmdline())
        return f"process {self.pid} ({command or 'its command is not to be seen'})"

    def belongs_to(self, leader: int) -> bool:
        """Return True if it is the process `leader`, is in its session, or descends from it."""
        if self.pid is None:
            return False
        with suppress(ProcessLookupError, psutil.Error):
            return os.getsid(self.pid) == leader or leader in {
                parent.pid for parent in psutil.Process(self.pid).parents()
            }
        return False


def program_of(command: list[str]) -> str:
    """Return the program of a command line, with an interpreter's script or module.

    Other arguments are omitted, because they may be keys.
    """
    shown = command[:1]
    if command[1:2] == ["-m"]:
        shown = command[:3]
    elif command and "python" in os.path.basename(command[0]) and command[1:2]:  # noqa: PTH119
        shown = command[:1] if command[1].startswith("-") else command[:2]
    return " ".join(shown)[:_SHOWN_CHARS]


def listeners(port: int) -> list[Listener]:
    """Return all listeners on `port`. There are several if they share it (`SO_REUSEPORT`)."""
    found = set()
    for connection in psutil.net_connections("tcp"):
        if connection.status != psutil.CONN_LISTEN or connection.laddr.port != port:
            continue
        address = ipaddress.ip_address(connection.laddr.ip)
        mapped = getattr(address, "ipv4_mapped", None)
        address = address if mapped is None else mapped
        if address.is_unspecified or address == ipaddress.ip_address("127.0.0.1"):
            found.add(Listener(connection.pid, address.is_unspecified))
    return sorted(found, key=lambda each: each.pid or 0)
