"""Ports for servers of tests."""

from __future__ import annotations

import random
import socket
from pathlib import Path


def free_port() -> int:
    """Return a TCP port of the loopback interface that no process has bound.

    A server may bind it a minute later. Until this process ends, neither this function, in any
    process, nor the kernel gives the port to anyone else: it is claimed, and it is below the range
    of ports that the kernel chooses for clients.
    """
    first_ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.randrange(first_ephemeral // 2, first_ephemeral)
        # A name without a file, which one process has at a time and which goes with its process.
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0kvelastic-test-port-{port}")
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", port))
        except OSError:
            claim.close()
        else:
            claim.detach()
            return port
