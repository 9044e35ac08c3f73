"""Shows a node to operators and does what they ask: its link board (`kvelastic.link_board`).

It is written twice a second by the node's own thread. What cannot be shown is logged once: a node
never fails because nobody can look.
"""

from __future__ import annotations

import atexit
import logging
import os
import time
from typing import TYPE_CHECKING, Final

from kvelastic import link_board_format as board_format
from kvelastic.board_file import BoardFile
from kvelastic.errors import KvelasticError
from kvelastic.link_board_format import (
    LAYOUT,
    LinkAnswer,
    LinkFigures,
    LinkRequest,
    NodeFigures,
    Way,
    text_of,
)
from kvelastic.segment_dir import link_board_name, reap

if TYPE_CHECKING:
    from kvelastic.transfer.link import Link
    from kvelastic.transfer.node import Node

_log = logging.getLogger("kvelastic.transfer")
PUBLISH_S: Final = 0.5


class LinkBoard:
    """For one node. Made by any thread; the rest in the node's, but for `close`."""

    def __init__(self, node: Node) -> None:
        """Make the file, and remove what dead processes have left; never raises."""
        self._node = node
        self._answered = 0
        self._has_warned = False
        self._started_ns = time.time_ns()
        self._file: BoardFile | None = None
        reap()
        try:
            self._file = BoardFile.create(link_board_name(node.start), LAYOUT)
            atexit.register(self.close)
            self.publish()
        except (KvelasticError, OSError) as error:
            self._warn(error)

    def refresh(self) -> None:
        """Do what was asked, and show what is so now."""
        try:
            self._serve()
            self.publish()
        except (KvelasticError, OSError) as error:
            self._warn(error)

    def publish(self) -> None:
        """Show what is so now. Raises `SegmentError`."""
        if self._file is not None:
            figures = self._figures()
            self._file.publish(lambda number: board_format.pack_snapshot(number, figures))

    def close(self) -> None:
        """Remove the file. Repeatable."""
        atexit.unregister(self.close)
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _warn(self, error: Exception) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning("kvctl links does not see node %d: %s", self._node.node_id, error)

    # --- what operators ask --------------------------------------------------------------------

    def _serve(self) -> None:
        file = self._file  # `close` may come meanwhile
        if file is None:
            return
        pending = file.pending(board_format.unpack_request, self._answered)
        for revision, request in pending.items():
            self._answered = revision
            answer = self._carried_out(revision, request)
            self.publish()  # first: who has the answer sees what came of it
            file.answer(revision, board_format.pack_answer(answer))

    def _carried_out(self, revision: int, request: LinkRequest) -> LinkAnswer:
        if not self._node.cut(request.link, request.peer_id):
            return LinkAnswer(revision, "refused", "that link has ended before")
        return LinkAnswer(revision, "done")

    # --- figures -------------------------------------------------------------------------------

    def _figures(self) -> NodeFigures:
        node = self._node
        ranges, registered_bytes = node.ranges.sizes
        leases = node.leases.by_owner()
        links = [
            _link_figures(link, leases.get(link.connection, 0), is_standing=True)
            for link in node.links[: board_format.MOST_LINKS]
        ]
        ended = [
            _link_figures(link, 0, is_standing=False)
            for link in node.ended_links[-board_format.MOST_ENDED :]
        ]
        return NodeFigures(
            node_id=node.node_id,
            pid=os.getpid(),
            role=text_of(node.role),
            addresses=tuple(
                text_of(address, board_format.MOST_ADDRESS) for address in node.addresses[:8]
            ),
            data_port=node.streams.port,
            published_realtime_ns=time.time_ns(),
            started_realtime_ns=self._started_ns,
            answered_revision=self._answered,
            ranges=ranges,
            registered_bytes=registered_bytes,
            leases=sum(leases.values()),
            leases_expired=node.leases.expired,
            copies_lost=node.leases.lost,
            strangers_refused=node.strangers_refused,
            links=(*links, *ended),
        )


def _link_figures(link: Link, leases: int, *, is_standing: bool) -> LinkFigures:
    peer = link.connection.peer
    way: Way = "tcp"
    if peer.uid is not None:
        way = "memory" if link.reads_memory else "unix stream"
    return LinkFigures(
        number=link.number,
        peer_id=link.peer_id,
        peer=text_of(peer),
        side="client" if link.is_client else "server",
        way=way,
        state="linked" if is_standing else "ended",
        reason="" if is_standing else link.end_reason,
        since_realtime_ns=round(link.since_s * 1e9),
        pulled_bytes=link.pulled_bytes,
        pushed_bytes=link.pushed_bytes,
        peer_pulled_bytes=link.peer_pulled_bytes,
        peer_pushed_bytes=link.peer_pushed_bytes,
        leases=leases,
        retries=link.retries,
        failures=link.failures,
    )
