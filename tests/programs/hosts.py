"""Hosts on one machine: a network, processes and shared memory of its own for each.

    with Host() as a, Host() as b:
        link(a, b, "10.99.7.1", "10.99.7.2")
        server = a.start("program", "--listen", "10.99.7.1")
        with a.network(): client.get(...)     # this thread's new sockets are the host's
        b.kill()                              # at once, all that ran there

A host is three namespaces (network, mounts with a tmpfs on /dev/shm, processes), held by the first
process of the last one. So what is started in a host ends with it, and nothing of it is left.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import psutil

_FIRST = """\
import os, subprocess, time
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1g", "tmpfs", "/dev/shm"], check=True)
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
print("ready", flush=True)
while True:
    try:
        os.wait()
    except ChildProcessError:
        time.sleep(0.1)
"""
_CLONE_NEWNET = 0x40000000  # setns(2)
Self = TypeVar("Self", bound="Host")
_libc = ctypes.CDLL(None, use_errno=True)


class Host:
    """See the module."""

    def __init__(self) -> None:
        spaces = ("--net", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child")
        self._holder = subprocess.Popen(
            ["unshare", *spaces, sys.executable, "-S", "-c", _FIRST],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == "ready\n"
        (first,) = psutil.Process(self._holder.pid).children()
        self.first: psutil.Process = first
        # Held beyond the host's end: with it the other host's end of the wire would vanish.
        self._network = os.open(f"/proc/{first.pid}/ns/net", os.O_RDONLY)

    def command(self, *command: str) -> list[str]:
        """What runs this command there."""
        return ["nsenter", "--net", "--mount", "--pid", f"--target={self.first.pid}", *command]

    def start(
        self, *command: str, environment: Mapping[str, str], **more: Any
    ) -> subprocess.Popen[str]:
        """Start a program there."""
        return subprocess.Popen(self.command(*command), env=dict(environment), text=True, **more)

    def find(self, *words: str) -> list[psutil.Process]:
        """The processes there whose command lines have all these words in them."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                line = " ".join(process.cmdline())
                if all(word in line for word in words) and self._has(process.pid):
                    found.append(process)
        return found

    def _has(self, pid: int) -> bool:
        space = Path(f"/proc/{pid}/ns/pid").readlink()
        return space == Path(f"/proc/{self.first.pid}/ns/pid").readlink()

    @contextlib.contextmanager
    def network(self) -> Iterator[None]:
        """In the body, sockets that this thread makes are in the host's network."""
        with Path("/proc/thread-self/ns/net").open() as own:
            _set_network(self._network)
            try:
                yield
            finally:
                _set_network(own.fileno())

    def kill(self) -> None:
        """End all that runs there at once; its network stays. More than once does no harm."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self.first.send_signal(signal.SIGKILL)
        self._holder.wait()
        assert self._holder.stdout is not None
        self._holder.stdout.close()

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        os.close(self._network)


def link(one: Host, other: Host, address: str, other_address: str) -> None:
    """Join two hosts by a wire; each has its address on it, in one network of 24 bits."""
    names = "wire0", "wire1"
    spaces = str(one.first.pid), str(other.first.pid)
    pair = ["type", "veth", "peer", "name", names[1], "netns", spaces[1]]
    subprocess.run(["ip", "link", "add", names[0], "netns", spaces[0], *pair], check=True)
    for host, name, own in ((one, names[0], address), (other, names[1], other_address)):
        for words in (("addr", "add", f"{own}/24", "dev", name), ("link", "set", name, "up")):
            subprocess.run(host.command("ip", *words), check=True)


def _set_network(fd: int) -> None:
    if _libc.setns(fd, _CLONE_NEWNET):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
