"""Arguments of `link`: a group's members, their ranks, and the hosts in the rank table. Pure.

    parse_group(1, "pd", {1: 0, 2: 1}, '{"server_list": [...], "version": "1.0"}')

Of a rank table, only `server_list[].server_id` (a host's IP address) and `.device[].rank_id` are
read. The other fields are for Ascend devices.
"""

from __future__ import annotations

import hashlib
import ipaddress
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta, Struct

from kvelastic.datadist import checks
from kvelastic.datadist.memory_config import parse_json
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


class _Device(Struct):
    rank_id: Annotated[int, Meta(ge=0, lt=MOST_MEMBERS)]


class _Server(Struct):
    server_id: str
    device: Annotated[list[_Device], Meta(max_length=MOST_MEMBERS)]


class _Table(Struct):
    server_list: Annotated[list[_Server], Meta(max_length=MOST_MEMBERS)]


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
    if len(ranks) < 2 or sorted(ranks.values()) != list(range(len(ranks))):
        raise LLMParamError(
            f"ranks are {sorted(ranks.values())}; a group has 2 to {MOST_MEMBERS}: 0, 1, ..."
        )
    if cluster_id not in ranks:
        raise LLMParamError(f"this cluster, {cluster_id}, is not in cluster_rank_info")
    table = parse_json("rank_table", checks.text("rank_table", rank_table), _Table)
    hosts = {one.rank_id: server.server_id for server in table.server_list for one in server.device}
    named = sorted(one.rank_id for server in table.server_list for one in server.device)
    if named != sorted(ranks.values()):
        raise LLMParamError(f"rank_table has ranks {named}, the group {sorted(ranks.values())}")
    own_host = hosts[ranks[cluster_id]]
    members = [
        Member(key, rank, None if hosts[rank] == own_host else _ip(hosts[rank]))
        for key, rank in sorted(ranks.items(), key=lambda item: item[1])
    ]
    own = members[ranks[cluster_id]]
    return Group(name, own, tuple(one for one in members if one is not own))


def _ip(host: str) -> str:
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        raise LLMParamError(
            f"rank_table: server_id {host!r} is another host's, and no IP address"
        ) from None
