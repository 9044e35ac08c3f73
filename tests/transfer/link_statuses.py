"""Status files of links for tests: made by hand, and of nodes whose threads do not read them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from click.testing import CliRunner, Result
from linked import address_of
from waiting import DEADLINE_S

from kvelastic.cli.kvctl import main
from kvelastic.shared import link_status
from kvelastic.shared.link_status import KIND, LinkAck, LinkRequest, LinkStatus, NodeStatus
from kvelastic.shared.segment_listing import link_status_name
from kvelastic.shared.status_file import StatusFile
from kvelastic.transfer import Link, Node

ONE, TWO = 7_100_000_001, 7_100_000_002  # other tests' nodes are in the same folder
LINK = LinkStatus(
    1, TWO, "process 1", "client", "memory", "linked", "", 0, 0, 0, 0, 0, 0, 0, 0
)  # fmt: skip
NODE = NodeStatus(ONE, 1, "MIX", (), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, (LINK,))
MOST = (1 << 63) - 1
File = StatusFile[NodeStatus, LinkRequest, LinkAck]


def counts(each: int) -> tuple[int, int, int, int, int, int, int, int, int]:
    """The counts of a node that lie between its data port and its links."""
    return (each,) * 9


def kvctl(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["links", *arguments])


@contextmanager
def status_file(node: NodeStatus = NODE, start: bytes | None = None) -> Iterator[File]:
    """A status file of this process that says what it likes."""
    made = StatusFile.create(link_status_name(start or os.urandom(16)), KIND)
    try:
        made.publish(node)
        yield made
    finally:
        made.close()


def shown() -> list[NodeStatus]:
    return [node for node in link_status.nodes() if node.node_id in {ONE, TWO}]


@contextmanager
def unattended(node: Node) -> Iterator[Callable[[], None]]:
    """The node's own thread does not look at its status file; what is answered does."""
    looked, begun = node._status, threading.Event()

    class Idle:
        def refresh(self) -> None:
            begun.set()

        def close(self) -> None:
            looked.close()

    node._status = Idle()  # type: ignore[assignment]
    assert begun.wait(DEADLINE_S)  # so that no look is under way any more
    try:
        yield looked.refresh
    finally:
        node._status = looked


@contextmanager
def pair(folder: Path) -> Iterator[tuple[Node, Node, Link]]:
    address = address_of("unix", folder)
    with Node(ONE, listen=[address]) as owner, Node(TWO) as reader:
        yield owner, reader, reader.link(address, timeout_s=DEADLINE_S)


def figures(node: Node) -> NodeStatus:
    (found,) = [one for one in link_status.nodes() if one.node_id == node.node_id]
    return found
