"""Socket addresses for the interface's addresses: where clusters listen and connect.

On one host, a cluster is reached over a Unix socket that represents its ip:port or its id. The
kernel verifies that both ends belong to the same user. Without a secret only Unix sockets are used:
no port is open, and an address need not belong to this host. With `KVELASTIC_LINK_SECRET` clusters
also listen on TCP, and can reach other hosts.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvelastic.config import Config
from kvelastic.errors import ChannelError
from kvelastic.messages import MOST_PATH_BYTES, Address, SecretFile, runtime_folder

_OF_CLUSTER: Final = "cluster_"
_MOST_NAMED: Final = 8
"""Number of listening addresses that an error message lists."""


@dataclass(frozen=True)
class SocketAddresses:
    """The folder of the sockets and the settings for TCP."""

    folder: Path
    secret: SecretFile | None
    allowed: tuple[str, ...]
    data_ports: tuple[int, int] | None

    @classmethod
    def of(cls, settings: Config) -> SocketAddresses:
        """Create from the settings; creates the folder, which only this user can access.

        Clusters of different `KVELASTIC_LEDGER` groups cannot link. Raises `ChannelError`,
        `SecretError`.
        """
        folder = runtime_folder("kvelastic-links", settings.ledger)
        secret = None if settings.link_secret is None else SecretFile(Path(settings.link_secret))
        return cls(folder, secret, settings.link_allow, settings.link_data_ports)

    def here(self, host: str, port: int) -> Address:
        """Return the Unix socket that represents an address. Raises `ChannelError`."""
        return self._socket(f"{host}_{port}")

    def cluster(self, cluster_id: int) -> Address:
        """Return the Unix socket at which members of a cluster's groups find it.

        Raises `ChannelError`.
        """
        return self._socket(f"{_OF_CLUSTER}{cluster_id}")

    def _socket(self, name: str) -> Address:
        path = str(self.folder / name)
        if len(os.fsencode(path)) > MOST_PATH_BYTES:
            raise ChannelError(
                f"{path} is too long for a Unix socket, which has {MOST_PATH_BYTES} bytes at most;"
                " set XDG_RUNTIME_DIR to a folder with a shorter path"
            )
        return Address(path=path)

    def listening(self, addresses: tuple[tuple[str, int], ...]) -> list[Address]:
        """Return all sockets of a cluster that listens at these addresses.

        With port 0, TCP takes any free port, and there is no Unix socket because a peer could not
        name it.
        """
        found = [self.here(host, port) for host, port in addresses if port]
        if self.secret is not None:
            found += [Address(host=host, port=port) for host, port in addresses]
        return found

    def why_unreachable(self, addresses: list[Address]) -> str:
        """Return an error text for the case that no cluster listens at any of `addresses`."""
        with contextlib.suppress(OSError):
            names = sorted(path.name for path in self.folder.iterdir())
            there = [name.replace("_", ":") for name in names if not name.startswith(_OF_CLUSTER)]
            named = ", ".join(there[:_MOST_NAMED])
            return (
                f"no cluster listens at {' or '.join(map(str, addresses))} (in this folder:"
                f" {named or 'none'}). Compare the address with the peer's listen_ip_info. A peer"
                " on this host must run as this user, with this XDG_RUNTIME_DIR and"
                " KVELASTIC_LEDGER; on another host it needs KVELASTIC_LINK_SECRET on both"
            )
        return f"the folder {self.folder} has gone; set XDG_RUNTIME_DIR to a folder that stays"

    def towards(self, host: str, port: int) -> list[Address]:
        """Return the possible sockets of a peer with this address, the nearest first."""
        found = [self.here(host, port)]
        if self.secret is not None:
            found.append(Address(host=host, port=port))
        return found
