"""A peer to link with: its id and addresses.

cluster = LLMClusterInfo()
cluster.remote_cluster_id = 1
cluster.append_local_ip_info("127.0.0.1", 0)
cluster.append_remote_ip_info("127.0.0.1", 26000)
datadist.link_clusters([cluster])
"""

from __future__ import annotations

import ipaddress

from kvelastic.datadist import checks
from kvelastic.datadist.enums import LLMRole
from kvelastic.datadist.status import LLMParamError


class LLMClusterInfo:
    """A peer, as an argument of `link_clusters` and `unlink_clusters`.

    Connections start from the local addresses; their ports are not used. The n-th remote address is
    that of the peer's n-th device, or of its host.
    """

    def __init__(self) -> None:
        self._remote_cluster_id: int | None = None
        self._remote_role_type: LLMRole | None = None
        self._local: list[tuple[str, int]] = []
        self._remote: list[tuple[str, int]] = []

    @property
    def remote_cluster_id(self) -> int | None:
        """The peer's id; None until set."""
        return self._remote_cluster_id

    @remote_cluster_id.setter
    def remote_cluster_id(self, remote_cluster_id: int) -> None:
        self._remote_cluster_id = checks.integer("remote_cluster_id", remote_cluster_id)

    @property
    def remote_role_type(self) -> LLMRole | None:
        """The expected role of the peer; linking fails for another role. None: any role."""
        return self._remote_role_type

    @remote_role_type.setter
    def remote_role_type(self, remote_role_type: LLMRole) -> None:
        self._remote_role_type = checks.instance("remote_role_type", remote_role_type, LLMRole)

    @property
    def local_ip_infos(self) -> list[tuple[str, int]]:
        """Addresses added by `append_local_ip_info`."""
        return list(self._local)

    @property
    def remote_ip_infos(self) -> list[tuple[str, int]]:
        """Addresses added by `append_remote_ip_info`."""
        return list(self._remote)

    def append_local_ip_info(self, ip: str | int, port: int) -> None:
        """Add an address of this host; `ip` as text or as a number (`address_text`)."""
        self._local.append((address_text(ip), _port(port)))

    def append_remote_ip_info(self, ip: str | int, port: int) -> None:
        """Add an address of the peer; `ip` as text or as a number (`address_text`)."""
        self._remote.append((address_text(ip), _port(port)))


def address_text(ip: str | int) -> str:
    """Return an IP address as text. Raises `TypeError` and `LLMParamError`.

    A number is an IPv4 address with its first part in the lowest byte: 127.0.0.1 is 0x0100007F.
    """
    if isinstance(ip, bool) or not isinstance(ip, (str, int)):
        raise TypeError(f"ip is a {type(ip).__name__}, must be a str or an int")
    try:
        return str(ipaddress.ip_address(ip if isinstance(ip, str) else ip.to_bytes(4, "little")))
    except (ValueError, OverflowError):
        raise LLMParamError(
            f"ip={ip!r} is no IP address; write it as 192.168.1.1 or as a 32-bit number"
        ) from None


def listen_addresses(name: str, text: str) -> list[tuple[str, int]]:
    """Parse "ip:port", several separated by ";". Raises `LLMParamError`."""
    found = []
    for one in text.split(";"):
        host, _, port = one.strip().rpartition(":")
        if not port.isascii() or not port.isdigit() or len(port) > 5:
            raise LLMParamError(
                f"{name}={text!r} is not accepted; write ip:port, as 127.0.0.1:26000"
            )
        found.append((address_text(host.strip("[]")), _port(int(port))))
    return found


def _port(port: int) -> int:
    return checks.integer("port", port, most=checks.MAX_UINT16)
