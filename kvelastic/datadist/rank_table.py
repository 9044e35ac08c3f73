"""Arguments of `link`: a group's members, their ranks, and the hosts in the rank table. Pure.

    parse_group(1, "pd", {1: 0, 2: 1}, '{"server_list": [...], "version": "1.0"}')

Of a rank table, only `server_list[].server_id` (a host's IP address) and `.device[].rank_id` are
read. The other fields are for Ascend devices.
"""

from __future__ import annotations

import hashlib
import ipaddress
from dataclasses import dataclass
from typing import Any

from kvelastic.datadist import checks
from kvelastic.datadist.memory_config import parse_json_object
from kvelastic.datadist.status import LLMParamError

MOST_MEMBERS = 4


@dataclass(frozen=True)
class Member:
    """One cluster of a group."""

    cluster_id: int
    rank: int
    host: str | None
    """IP address of the member's host; None for this host."""


@dataclass(frozen=True)
class Group:
    """A group to link, as seen by this cluster."""

    name: str
    own: Member
    others: tuple[Member, ...]

    @property
    def token(self) -> str:
        """Identifies the group: a hash of name, clusters and ranks, equal for all members."""
        members = sorted((*self.others, self.own), key=lambda member: member.rank)
        text = self.name + "".join(f"\0{one.cluster_id}:{one.rank}" for one in members)
        return hashlib.sha256(text.encode()).hexdigest()[:32]


def parse_group(
    cluster_id: int, comm_name: str, cluster_rank_info: dict[int, int], rank_table: str
) -> Group:
    """Parse and check the arguments of `link`. Raises `TypeError`, `LLMParamError`."""
    name = checks.text("comm_name", comm_name)
    if not 0 < len(name) < 128:
        raise LLMParamError(f"comm_name has {len(name)} characters; it must have 1 to 127")
    ranks = checks.instance("cluster_rank_info", cluster_rank_info, dict)
    for key, rank in ranks.items():
        checks.integer("a cluster of cluster_rank_info", key)
        checks.integer(f"cluster_rank_info[{key}]", rank, most=MOST_MEMBERS - 1)
    if not 2 <= len(ranks) <= MOST_MEMBERS:
        raise LLMParamError(f"a group has 2 to {MOST_MEMBERS} members, not {len(ranks)}")
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise LLMParamError(f"ranks are {sorted(ranks.values())}; they must be 0, 1, ...")
    if cluster_id not in ranks:
        raise LLMParamError(f"this cluster, {cluster_id}, is not in cluster_rank_info")
    hosts = _hosts(parse_json_object("rank_table", rank_table), len(ranks))
    own_host = hosts[ranks[cluster_id]]
    members = [
        Member(key, rank, None if hosts[rank] == own_host else _ip(hosts[rank]))
        for key, rank in ranks.items()
    ]
    own = next(one for one in members if one.cluster_id == cluster_id)
    others = tuple(
        sorted((one for one in members if one is not own), key=lambda member: member.rank)
    )
    return Group(name, own, others)


def _hosts(table: dict[str, Any], count: int) -> list[str]:
    """Return the server of each rank."""
    servers = table.get("server_list")
    if not isinstance(servers, list) or len(servers) > MOST_MEMBERS:
        raise LLMParamError(f'rank_table needs "server_list", of {MOST_MEMBERS} servers at most')
    found: dict[int, str] = {}
    for server in servers:
        devices = server.get("device") if isinstance(server, dict) else None
        host = server.get("server_id") if isinstance(server, dict) else None
        if (
            not isinstance(devices, list)
            or len(devices) > MOST_MEMBERS
            or not isinstance(host, str)
        ):
            raise LLMParamError('each server of rank_table needs "server_id" and "device", a list')
        for one in devices:
            rank = str(one.get("rank_id", "")) if isinstance(one, dict) else ""
            if not (rank.isascii() and rank.isdigit() and len(rank) < 4 and int(rank) < count):
                raise LLMParamError(f"rank_table: rank_id {rank!r} is not 0 to {count - 1}")
            if found.setdefault(int(rank), host) != host:
                raise LLMParamError(f"rank_table names rank {rank} twice")
    if len(found) != count:
        raise LLMParamError(f"rank_table has {len(found)} ranks, the group {count} members")
    return [found[rank] for rank in range(count)]


def _ip(host: str) -> str:
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        raise LLMParamError(
            f"rank_table: server_id {host!r} is another host's, and no IP address"
        ) from None
