"""Operators of links: several at once, stopped, lied to, without room or descriptors."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from link_statuses import LINK, NODE, ONE, TWO, figures, kvctl, pair, shown, unattended
from linked import address_of
from processes import LineProgram, run_python
from waiting import DEADLINE_S, wait_until

from kvelastic.cli.commands.links import table
from kvelastic.errors import SegmentBusyError, SegmentError
from kvelastic.shared import link_status
from kvelastic.shared.link_status import KIND, HeldStatus, LinkAck, LinkRequest
from kvelastic.shared.segment_listing import SHM_DIR, link_status_name, reap
from kvelastic.shared.status_file import CELL_BYTES, MOST_REVISION, RING
from kvelastic.transfer import Node

pytestmark = pytest.mark.slow


# --- requests -------------------------------------------------------------------------------------


@pytest.mark.parametrize("revision", [RING + 1, 1 << 40, MOST_REVISION - 1])
@pytest.mark.parametrize("where", ["request", "answer"])
def test_forged_revision_does_not_block_requests(where: str, revision: int, tmp_path: Path) -> None:
    with pair(tmp_path) as (owner, _, _), unattended(owner) as look:
        look()
        path = SHM_DIR / link_status_name(owner.start)
        with path.open("r+b") as file:
            if where == "request":
                cell = KIND.pack(revision, LinkRequest("cut", 99, TWO))
                os.pwrite(file.fileno(), cell, KIND.request_at(revision))
            else:
                cell = KIND.pack(revision, LinkAck(revision, "done"))
                os.pwrite(file.fileno(), cell, KIND.answer_at(revision))
        look()
        node = figures(owner)
        assert node.answered_revision == 0
        (standing,) = node.links
        if where == "answer" and revision % RING == 1:
            # It stands where the answer was to come, which so seems lost before the node looks.
            assert link_status.cut(node, standing, DEADLINE_S) is None
        else:
            with ThreadPoolExecutor(1) as operator:
                asked = operator.submit(link_status.cut, node, standing, DEADLINE_S)
                while not asked.done():
                    look()
                assert asked.result() == LinkAck(1, "done")
        look()
        assert owner.links == ()
        assert figures(owner).answered_revision == 1


def test_noise_in_the_ring_is_ignored(tmp_path: Path) -> None:
    with pair(tmp_path) as (owner, _, link), unattended(owner) as look:
        look()
        with (SHM_DIR / link_status_name(owner.start)).open("r+b") as file:
            os.pwrite(file.fileno(), os.urandom(2 * RING * CELL_BYTES), KIND.request_at(0))
        look()
        link.check(timeout_s=DEADLINE_S)
        assert figures(owner).answered_revision == 0


def test_only_one_of_several_operators_cuts(tmp_path: Path) -> None:
    with pair(tmp_path) as (owner, _, _), unattended(owner) as look:
        look()
        node = figures(owner)
        (standing,) = node.links
        with ThreadPoolExecutor(8) as operators:
            asked = [
                operators.submit(link_status.cut, node, standing, DEADLINE_S) for _ in range(8)
            ]
            while not all(one.done() for one in asked):
                look()
        answers = [one.result() for one in asked]
        assert Counter(answer.state for answer in answers if answer) == {"done": 1, "refused": 7}
        assert sorted(answer.revision for answer in answers if answer) == list(range(1, 9))


def test_stopped_operator_does_not_block_others(tmp_path: Path) -> None:
    with pair(tmp_path) as (owner, _, link):
        wait_until_shown(ONE)
        status_path = SHM_DIR / link_status_name(owner.start)
        with status_path.open("rb") as stopped:
            fcntl.flock(stopped, fcntl.LOCK_EX)
            result = kvctl("cut", str(ONE), str(TWO))
            assert result.exit_code == 1
            assert "a kvctl that was stopped?" in result.output
        link.check(timeout_s=DEADLINE_S)
        assert kvctl("cut", str(ONE), str(TWO), "--wait", str(DEADLINE_S)).exit_code == 0


# --- nodes that are stopped, or dead --------------------------------------------------------------


PROGRAM = """
import sys
from kvelastic.messages import parse_address
from kvelastic.transfer import Node
node = Node(int(sys.argv[1]))
node.link(parse_address(sys.argv[2]), 60)
print(node.start.hex(), flush=True)
sys.stdin.read()
"""


@contextmanager
def node_process(owner: Node) -> Iterator[LineProgram]:
    with LineProgram("-c", PROGRAM, str(TWO), str(owner.addresses[0])) as process:
        process.read()
        yield process
    reap()


def wait_until_shown(node_id: int) -> None:
    wait_until(
        lambda: any(node.node_id == node_id and node.links for node in link_status.nodes()),
        f"the status file of node {node_id} shows no link",
    )


def test_stopped_node_is_shown_and_cuts_after_resume(tmp_path: Path) -> None:
    ended = threading.Event()
    with (
        Node(ONE, listen=[address_of("unix", tmp_path)], on_end=lambda _: ended.set()) as owner,
        node_process(owner) as process,
    ):
        wait_until_shown(TWO)
        process.stop()
        assert kvctl(str(TWO)).exit_code == 0
        result = kvctl("cut", str(TWO), str(ONE), "--wait", "0.1")
        assert result.exit_code == 3
        assert "has not answered yet; the request stays" in result.output
        answer = json.loads(kvctl("cut", str(TWO), str(ONE), "--wait", "0.1", "--json").stdout)
        assert answer["state"] == "pending"
        assert not ended.is_set()
        process.go_on()
        assert ended.wait(DEADLINE_S)


def test_node_dying_during_a_request_is_reported(tmp_path: Path) -> None:
    with Node(ONE, listen=[address_of("unix", tmp_path)]) as owner, node_process(owner) as process:
        wait_until_shown(TWO)
        process.stop()
        with ThreadPoolExecutor(1) as operator:
            asked = operator.submit(kvctl, "cut", str(TWO), str(ONE), "--wait", str(DEADLINE_S))
            process.kill()
            result = asked.result()
        assert result.exit_code == 1
        ends = ("have ended", "has gone", "no node is called")  # by how far the command had come
        assert any(end in result.output for end in ends)


def test_silence_of_a_node_is_shown() -> None:
    now_ns = time.time_ns()
    fresh = msgspec.structs.replace(NODE, published_realtime_ns=now_ns)
    assert "said nothing" not in table([fresh])
    old = msgspec.structs.replace(NODE, published_realtime_ns=now_ns - 90 * 10**9)
    assert "It has said nothing for 2 min: it is stopped, or very busy." in table([old])


def test_counts_of_one_are_singular() -> None:
    text = table([msgspec.structs.replace(NODE, ranges=1, leases=1, copies_lost=1,
                                          strangers_refused=1)])  # fmt: skip
    for said in (
        "1 link;",
        "1 range;",
        "1 lease in force",
        "1 copy lost",
        "1 unauthenticated connection refused",
    ):
        assert said in text
    none = table([msgspec.structs.replace(NODE, links=())])
    for said in ("0 links;", "0 ranges;", "0 leases", "0 copies", "0 unauthenticated connections"):
        assert said in none


def test_held_memory_is_shown() -> None:
    held = (HeldStatus("cmpl-1", 1 << 20, 41_000),)
    node = msgspec.structs.replace(NODE, held_requests=1, held_bytes=1 << 20, held=held)
    said = (
        " 1.00 MiB of 1 finished request are held until a decode engine has read them; the first"
        " hold, of cmpl-1, ends in 41 s at the latest."
    )
    late = " 2 holds ended because no decode engine had read the blocks in time."
    assert said in table([node])
    assert late not in table([node])
    assert said + late in table([msgspec.structs.replace(node, holds_expired=2)])
    assert late in table([msgspec.structs.replace(NODE, holds_expired=2)])
    assert "held" not in table([NODE])


# --- no room, no descriptors ----------------------------------------------------------------------


LINKED = """
import logging, sys
logging.basicConfig(level=logging.WARNING)
from kvelastic.shared import link_status
from kvelastic.messages import parse_address
from kvelastic.transfer import Node
address = parse_address("unix://" + sys.argv[1] + "/s")
with Node(1, listen=[address]) as owner, Node(2) as reader:
    link = reader.link(address, 60)
    link.check(300)
    owner._endpoint.run_soon(owner._status.refresh)
    link.check(300)
    print([node.node_id for node in link_status.nodes() if node.node_id in (1, 2)])
"""


@pytest.mark.parametrize("room_kib", [0, 64])
def test_full_shared_memory_only_hides_the_nodes(room_kib: int, tmp_path: Path) -> None:
    private = ("unshare", "-m", "--propagation", "private", "sh", "-c")
    mount = f"mount -t tmpfs -o size={room_kib or 4}k,mode=1777 tmpfs /dev/shm"
    fill = " && head -c 4096 /dev/zero >/dev/shm/full" if not room_kib else ""
    tried = subprocess.run([*private, mount], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"mounts of its own are not to be had: {tried.stderr.strip()}")
    script = f'{mount}{fill} && exec "$@"'
    ended = run_python(
        *private[1:], script, "sh", sys.executable, "-c", LINKED, tmp_path, python=private[0]
    )
    assert ended.stdout.strip() == "[]"
    assert ended.stderr.count("kvctl links does not see node") == 2  # once each


def test_descriptor_shortage_raises_instead_of_an_empty_list(tmp_path: Path) -> None:
    with Node(ONE, listen=[address_of("unix", tmp_path)]) as owner:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        lowest_free = os.dup(0)
        os.close(lowest_free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
        try:
            with pytest.raises(SegmentError):
                link_status.nodes()
            with pytest.raises(SegmentError):
                link_status.cut(NODE, LINK, wait_s=0)
            owner._status.refresh()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert [node.node_id for node in shown()] == [ONE]


def test_unanswered_requests_are_bounded(tmp_path: Path) -> None:
    with pair(tmp_path) as (owner, _, _), unattended(owner) as look:
        look()
        node = figures(owner)
        (standing,) = node.links
        for _ in range(RING):
            assert link_status.cut(node, standing, wait_s=0) is None
        with pytest.raises(SegmentBusyError):
            link_status.cut(node, standing, wait_s=0)
        look()
        assert figures(owner).answered_revision == RING
        assert link_status.cut(node, standing, wait_s=0) is None
