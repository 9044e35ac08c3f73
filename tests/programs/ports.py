"""Ports for servers of tests."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path


def free_port() -> int:
    """Return a TCP port of the loopback interface that no process has bound.

    The port is below the kernel's ephemeral range, so the kernel does not give it to a client
    between this call and the moment when the server binds it, which may be a minute later.
    """
    first_ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.randrange(first_ephemeral // 2, first_ephemeral)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
