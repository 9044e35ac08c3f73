"""Groups whose members all link with each other: membership and state.

A member links the members of lower rank and waits for links from those of higher rank. A member has
joined when it has sent the group's token and the other side is in the group, too:

    PREPARING -- all others joined --> OK -- end --> gone
        '------ timeout ------------> FAILED -- end --> gone

`parse_group` checks the arguments of `link`. Of a rank table, only `server_list[].server_id` (a
host's IP address) and `.device[].rank_id` are read. The other fields are for Ascend devices.
"""

from __future__ import annotations

import hashlib
import ipaddress
import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Final

from msgspec import Meta, Struct

from kvelastic.datadist import checks
from kvelastic.datadist.enums import RegisterMemStatus
from kvelastic.datadist.memory_config import parse_json
from kvelastic.datadist.status import LLMParamError, LLMStatusCode, failure

MOST_GROUPS: Final = 512
MOST_MEMBERS: Final = 4
_AGAIN_S: Final = 0.05
"""Interval between attempts to join a member of lower rank."""

Join = Callable[[int, str, float], bool]
"""Links a cluster and sends the token, with a timeout in seconds. Returns whether it joined.

Blocks.
"""


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


@dataclass(eq=False)
class _Linking:
    comm_id: int
    group: Group
    there: set[int] = field(default_factory=set)
    status: RegisterMemStatus = RegisterMemStatus.PREPARING
    is_over: bool = False


class GroupLinks:
    """Groups of this cluster. Any thread may call; call `close()` at the end.

    While a group is being linked, a separate thread serves it.
    """

    def __init__(self, join: Join, leave: Callable[[int], None]) -> None:
        """`leave` is called to unlink a cluster that is no longer in any group."""
        self._join, self._leave = join, leave
        self._changed = threading.Condition()
        self._numbers = itertools.count(1)
        self._groups: dict[int, _Linking] = {}

    def begin(self, group: Group, total_s: float, rounds: int) -> int:
        """Start to link a group; return its id at once.

        `total_s` bounds all rounds together; each round tries every member once. Raises
        `LLM_FEATURE_NOT_ENABLED` for members on other hosts, and `LLM_ALREADY_LINK` for a name in
        use.
        """
        elsewhere = [one.cluster_id for one in group.others if one.host is not None]
        if elsewhere:
            raise failure(
                LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
                f"clusters {elsewhere} are on other hosts, which link() does not reach; use"
                " link_clusters",
            )
        with self._changed:
            if any(one.group.name == group.name for one in self._groups.values()):
                raise failure(
                    LLMStatusCode.LLM_ALREADY_LINK,
                    f"{group.name!r} is linked already; unlink it first",
                )
            if len(self._groups) >= MOST_GROUPS:
                raise failure(
                    LLMStatusCode.LLM_CLUSTER_NUM_EXCEED_LIMIT,
                    f"{MOST_GROUPS} groups are linked; unlink some",
                )
            linking = _Linking(next(self._numbers), group)
            self._groups[linking.comm_id] = linking
        threading.Thread(
            target=self._make, args=(linking, total_s, rounds), name="kvelastic-group", daemon=True
        ).start()
        return linking.comm_id

    def _make(self, linking: _Linking, total_s: float, rounds: int) -> None:
        group = linking.group
        lower = {one.cluster_id for one in group.others if one.rank < group.own.rank}
        deadline_s = time.monotonic() + total_s
        while True:
            for one in sorted(lower - linking.there):
                if self._join(one, group.token, max(total_s / rounds, _AGAIN_S)):
                    with self._changed:
                        self._note(linking, one)
            with self._changed:
                left_s = deadline_s - time.monotonic()
                if linking.status is RegisterMemStatus.PREPARING and left_s <= 0:
                    linking.status = RegisterMemStatus.FAILED
                if linking.is_over or linking.status is not RegisterMemStatus.PREPARING:
                    return
                self._changed.wait(min(_AGAIN_S, left_s))

    def _note(self, linking: _Linking, joined: int) -> None:
        linking.there.add(joined)
        if len(linking.there) == len(linking.group.others):
            linking.status = RegisterMemStatus.OK
            self._changed.notify_all()

    def joined(self, cluster_id: int, token: str) -> bool:
        """Handle a member that linked this cluster and sent a token; return whether it matches."""
        with self._changed:
            for linking in self._groups.values():
                members = {one.cluster_id for one in linking.group.others}
                if linking.group.token == token and cluster_id in members:
                    self._note(linking, cluster_id)
                    return True
            return False

    def status(self, comm_id: int) -> RegisterMemStatus:
        """Return a group's state. Raises `LLM_NOT_YET_LINK` for an unknown id."""
        with self._changed:
            return self._known(comm_id).status

    def end(self, comm_id: int) -> None:
        """End a group and its links that no other group uses. Raises `LLM_NOT_YET_LINK`."""
        with self._changed:
            linking = self._known(comm_id)
            del self._groups[comm_id]
            linking.is_over = True
            self._changed.notify_all()
            kept = {one for each in self._groups.values() for one in each.there}
        for cluster_id in sorted(linking.there - kept):
            self._leave(cluster_id)

    def _known(self, comm_id: int) -> _Linking:
        linking = self._groups.get(comm_id)
        if linking is None:
            raise failure(LLMStatusCode.LLM_NOT_YET_LINK, f"no group has the id {comm_id}")
        return linking

    def close(self) -> None:
        """End all groups without unlinking or notifying peers. Idempotent."""
        with self._changed:
            for linking in self._groups.values():
                linking.is_over = True
            self._groups.clear()
            self._changed.notify_all()


# --- arguments of `link` ----------------------------------------------------------------------


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
    name = checks.instance("comm_name", comm_name, str)
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
    table = parse_json("rank_table", checks.instance("rank_table", rank_table, str), _Table)
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
