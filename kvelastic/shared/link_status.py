"""Links between processes: reads the status files of nodes, and cuts links.

    for node in nodes(): print(node.node_id, [link.peer_id for link in node.links])
    answer = cut(node, link, wait_s=2.0)

A node is a process that copies to and from others (`kvelastic.transfer`). A node need not be an
instance. So its file is named after 16 random bytes, and found by its prefix.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timezone
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from kvelastic.errors import (
    SegmentError,
    SegmentFormatError,
    SegmentNotFoundError,
    is_out_of_descriptors,
)
from kvelastic.shared import status_file
from kvelastic.shared.liveness import MAKER_BYTE, Liveness, liveness
from kvelastic.shared.segment_listing import LINK_STATUS, SHM_DIR, file_names
from kvelastic.shared.status_file import Count, Shown, StatusKind, newest, reading
from kvelastic.units import format_size

MOST_LINKS: Final = 512
MOST_ENDED: Final = 16
MOST_HELD: Final = 64
"""Maximum number of holds that a node lists; the sums have all."""
MOST_TEXT: Final = 64
"""Maximum characters of a `Text`."""
MOST_ADDRESS: Final = 128

Id = Annotated[int, Meta(ge=0)]
"""Id of a node. msgspec rejects integers that need more than 64 bits."""
Way = Literal["memory", "unix stream", "tcp"]
Text = Annotated[str, Meta(max_length=MOST_TEXT)]


class LinkStatus(Shown, frozen=True):
    """One link, as its node sees it. Counts start when the link is made."""

    number: Count
    """Sequence number among this node's links; requests refer to it."""
    peer_id: Id
    peer: Text
    """The peer's process on this host, or its address."""
    side: Literal["client", "server"]
    """client: this node opened the link."""
    way: Way
    """How bytes reach this node: copied by the kernel (memory), or over streams."""
    state: Literal["linked", "ended"]
    reason: Text
    """Why it ended: unlinked, cut (by an operator), crossed, or a code of kvelastic/errors.py."""
    since_realtime_ns: Count
    """Creation time, in nanoseconds since 1970."""
    pulled_bytes: Count
    """Bytes that this node has read from the peer."""
    pushed_bytes: Count
    """Bytes that the peer has read because this node pushed them."""
    peer_pulled_bytes: Count
    """Bytes that the peer has read from this node."""
    peer_pushed_bytes: Count
    """Bytes that this node has read because the peer pushed them."""
    leases: Count
    """Leases that the peer holds now, one for each running copy of memory of this node."""
    retries: Count
    """Copies that were repeated because they lost a race."""
    failures: Count
    """Failed copies that this node started."""

    @property
    def is_linked(self) -> bool:
        """Whether the link is open."""
        return self.state == "linked"

    @property
    def in_bytes(self) -> int:
        """Bytes received over the link."""
        return self.pulled_bytes + self.peer_pushed_bytes

    @property
    def out_bytes(self) -> int:
        """Bytes sent over the link."""
        return self.pushed_bytes + self.peer_pulled_bytes


class HeldStatus(Shown, frozen=True):
    """Memory that a node holds until a peer has read it (docs/prefill_decode.md)."""

    request: Text
    """The engine's id of the request whose blocks they are."""
    size_bytes: Count
    left_ms: Count
    """Milliseconds until the hold ends by itself."""


class NodeStatus(Shown, frozen=True):
    """A node with its open links and the last links that have ended."""

    node_id: Id
    pid: Count
    role: Text
    """The node's role, as its user set it; "" if unset."""
    addresses: Annotated[
        tuple[Annotated[str, Meta(max_length=MOST_ADDRESS)], ...], Meta(max_length=8)
    ]
    """Addresses on which it listens."""
    data_port: Annotated[int, Meta(ge=0, le=65535)]
    """TCP port for data streams; 0 if none."""
    published_realtime_ns: Count
    started_realtime_ns: Count
    answered_revision: Count
    """Revision of the last request with a result."""
    ranges: Count
    """Number of registered memory ranges that peers may access."""
    registered_bytes: Count
    leases: Count
    """Leases in force."""
    leases_expired: Count
    """Leases that expired because a peer was late."""
    copies_lost: Count
    """Copies by peers that failed because the memory changed during the copy."""
    strangers_refused: Count
    """Refused connections."""
    links: Annotated[tuple[LinkStatus, ...], Meta(max_length=MOST_LINKS + MOST_ENDED)]
    held_requests: Count = 0
    """Number of requests whose blocks are held for a peer."""
    held_bytes: Count = 0
    held: Annotated[tuple[HeldStatus, ...], Meta(max_length=MOST_HELD)] = ()
    """The first of them to end."""
    holds_expired: Count = 0
    """Number of holds that ended by themselves because no peer had read the blocks in time."""

    @property
    def holds_in_words(self) -> str:
        """The memory held for peers, as sentences for operators; empty if there was none."""
        said = []
        if self.held:
            number, first = self.held_requests, self.held[0]
            said.append(
                f"{format_size(self.held_bytes)} of {number} finished"
                f" request{'' if number == 1 else 's'} are held until a decode engine has"
                f" read them; the first hold, of {first.request}, ends in"
                f" {first.left_ms / 1e3:.0f} s at the latest."
            )
        if self.holds_expired:
            number = self.holds_expired
            said.append(
                f"{number} hold{'' if number == 1 else 's'} ended because no decode engine had read"
                " the blocks in time."
            )
        return " ".join(said)

    @property
    def standing_links(self) -> int:
        """Number of open links."""
        return sum(link.is_linked for link in self.links)


class LinkRequest(Shown, frozen=True):
    """A request of an operator."""

    kind: Literal["cut"]
    link: Count
    """Number of the link."""
    peer_id: Id


class LinkAck(Shown, frozen=True):
    """The node's result of a request."""

    revision: Count
    state: Literal["done", "refused"]
    reason: Annotated[str, Meta(max_length=200)] = ""


KIND: Final = StatusKind(
    "link status file", b"KVLINKS\0", 3, 192 << 10, NodeStatus, LinkRequest, LinkAck
)


def text_of(text: object, most: int = MOST_TEXT) -> str:
    """Replace unprintable characters of `text` and truncate it to `most` characters."""
    return "".join(one if one.isprintable() else "?" for one in str(text)[:most])


def nodes() -> list[NodeStatus]:
    """Return the live nodes whose status files this user can read, sorted by id and pid.

    Leaves out unreadable files; `look` reports them. Raises `SegmentError` if this process is out
    of file descriptors, because the list would wrongly be empty.
    """
    return look()[0]


def look() -> tuple[list[NodeStatus], list[str]]:
    """Return the list of `nodes`, and the problems of unreadable files: other version, damage."""
    looks = [found for _, found in _looks()]
    found = [looks_of_node for looks_of_node in looks if isinstance(looks_of_node, NodeStatus)]
    problems = [problem for problem in looks if isinstance(problem, str)]
    return sorted(found, key=lambda node: (node.node_id, node.pid)), sorted(problems)


def cut(node: NodeStatus, link: LinkStatus, wait_s: float) -> LinkAck | None:
    """Request that a node end one of its links immediately, on both sides.

    Transfers over the link fail. The users of both nodes see that the peer is gone; they may link
    again. Blocks for at most `wait_s` seconds. Returns None on timeout; the request remains in
    force. Raises `SegmentNotFoundError` if the node is gone, `SegmentBusyError`, `SegmentDeadError`
    or `SegmentError`.
    """

    def identity(of: NodeStatus) -> tuple[int, int, int]:
        return of.node_id, of.pid, of.started_realtime_ns

    for name, found in _looks():
        if isinstance(found, NodeStatus) and identity(found) == identity(node):
            asked = status_file.post(
                name,
                KIND,
                LinkRequest("cut", link.number, link.peer_id),
                owner_uid=None,
                title=KIND.subject,
                lock_name=name,
                subject="links of the node",
            )
            if asked is not None:
                with asked:
                    return asked.wait(wait_s)
    raise SegmentNotFoundError(f"node {node.node_id} of process {node.pid} has gone")


def _looks() -> Iterator[tuple[str, NodeStatus | str]]:
    """Yield the name of every file, and its content or its problem."""
    for name in filter(LINK_STATUS.fullmatch, file_names()):
        found: NodeStatus | str
        try:
            with reading(name, KIND, KIND.subject, None) as fd:
                if fd is None or liveness(fd, MAKER_BYTE) is Liveness.DEAD:
                    continue
                found = newest(fd, KIND, KIND.subject)
        except SegmentFormatError as error:
            found = f"{SHM_DIR / name}: {error}"
        except SegmentError as error:  # the file is gone or belongs to another user
            if is_out_of_descriptors(error):
                raise
            continue
        yield name, found


def object_of(node: NodeStatus) -> dict[str, Any]:
    """Return a node as JSON-compatible values: the schema of `kvctl links --json` and `/links`.

    Times are text (UTC), and the sums of bytes in and out are added. Ids have 64 bits; `name` and
    `peer_name` repeat them as text, for readers whose numbers have fewer bits.
    """
    found: dict[str, Any] = {"name": str(node.node_id), **msgspec.structs.asdict(node)}
    del found["answered_revision"]
    found["addresses"] = list(node.addresses)
    found["held"] = [msgspec.structs.asdict(one) for one in node.held]
    for name in ("published", "started"):
        found[name] = utc(found.pop(f"{name}_realtime_ns"))
    found["links"] = [
        {
            **msgspec.structs.asdict(link),
            "peer_name": str(link.peer_id),
            "since": utc(link.since_realtime_ns),
            "in_bytes": link.in_bytes,
            "out_bytes": link.out_bytes,
        }
        for link in node.links
    ]
    for link in found["links"]:
        del link["since_realtime_ns"]
    return found


def utc(realtime_ns: int) -> str | None:
    """Return a time as ISO text in UTC; None if it is out of range."""
    try:
        return datetime.fromtimestamp(realtime_ns / 1e9, tz=timezone.utc).isoformat()
    except (OverflowError, ValueError, OSError):
        return None
