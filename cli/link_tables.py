"""What `kvctl links` prints: a table of links, and a sentence for each node below it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from kvelastic.cli.columns import aligned
from kvelastic.instance.row import printable
from kvelastic.sizes import format_size

if TYPE_CHECKING:
    from kvelastic.link_status import LinkFigures, NodeFigures

NOTHING: Final = "No process here has links: nothing uses kvelastic.transfer or its datadist."
_HEADINGS: Final = (
    "NODE", "PID", "PEER", "AT", "SIDE", "WAY", "STATE", "IN", "OUT", "LEASES", "RETRIES",
    "FAILURES", "SINCE",
)  # fmt: skip
_LEFT: Final = {0, 1, 2, 3, 4, 5, 6}
_STALE_S: Final = 5.0
"""A node says something each half second, unless it is stopped or has no time to."""


def table(nodes: Sequence[NodeFigures]) -> str:
    """One line a link, those that have ended last, and what is to be said of each node."""
    if not nodes:
        return NOTHING
    lines = [_HEADINGS] + [_cells(node, link) for node in nodes for link in node.links]
    return "\n".join([*aligned(lines, _LEFT), "", *map(_sentence, nodes)])


def _cells(node: NodeFigures, link: LinkFigures) -> tuple[str, ...]:
    state = link.state if not link.reason else f"{link.state}: {printable(link.reason)}"
    return (
        str(node.node_id),
        str(node.pid),
        str(link.peer_id),
        printable(link.peer),
        link.side,
        link.way,
        state,
        format_size(link.in_bytes),
        format_size(link.out_bytes),
        str(link.leases),
        str(link.retries),
        str(link.failures),
        _ago(link.since_realtime_ns),
    )


def _sentence(node: NodeFigures) -> str:
    role = f", {printable(node.role)}" if node.role else ""
    where = ", ".join(map(printable, node.addresses)) or "nowhere"
    data = f", and takes data at port {node.data_port}" if node.data_port else ""
    standing = _counted(node.standing_links, "link")
    reached = f"{format_size(node.registered_bytes)} in {_counted(node.ranges, 'range')}"
    is_stale = time.time() - node.published_realtime_ns / 1e9 > _STALE_S
    stale = (
        f" It has said nothing for {_ago(node.published_realtime_ns)}: it is stopped, or very busy."
        if is_stale
        else ""
    )
    return (
        f"node {node.node_id} (process {node.pid}{role}) listens at {where}{data};"
        f" {standing}; peers reach {reached};"
        f" {_counted(node.leases, 'lease')} in force, {node.leases_expired} ended by their time;"
        f" {_counted(node.copies_lost, 'copy', 'copies')} lost;"
        f" {_counted(node.strangers_refused, 'stranger')} not let in.{stale}"
    )


def _counted(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


def _ago(realtime_ns: int) -> str:
    """A short time: what it is for is which of them is new."""
    seconds = max(time.time() - realtime_ns / 1e9, 0)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
