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
from typing import Annotated, Final, NamedTuple

from msgspec import Meta, Struct

from kvelastic.datadist import checks
from kvelastic.datadist.enums import RegisterMemStatus
from kvelastic.datadist.memory_config import parse_json
from kvelastic.datadist.status import LLMException, LLMParamError, LLMStatusCode, failure

MOST_GROUPS: Final = 512
MOST_MEMBERS: Final = 4
_AGAIN_S: Final = 0.05
"""Interval between attempts to join a member of lower rank."""


class Joined(NamedTuple):
    """The result of one attempt to join a cluster."""

    is_new_link: bool
    is_member: bool


Join = Callable[[int, str, float], Joined]
"""Links a cluster, unless it is linked, and sends the token, with a timeout in seconds. Blocks."""


@dataclass(eq=False)
class Group:
    """A group, as seen by this cluster."""

    name: str
    cluster_id: int
    """This cluster."""
    ranks: dict[int, int]
    """Rank of each cluster of the group."""
    elsewhere: list[int]
    """Clusters on other hosts."""
    there: set[int] = field(default_factory=set)
    """Clusters that have joined."""
    linked: set[int] = field(default_factory=set)
    """Clusters that were linked for the group, whether they have joined or not."""
    status: RegisterMemStatus = RegisterMemStatus.PREPARING
    is_over: bool = False

    @property
    def others(self) -> set[int]:
        """The clusters except this one."""
        return self.ranks.keys() - {self.cluster_id}

    @property
    def token(self) -> str:
        """Identifies the group: a hash of name, clusters and ranks, equal for all members."""
        ordered = sorted(self.ranks, key=self.ranks.__getitem__)
        text = self.name + "".join(f"\0{one}:{self.ranks[one]}" for one in ordered)
        return hashlib.sha256(text.encode()).hexdigest()[:32]


class GroupLinks:
    """Groups of this cluster. Any thread may call; call `close()` at the end.

    While a group is being linked, a separate thread serves it.
    """

    def __init__(self, join: Join, leave: Callable[[int], None]) -> None:
        """`leave` is called to unlink a cluster that is no longer in any group."""
        self._join, self._leave = join, leave
        self._changed = threading.Condition()
        self._numbers = itertools.count(1)
        self._groups: dict[int, Group] = {}

    def begin(self, group: Group, total_s: float, rounds: int) -> int:
        """Start to link a group; return its id at once.

        `total_s` bounds all rounds together; each round tries every member once. Raises
        `LLM_FEATURE_NOT_ENABLED` for members on other hosts, `LLM_ALREADY_LINK` for a name in use,
        and `LLM_FAILED` if no thread can be started.
        """
        if group.elsewhere:
            raise failure(
                LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
                f"clusters {group.elsewhere} are on other hosts, which link() does not reach; use"
                " link_clusters",
            )
        with self._changed:
            if any(one.name == group.name for one in self._groups.values()):
                raise failure(
                    LLMStatusCode.LLM_ALREADY_LINK,
                    f"{group.name!r} is linked already; unlink it first",
                )
            if len(self._groups) >= MOST_GROUPS:
                raise failure(
                    LLMStatusCode.LLM_CLUSTER_NUM_EXCEED_LIMIT,
                    f"{MOST_GROUPS} groups are linked; unlink some",
                )
            comm_id = next(self._numbers)
            self._groups[comm_id] = group
        thread = threading.Thread(
            target=self._make, args=(group, total_s, rounds), name="kvelastic-group", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:
            with self._changed:
                del self._groups[comm_id]
            raise failure(LLMStatusCode.LLM_FAILED, f"{group.name!r}: {error}") from error
        return comm_id

    def _make(self, group: Group, total_s: float, rounds: int) -> None:
        own_rank = group.ranks[group.cluster_id]
        lower = {one for one, rank in group.ranks.items() if rank < own_rank}
        deadline_s = time.monotonic() + total_s
        while True:
            for one in sorted(lower - group.there):
                joined = self._join(one, group.token, max(total_s / rounds, _AGAIN_S))
                with self._changed:
                    if joined.is_new_link:
                        group.linked.add(one)
                    if joined.is_member:
                        self._note(group, one)
                if group.is_over:  # `end` came during the attempt
                    self._leave_all(group)
                    return
            with self._changed:
                left_s = deadline_s - time.monotonic()
                if group.status is RegisterMemStatus.PREPARING and left_s <= 0:
                    group.status = RegisterMemStatus.FAILED
                if group.is_over or group.status is not RegisterMemStatus.PREPARING:
                    return
                self._changed.wait(min(_AGAIN_S, left_s))

    def _note(self, group: Group, joined: int) -> None:
        group.there.add(joined)
        if group.there == group.others:
            group.status = RegisterMemStatus.OK
            self._changed.notify_all()

    def joined(self, cluster_id: int, token: str) -> bool:
        """Handle a member that linked this cluster and sent a token; return whether it matches."""
        with self._changed:
            for group in self._groups.values():
                if group.token == token and cluster_id in group.others:
                    self._note(group, cluster_id)
                    return True
            return False

    def status(self, comm_id: int) -> RegisterMemStatus:
        """Return a group's state. Raises `LLM_NOT_YET_LINK` for an unknown id."""
        with self._changed:
            return self._known(comm_id).status

    def end(self, comm_id: int) -> None:
        """End a group and its links that no other group uses.

        Raises `LLM_NOT_YET_LINK` for an unknown id. If clusters could not be unlinked, raises the
        first error after all others have been unlinked.
        """
        with self._changed:
            group = self._known(comm_id)
            del self._groups[comm_id]
            group.is_over = True
            self._changed.notify_all()
        errors = self._leave_all(group)
        if errors:
            raise errors[0]

    def _leave_all(self, group: Group) -> list[LLMException]:
        with self._changed:
            kept = {one for each in self._groups.values() for one in each.there | each.linked}
            unused = sorted((group.there | group.linked) - kept)
        errors = []
        for cluster_id in unused:
            try:
                self._leave(cluster_id)
            except LLMException as error:  # noqa: PERF203  # the others are unlinked, too
                errors.append(error)
        return errors

    def _known(self, comm_id: int) -> Group:
        group = self._groups.get(comm_id)
        if group is None:
            raise failure(LLMStatusCode.LLM_NOT_YET_LINK, f"no group has the id {comm_id}")
        return group

    def close(self) -> None:
        """End all groups without unlinking or notifying peers. Idempotent."""
        with self._changed:
            for group in self._groups.values():
                group.is_over = True
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
    by_rank = sorted(ranks, key=ranks.__getitem__)
    elsewhere = [one for one in by_rank if hosts[ranks[one]] != own_host]
    host = own_host
    try:
        for host in (hosts[ranks[one]] for one in elsewhere):
            ipaddress.ip_address(host)
    except ValueError:
        raise LLMParamError(
            f"rank_table: server_id {host!r} is another host's, and no IP address"
        ) from None
    return Group(name, cluster_id, dict(ranks), elsewhere)
