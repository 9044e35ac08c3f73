"""Publishes a node's state in its status file and handles requests (`shared.link_status`).

The node's own thread writes it twice a second. Errors are logged once; the node keeps working if
its file cannot be written.
"""

from __future__ import annotations

import logging
import os
import time
from typing import TYPE_CHECKING, Final

from kvelastic.errors import KvelasticError
from kvelastic.shared.link_status import (
    KIND,
    MOST_ADDRESS,
    MOST_ENDED,
    MOST_HELD,
    MOST_LINKS,
    HeldStatus,
    LinkAck,
    LinkRequest,
    LinkStatus,
    NodeStatus,
    Way,
    text_of,
)
from kvelastic.shared.segment_listing import link_status_name, reap
from kvelastic.shared.status_file import StatusFile

if TYPE_CHECKING:
    from kvelastic.transfer.link import Link
    from kvelastic.transfer.node import Node

_log = logging.getLogger("kvelastic.transfer")
PUBLISH_S: Final = 0.5


class StatusPublisher:
    """Status file of one node.

    Any thread may construct or close it. Only the node's thread may call the other methods.
    """

    def __init__(self, node: Node) -> None:
        """Create the file and remove files of dead processes. Never raises."""
        self._node = node
        self._has_warned = False
        self._started_ns = time.time_ns()
        self._file: StatusFile[NodeStatus, LinkRequest, LinkAck] | None = None
        reap()
        try:
            self._file = StatusFile.create(link_status_name(node.start), KIND)
            self.publish()
        except (KvelasticError, OSError) as error:
            self._warn(error)

    def refresh(self) -> None:
        """Handle pending requests and publish the current state."""
        if self._file is None:
            return
        try:
            for revision, request in self._file.pending().items():
                is_cut = self._node.cut(request.link, request.peer_id)
                self.publish()  # first, so that an operator with the result sees its effect
                self._file.answer(
                    LinkAck(revision, "done")
                    if is_cut
                    else LinkAck(revision, "refused", "that link has ended before")
                )
            self.publish()
        except (KvelasticError, OSError) as error:
            self._warn(error)

    def publish(self) -> None:
        """Publish the current state. Raises `SegmentError`."""
        if self._file is not None:
            self._file.publish(self._status(self._file.answered_revision))

    def close(self) -> None:
        """Remove the file. Idempotent."""
        if self._file is not None:
            self._file.close()

    def _warn(self, error: Exception) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning("kvctl links does not see node %d: %s", self._node.node_id, error)

    def _status(self, answered_revision: int) -> NodeStatus:
        node = self._node
        ranges, registered_bytes = node.ranges.sizes
        leases = node.leases.by_owner()
        links = [
            _link_status(link, leases.get(link.connection, 0), is_standing=True)
            for link in node.links[:MOST_LINKS]
        ]
        ended = [
            _link_status(link, 0, is_standing=False) for link in node.ended_links[-MOST_ENDED:]
        ]
        held = () if node.held is None else node.held.held()
        return NodeStatus(
            node_id=node.node_id,
            pid=os.getpid(),
            role=text_of(node.role),
            addresses=tuple(text_of(address, MOST_ADDRESS) for address in node.addresses[:8]),
            data_port=node.streams.port,
            published_realtime_ns=time.time_ns(),
            started_realtime_ns=self._started_ns,
            answered_revision=answered_revision,
            ranges=ranges,
            registered_bytes=registered_bytes,
            leases=sum(leases.values()),
            leases_expired=node.leases.expired,
            copies_lost=node.leases.lost,
            strangers_refused=node.strangers_refused,
            links=(*links, *ended),
            held_requests=len(held),
            held_bytes=sum(one.size_bytes for one in held),
            held=tuple(
                HeldStatus(text_of(one.request), one.size_bytes, int(one.left_s * 1e3))
                for one in held[:MOST_HELD]
            ),
            holds_expired=0 if node.held is None else node.held.expired,
        )


def _link_status(link: Link, leases: int, *, is_standing: bool) -> LinkStatus:
    peer = link.connection.peer
    way: Way = "tcp"
    if peer.uid is not None:
        way = "memory" if link.reads_memory else "unix stream"
    return LinkStatus(
        number=link.number,
        peer_id=link.peer_id,
        peer=text_of(peer),
        side="client" if link.is_client else "server",
        way=way,
        state="linked" if is_standing else "ended",
        reason="" if is_standing else link.end_reason,
        since_realtime_ns=round(link.since_s * 1e9),
        pulled_bytes=link.counts["pulled_bytes"],
        pushed_bytes=link.counts["pushed_bytes"],
        peer_pulled_bytes=link.counts["peer_pulled_bytes"],
        peer_pushed_bytes=link.counts["peer_pushed_bytes"],
        leases=leases,
        retries=link.counts["retries"],
        failures=link.counts["failures"],
    )
