"""What a node shows of its links, what operators ask of it, and what is left when it is killed."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from link_statuses import counts
from linked import Memory, address_of, linked, secret_file
from metrics_text import render
from processes import LineProgram
from prometheus_client.parser import text_string_to_metric_families
from waiting import DEADLINE_S

from kvelastic.cli.kvctl import main
from kvelastic.errors import (
    ChannelClosedError,
    KvelasticError,
    SegmentNotFoundError,
)
from kvelastic.shared import link_status
from kvelastic.shared.link_status import (
    KIND,
    MOST_ENDED,
    MOST_HELD,
    MOST_LINKS,
    HeldStatus,
    LinkAck,
    LinkRequest,
    LinkStatus,
    NodeStatus,
    text_of,
)
from kvelastic.shared.segment_listing import SHM_DIR, link_status_name, reap
from kvelastic.transfer import Link, Node

ONE, TWO = 7_000_000_001, 7_000_000_002  # other tests' nodes are in the same folder


@pytest.fixture(params=["memory", "unix stream", "tcp"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def pair(kind: str, tmp_path: Path) -> Iterator[tuple[Node, Node, Link]]:
    secret = secret_file(tmp_path)
    with (
        Node(ONE, listen=[address_of(kind, tmp_path)], secret=secret, role="PROMPT") as owner,
        Node(TWO, secret=secret) as reader,
        linked(kind, owner, reader) as link,
    ):
        yield owner, reader, link


def wait_for_publication(node: Node) -> None:
    """The status file has been written, in the node's own thread."""
    written = threading.Event()

    def write() -> None:
        node._status.publish()
        written.set()

    node._endpoint.run_soon(write)
    assert written.wait(DEADLINE_S)


def shown(node: Node) -> NodeStatus:
    """What stands on the node's status_file, written anew."""
    wait_for_publication(node)
    (found,) = [one for one in link_status.nodes() if one.node_id == node.node_id]
    return found


def kvctl(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(main, ["links", *arguments])
    assert result.exit_code == code, result.output
    return result.output


def kvctl_json(*arguments: str) -> Any:
    return json.loads(kvctl(*arguments, "--json"))


def test_both_ends_show_bytes_of_a_link(kind: str, pair: tuple[Node, Node, Link]) -> None:
    owner, reader, link = pair
    theirs, ours = Memory(os.urandom(3000)), Memory(bytes(3000))
    owner.register(theirs.address, theirs.size)
    for _ in range(3):
        link.pull([theirs.piece(0, 1000)], [ours.piece(0, 1000)], timeout_s=DEADLINE_S)
    link.push([ours.piece(0, 500)], [theirs.piece(0, 500)], timeout_s=DEADLINE_S)
    with pytest.raises(KvelasticError):
        link.pull([(4096, 1)], [ours.piece(0, 1)], timeout_s=DEADLINE_S)
    at_reader, at_owner = shown(reader), shown(owner)
    (one,), (other,) = at_reader.links, at_owner.links
    assert (one.peer_id, one.side, one.way, one.state) == (ONE, "client", kind, "linked")
    assert (one.pulled_bytes, one.pushed_bytes, one.failures) == (3000, 500, 1)
    assert (one.in_bytes, one.out_bytes) == (3000, 500)
    assert (other.peer_id, other.side, other.state) == (TWO, "server", "linked")
    assert (other.peer_pulled_bytes, other.peer_pushed_bytes) == (3000, 500)
    assert (other.in_bytes, other.out_bytes) == (500, 3000)
    assert (at_owner.role, at_owner.pid, at_owner.registered_bytes) == ("PROMPT", os.getpid(), 3000)
    assert at_owner.addresses == (str(owner.addresses[0]),)
    assert (at_owner.data_port > 0) is (kind == "tcp")
    assert at_owner.leases == 0


def test_lease_is_shown_with_its_owner(tmp_path: Path) -> None:
    theirs, ours = Memory(b"x" * 100), Memory(bytes(100))
    address = address_of("unix", tmp_path)
    with Node(ONE, listen=[address]) as owner, Node(TWO) as reader:
        owner.register(theirs.address, theirs.size)
        link = reader.link(address, timeout_s=DEADLINE_S)
        settle = link.settle
        seen = []

        def show_and_settle(lease: int, checksum: int | None, deadline_s: float) -> None:
            seen.append(shown(owner))
            settle(lease, checksum, deadline_s)

        link.settle = show_and_settle  # type: ignore[method-assign]
        link.pull([theirs.piece()], [ours.piece()], timeout_s=DEADLINE_S)
        assert [(node.leases, node.links[0].leases) for node in seen] == [(1, 1)]
        assert shown(owner).links[0].leases == 0


def test_ended_links_are_shown_with_the_reason(tmp_path: Path) -> None:
    address = address_of("unix", tmp_path)
    with Node(ONE, listen=[address]) as owner:
        ended = threading.Event()
        owner._on_end = lambda _: ended.set()
        with Node(TWO) as reader:
            reader.link(address, timeout_s=DEADLINE_S).unlink(timeout_s=DEADLINE_S)
            assert ended.wait(DEADLINE_S)
            (link,) = shown(owner).links
            assert (link.state, link.reason) == ("ended", "unlinked")
            ended.clear()
            reader.link(address, timeout_s=DEADLINE_S)
            (link,) = shown(owner).links  # the same peer: only the new one
            assert (link.state, link.reason) == ("linked", "")
        assert ended.wait(DEADLINE_S)
        *_, link = shown(owner).links
        assert (link.state, link.reason) == ("ended", "CHANNEL_CLOSED")


@pytest.mark.slow
def test_kvctl_links_shows_and_cuts(kind: str, pair: tuple[Node, Node, Link]) -> None:
    owner, reader, link = pair
    theirs, ours = Memory(b"x" * 100), Memory(bytes(100))
    owner.register(theirs.address, theirs.size)
    link.pull([theirs.piece()], [ours.piece()], timeout_s=DEADLINE_S)
    for each in (owner, reader):
        wait_for_publication(each)
    text = kvctl()
    assert f"{ONE}" in text
    assert "PROMPT" in text
    (node,) = kvctl_json(str(TWO))
    (one,) = node["links"]
    assert (one["peer_id"], one["way"], one["in_bytes"]) == (ONE, kind, 100)
    ended = threading.Semaphore(0)
    owner._on_end = reader._on_end = lambda _: ended.release()
    answer = kvctl_json("cut", str(ONE), str(TWO), "--wait", str(DEADLINE_S))
    assert (answer["state"], answer["reason"]) == ("done", "")
    for _ in (owner, reader):
        assert ended.acquire(timeout=DEADLINE_S)
    assert owner.links == ()
    with pytest.raises(ChannelClosedError):
        link.pull([theirs.piece()], [ours.piece()], timeout_s=DEADLINE_S)
    assert "has no link with" in kvctl("cut", str(ONE), str(TWO), code=1)
    again = reader.link(owner.addresses[0], timeout_s=DEADLINE_S)
    again.pull([theirs.piece()], [ours.piece()], timeout_s=DEADLINE_S)
    wait_for_publication(owner)
    assert "has ended" in kvctl("cut", str(ONE), str(TWO), "--pid", str(os.getpid()))


def test_kvctl_links_reports_invalid_arguments(tmp_path: Path) -> None:
    with Node(ONE, listen=[address_of("unix", tmp_path)]), Node(ONE):
        assert "say which by --pid" in kvctl("cut", str(ONE), str(TWO), code=1)
        assert "no node is called 12345678901" in kvctl("12345678901", code=1)
        assert "no id of a node" in kvctl("x", code=2)
        assert "no id of a node" in kvctl(str(1 << 64), code=2)
        assert "is of process 1." in kvctl("cut", str(ONE), str(TWO), "--pid", "1", code=1)
        assert kvctl("--help").startswith("Usage: ")


@pytest.mark.slow
def test_cut_request_for_an_older_link_is_refused(tmp_path: Path) -> None:
    address = address_of("unix", tmp_path)
    with Node(ONE, listen=[address]) as owner, Node(TWO) as reader:
        reader.link(address, timeout_s=DEADLINE_S)
        node = shown(owner)
        (old,) = node.links
        reader.links[0].unlink(timeout_s=DEADLINE_S)
        new = reader.link(address, timeout_s=DEADLINE_S)
        answer = link_status.cut(node, old, wait_s=DEADLINE_S)
        assert answer is not None
        assert (answer.state, answer.reason) == ("refused", "that link has ended before")
        new.check(timeout_s=DEADLINE_S)
    with pytest.raises(SegmentNotFoundError, match="has gone"):
        link_status.cut(node, old, wait_s=DEADLINE_S)


def test_node_and_link_metrics(tmp_path: Path) -> None:
    address = address_of("unix", tmp_path)
    theirs, ours = Memory(b"x" * 100), Memory(bytes(100))
    with Node(ONE, listen=[address], role="PROMPT") as owner, Node(TWO) as reader:
        owner.register(theirs.address, theirs.size)
        link = reader.link(address, timeout_s=DEADLINE_S)
        link.pull([theirs.piece()], [ours.piece()], timeout_s=DEADLINE_S)
        found = {
            (sample.name, sample.labels["node"], sample.labels.get("peer")): sample.value
            for family in text_string_to_metric_families(
                render([], [], {}, [shown(owner), shown(reader)])
            )
            for sample in family.samples
            if "node" in sample.labels
        }
    assert found["kvelastic_node_links", str(ONE), None] == 1
    assert found["kvelastic_node_registered_bytes", str(ONE), None] == 100
    assert found["kvelastic_link_peer_pulled_bytes_total", str(ONE), str(TWO)] == 100
    assert found["kvelastic_link_pulled_bytes_total", str(TWO), str(ONE)] == 100
    assert found["kvelastic_link_up", str(TWO), str(ONE)] == 1


# --- the file -------------------------------------------------------------------------------------


def test_status_file_is_private_and_removed_on_close(tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        node = Node(ONE, listen=[address_of("unix", tmp_path)])
    finally:
        os.umask(umask)
    path = SHM_DIR / link_status_name(node.start)
    assert path.stat().st_mode & 0o777 == 0o600
    child = os.fork()
    if child == 0:
        node.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert path.exists()
    path.chmod(0o644)
    assert ONE not in [one.node_id for one in link_status.nodes()]
    path.chmod(0o600)
    assert ONE in [one.node_id for one in link_status.nodes()]
    node.close()
    node.close()
    assert not path.exists()


def test_status_file_of_a_killed_node_is_removed() -> None:
    program = """
import sys
from kvelastic.transfer import Node
node = Node(int(sys.argv[1]))
print(node.start.hex(), flush=True)
sys.stdin.read()
"""
    with LineProgram("-c", program, str(ONE)) as process:
        path = SHM_DIR / link_status_name(bytes.fromhex(process.read()))
        process.stop()
        reap()
        assert ONE in [one.node_id for one in link_status.nodes()]  # stopped is not dead
    assert path.exists()
    assert ONE not in [one.node_id for one in link_status.nodes()]
    reap()
    assert not path.exists()


def test_node_without_status_file_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    address = address_of("unix", tmp_path)
    with Node(ONE, listen=[address]) as owner, Node(TWO) as reader:
        reader.link(address, timeout_s=DEADLINE_S).check(timeout_s=DEADLINE_S)
        owner._status.refresh()
        assert ONE not in [one.node_id for one in link_status.nodes()]


FULL = LinkStatus(
    (1 << 63) - 1, (1 << 64) - 1, "p" * 64, "client", "unix stream", "linked", "r" * 64,
    *[(1 << 63) - 1] * 8,
)  # fmt: skip
NODE = NodeStatus(
    (1 << 64) - 1, 1, "r" * 64, ("a" * 128,) * 8, 65535, *counts((1 << 63) - 1),
    (FULL,) * (MOST_LINKS + MOST_ENDED), (1 << 63) - 1, (1 << 63) - 1,
    (HeldStatus("h" * 64, (1 << 63) - 1, (1 << 63) - 1),) * MOST_HELD, (1 << 63) - 1,
)  # fmt: skip


def test_largest_status_fits_the_file() -> None:
    assert KIND.unpack(NodeStatus, KIND.pack(5, NODE)) == (5, NODE)


def test_damaged_cells_are_rejected() -> None:
    snapshot = KIND.pack(1, NODE)
    for at in (0, 8, 12, 5000, len(snapshot) - 1):
        assert (
            KIND.unpack(
                NodeStatus, snapshot[:at] + bytes([snapshot[at] ^ 255]) + snapshot[at + 1 :]
            )
            is None
        )
    assert KIND.unpack(NodeStatus, snapshot[:-1]) is None
    request = KIND.pack(3, LinkRequest("cut", 1, 2))
    assert KIND.unpack(LinkRequest, request) == (3, LinkRequest("cut", 1, 2))
    assert KIND.unpack(LinkAck, request) is None
    answer = LinkAck(3, "refused", "no")
    assert KIND.unpack(LinkAck, KIND.pack(3, answer)) == (3, answer)
    for lie in (
        b"",
        b"\x00" * 12,
        (1 << 62).to_bytes(8, "little") + (5).to_bytes(4, "little") + b"\x93\xa3cut\x01",
        (3).to_bytes(8, "little") + (1 << 31).to_bytes(4, "little"),
        (3).to_bytes(8, "little") + (7).to_bytes(4, "little") + b"\x93\xa3tuc\x01\x02",
        (3).to_bytes(8, "little") + (1).to_bytes(4, "little") + b"\xc1",
    ):
        head, body = lie[:12].ljust(12, b"\0"), lie[12:]
        cell = head + KIND._sum(LinkRequest, head + body) + body
        assert KIND.unpack(LinkRequest, cell) is None
    assert text_of("a\nb\x1b" + "x" * 100) == "a?b?" + "x" * 60
