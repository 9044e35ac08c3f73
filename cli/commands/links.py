"""`kvctl links`: shows the links over which processes copy KV, and cuts a link.

    kvctl links [NODE] [--json]               show
    kvctl links cut NODE PEER [--pid PID]     end a link

A node need not be an instance. It is found by its status file.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import click

from kvelastic.cli.arguments import offered, wait_option
from kvelastic.cli.rendering.columns import aligned
from kvelastic.cli.rendering.exit_codes import fail, print_pending
from kvelastic.cli.rendering.printing import print_json, print_lines
from kvelastic.cli.rendering.show_group import ShowingGroup
from kvelastic.instance.row import printable
from kvelastic.units import format_size

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from kvelastic.shared.link_status import LinkStatus, NodeStatus

_GLANCE_S: Final = 2.0
"""Maximum wait for an answer if --wait is not given."""


class NodeIdType(click.ParamType):  # type: ignore[type-arg]
    """The id of a node: 0 to 2**64-1."""

    name = "node"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        """Return the number; anything else is a usage error (exit code 2)."""
        text = str(value)
        if not (text.isascii() and text.isdigit() and int(text[:21]) < 1 << 64):
            self.fail(f"{text!r} is no id of a node; `kvctl links` shows them", param, ctx)
        return int(text)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Return the existing node ids that begin with the typed text."""
        from kvelastic.shared.link_status import nodes

        return offered(dict.fromkeys(str(node.node_id) for node in nodes()), incomplete)


_json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print objects (docs/kvctl.md)."
)


@click.group("links", cls=ShowingGroup, short_help="Show or cut links between processes.")
def links_command() -> None:
    """Show the links of all nodes, or of NODE; or cut one.

    A node is a process whose memory others may copy (docs/transfer.md, docs/datadist.md).
    """


@links_command.command("show")
@click.argument("node_id", metavar="[NODE]", type=NodeIdType(), required=False)
@_json_option
def show_command(node_id: int | None, as_json: bool) -> None:
    """Show every link, and the bytes that went over it."""
    from kvelastic.shared.link_status import look, object_of

    if node_id is None:
        found, problems = look()
        for problem in problems:
            print_lines(f"Warning: a node is not shown. {problem}", err=True)
    else:
        found = _nodes_of(node_id)
    if as_json:
        print_json([object_of(node) for node in found])
    else:
        print_lines(*table(found).split("\n"))


@links_command.command("cut")
@click.argument("node_id", metavar="NODE", type=NodeIdType())
@click.argument("peer_id", metavar="PEER", type=NodeIdType())
@click.option("--pid", type=int, help="Process of the node, if several have its id.")
@wait_option("it is done")
@_json_option
def cut_command(
    node_id: int, peer_id: int, pid: int | None, wait_s: float | None, as_json: bool
) -> None:
    """End the link between NODE and PEER at once, on both sides.

    Copies over it fail, and their pins end. Either side may link again.
    """
    from kvelastic.shared.link_status import cut

    node = _node_of(node_id, pid)
    link = _link_of(node, peer_id)
    answer = cut(node, link, _GLANCE_S if wait_s is None else wait_s)
    if as_json:
        state = "pending" if answer is None else answer.state
        reason = "" if answer is None else answer.reason
        found = {"node_id": node_id, "pid": node.pid, "peer_id": peer_id}
        print_json({**found, "state": state, "reason": reason})
    if answer is None:
        print_pending(f"node {node_id}", wait_s, as_json=as_json)
    elif answer.state == "refused":
        fail(f"node {node_id} has not cut it: {answer.reason}.")
    elif not as_json:
        print_lines(f"node {node_id}: the link with node {peer_id} has ended.")


def _nodes_of(node_id: int) -> list[NodeStatus]:
    from kvelastic.shared.link_status import nodes

    every = nodes()
    found = [node for node in every if node.node_id == node_id]
    if not found:
        known = ", ".join(dict.fromkeys(str(node.node_id) for node in every)) or "none"
        fail(f"no node is called {node_id} (there are: {known}).")
    return found


def _node_of(node_id: int, pid: int | None) -> NodeStatus:
    found = [node for node in _nodes_of(node_id) if pid in {None, node.pid}]
    if not found:
        fail(f"no node {node_id} is of process {pid}.")
    if len(found) > 1:
        pids = ", ".join(str(node.pid) for node in found)
        fail(f"several nodes are called {node_id}: say which by --pid ({pids}).")
    return found[0]


def _link_of(node: NodeStatus, peer_id: int) -> LinkStatus:
    standing = {link.peer_id: link for link in node.links if link.state == "linked"}
    if peer_id not in standing:
        known = ", ".join(map(str, standing)) or "none"
        fail(f"node {node.node_id} has no link with node {peer_id} (it is linked with: {known}).")
    return standing[peer_id]


NOTHING: Final = "No process here has links: nothing uses kvelastic.transfer or its datadist."
_HEADINGS: Final = (
    "NODE", "PID", "PEER", "AT", "SIDE", "WAY", "STATE", "IN", "OUT", "LEASES", "RETRIES",
    "FAILURES", "SINCE",
)  # fmt: skip
_LEFT: Final = {0, 1, 2, 3, 4, 5, 6}
_STALE_S: Final = 5.0
"""Age from which a status is stale. A node publishes every 0.5 s unless stopped or overloaded."""


def table(nodes: Sequence[NodeStatus]) -> str:
    """Return one line per link, ended links last, and the notes on each node."""
    if not nodes:
        return NOTHING
    lines = [_HEADINGS] + [_cells(node, link) for node in nodes for link in node.links]
    return "\n".join([*aligned(lines, _LEFT), "", *map(_sentence, nodes)])


def _cells(node: NodeStatus, link: LinkStatus) -> tuple[str, ...]:
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


def _sentence(node: NodeStatus) -> str:
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
    held = f" {printable(node.holds_in_words)}" if node.holds_in_words else ""
    return (
        f"node {node.node_id} (process {node.pid}{role}) listens at {where}{data};"
        f" {standing}; peers reach {reached};"
        f" {_counted(node.leases, 'lease')} in force, {node.leases_expired} ended by their time;"
        f" {_counted(node.copies_lost, 'copy', 'copies')} lost;"
        f" {_counted(node.strangers_refused, 'unauthenticated connection')} refused."
        f"{held}{stale}"
    )


def _counted(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


def _ago(realtime_ns: int) -> str:
    """Return a short age, to tell new links from old ones."""
    seconds = max(time.time() - realtime_ns / 1e9, 0)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
