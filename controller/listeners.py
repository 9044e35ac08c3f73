"""Who listens on a port of this machine: whether an engine's answers come from that engine.

Blocks: it looks through /proc, for milliseconds. Call it in a thread.
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
    """A process that takes connections to 127.0.0.1 on the port."""

    pid: int | None
    """None: of another user, and so not to be seen."""
    is_public: bool
    """Whether it also listens on addresses other than loopback."""

    def __str__(self) -> str:
        if self.pid is None:
            return "a process of another user"
        command = ""
        with suppress(psutil.Error):
            command = program_of(psutil.Process(self.pid).cmdline())
        return f"process {self.pid} ({command or 'its command is not to be seen'})"

    def belongs_to(self, leader: int) -> bool:
        """Whether it is that process, of its session, or descends from it."""
        if self.pid is None:
            return False
        with suppress(ProcessLookupError, psutil.Error):
            return os.getsid(self.pid) == leader or leader in {
                parent.pid for parent in psutil.Process(self.pid).parents()
            }
        return False


def program_of(command: list[str]) -> str:
    """The program of a command line, and what an interpreter runs; its arguments may be keys."""
    shown = command[:1]
    if command[1:2] == ["-m"]:
        shown = command[:3]
    elif command and "python" in os.path.basename(command[0]) and command[1:2]:  # noqa: PTH119
        shown = command[:1] if command[1].startswith("-") else command[:2]
    return " ".join(shown)[:_SHOWN_CHARS]


def listeners(port: int) -> list[Listener]:
    """All of them; several where they share the port (`SO_REUSEPORT`)."""
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
