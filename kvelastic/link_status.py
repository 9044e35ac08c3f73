"""Links between processes: what nodes show of them in status files, and asking one to cut a link.

    for node in nodes(): print(node.node_id, [link.peer_id for link in node.links])
    answer = cut(node, link, wait_s=2.0)

A node is a process that others copy from and to (`kvelastic.transfer`). It need not be an instance,
so its file is called after 16 random bytes, and found by its name's beginning.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import datetime, timezone
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from kvelastic import status_file
from kvelastic.errors import (
    SegmentError,
    SegmentFormatError,
    SegmentNotFoundError,
    is_out_of_descriptors,
)
from kvelastic.lease import MAKER_BYTE, Liveness, liveness
from kvelastic.segment_dir import LINK_STATUS, SHM_DIR
from kvelastic.status_file import Count, Shown, StatusKind, newest, reading

MOST_LINKS: Final = 512
MOST_ENDED: Final = 16
MOST_TEXT: Final = 64
"""Characters of a text."""
MOST_ADDRESS: Final = 128

Id = Annotated[int, Meta(ge=0)]
"""Of a node; of msgspec, integers are of 64 bits: what is larger is refused."""
Way = Literal["memory", "unix stream", "tcp"]
Text = Annotated[str, Meta(max_length=MOST_TEXT)]


class LinkFigures(Shown, frozen=True):
    """One link, as its node sees it. Counts are since it was made."""

    number: Count
    """Of the links of this node, in the order in which they were made; what a request names."""
    peer_id: Id
    peer: Text
    """The peer's process on this host, or its address."""
    side: Literal["client", "server"]
    """client: this node has made the link."""
    way: Way
    """How bytes travel here: read by the kernel, or over streams."""
    state: Literal["linked", "ended"]
    reason: Text
    """Why it has ended: "unlinked", "cut" (by an operator), or a code of kvelastic/errors.py."""
    since_realtime_ns: Count
    """When it was made."""
    pulled_bytes: Count
    """That this node has read from the peer."""
    pushed_bytes: Count
    """That this node has had the peer take."""
    peer_pulled_bytes: Count
    """That the peer has read from here."""
    peer_pushed_bytes: Count
    """That the peer has had this node take."""
    leases: Count
    """That the peer has now: copies that it makes of memory here."""
    retries: Count
    """Copies that lost a race and were made again."""
    failures: Count
    """Copies of this node's that failed."""

    @property
    def is_linked(self) -> bool:
        """Whether it stands."""
        return self.state == "linked"

    @property
    def in_bytes(self) -> int:
        """All that came here over it."""
        return self.pulled_bytes + self.peer_pushed_bytes

    @property
    def out_bytes(self) -> int:
        """All that left over it."""
        return self.pushed_bytes + self.peer_pulled_bytes


class NodeFigures(Shown, frozen=True):
    """A node, and its links: those that stand, and the last ones that have ended."""

    node_id: Id
    pid: Count
    role: Text
    """What it is to its users; "" where they have not said."""
    addresses: Annotated[
        tuple[Annotated[str, Meta(max_length=MOST_ADDRESS)], ...], Meta(max_length=8)
    ]
    """Where it listens."""
    data_port: Annotated[int, Meta(ge=0, le=65535)]
    """Where it takes data streams; 0: nowhere."""
    published_realtime_ns: Count
    started_realtime_ns: Count
    answered_revision: Count
    """Of the last request that was answered."""
    ranges: Count
    """That peers may reach."""
    registered_bytes: Count
    leases: Count
    """In force."""
    leases_expired: Count
    """Ended by their time, as a peer was late."""
    copies_lost: Count
    """By peers, of memory that was not the same all the time."""
    strangers_refused: Count
    """Who did not get in."""
    links: Annotated[tuple[LinkFigures, ...], Meta(max_length=MOST_LINKS + MOST_ENDED)]

    @property
    def standing_links(self) -> int:
        """How many links stand."""
        return sum(link.is_linked for link in self.links)


class LinkRequest(Shown, frozen=True):
    """What an operator asks."""

    kind: Literal["cut"]
    link: Count
    """Its number."""
    peer_id: Id


class LinkAnswer(Shown, frozen=True):
    """What the node says to a request."""

    revision: Count
    state: Literal["done", "refused"]
    reason: Annotated[str, Meta(max_length=200)] = ""


KIND: Final = StatusKind(
    "link status file", b"KVLINKS\0", 2, 192 << 10, NodeFigures, LinkRequest, LinkAnswer
)


def text_of(text: object, most: int = MOST_TEXT) -> str:
    """A text as it may stand there: printable, and cut to its bound."""
    return "".join(one if one.isprintable() else "?" for one in str(text)[:most])


def nodes() -> list[NodeFigures]:
    """All nodes whose status files this user may read, by id and process, without dead ones.

    One that cannot be read is left out, too (`look` says so). Raises `SegmentError` where this
    process is out of file descriptors: none would look as if there were none.
    """
    return look()[0]


def look() -> tuple[list[NodeFigures], list[str]]:
    """As `nodes`; and what is wrong with files that cannot be read: another version, damage."""
    looks = [found for _, found in _looks()]
    found = [figures for figures in looks if isinstance(figures, NodeFigures)]
    problems = [problem for problem in looks if isinstance(problem, str)]
    return sorted(found, key=lambda node: (node.node_id, node.pid)), sorted(problems)


def cut(node: NodeFigures, link: LinkFigures, wait_s: float) -> LinkAnswer | None:
    """Have a node end one of its links, at once and on both sides; transfers over it fail.

    Its users see a peer that has gone, and may link anew. None: no answer within `wait_s`; the
    request stays. Raises `SegmentNotFoundError` where the node has gone, `SegmentBusyError`,
    `SegmentDeadError`, `SegmentError`. Blocks.
    """

    def identity(of: NodeFigures) -> tuple[int, int, int]:
        return of.node_id, of.pid, of.started_realtime_ns

    for name, found in _looks():
        if isinstance(found, NodeFigures) and identity(found) == identity(node):
            asked = status_file.post(
                name,
                KIND,
                LinkRequest("cut", link.number, link.peer_id),
                owner_uid=_owner_of(name),
                title=KIND.subject,
                lock_name=name,
                subject="links of the node",
            )
            if asked is not None:
                with asked:
                    return asked.wait(wait_s)
    raise SegmentNotFoundError(f"node {node.node_id} of process {node.pid} has gone")


def _looks() -> Iterator[tuple[str, NodeFigures | str]]:
    """Every file's name, and what it shows or what is wrong with it."""
    try:
        with os.scandir(SHM_DIR) as entries:
            names = [entry.name for entry in entries if LINK_STATUS.fullmatch(entry.name)]
    except OSError as error:
        if is_out_of_descriptors(error):
            raise SegmentError(f"cannot list {SHM_DIR}: {error.strerror}") from error
        return
    for name in names:
        found: NodeFigures | str
        try:
            with reading(name, KIND, KIND.subject, _owner_of(name)) as fd:
                if fd is None or liveness(fd, MAKER_BYTE) is Liveness.DEAD:
                    continue
                found = newest(fd, KIND, KIND.subject)
        except SegmentFormatError as error:
            found = f"{SHM_DIR / name}: {error}"
        except SegmentError as error:  # gone, or another user's
            if is_out_of_descriptors(error):
                raise
            continue
        yield name, found


def _owner_of(name: str) -> int:
    """Whoever's file it is, as long as it is that user's alone: root sees all."""
    try:
        return (SHM_DIR / name).stat(follow_symlinks=False).st_uid
    except OSError as error:
        raise SegmentNotFoundError("the node has gone") from error


def object_of(node: NodeFigures) -> dict[str, Any]:
    """A node for programs: the schema of `kvctl links --json` and of `/links`.

    The figures as they are, times as text (UTC), and the sums of bytes in and out. Ids have 64
    bits; `name` and `peer_name` are the same as text, for readers whose numbers do not.
    """
    found: dict[str, Any] = {"name": str(node.node_id), **msgspec.structs.asdict(node)}
    del found["answered_revision"]
    found["addresses"] = list(node.addresses)
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
    """A time as text; None for one that no calendar has."""
    try:
        return datetime.fromtimestamp(realtime_ns / 1e9, tz=timezone.utc).isoformat()
    except (OverflowError, ValueError, OSError):
        return None
