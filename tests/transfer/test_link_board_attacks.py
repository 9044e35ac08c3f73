"""Boards of links that lie, are damaged, of another version or of somebody else; and operators who
come together, are stopped, or find no room and no descriptors."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result
from linked import address_of
from prometheus_client.parser import text_string_to_metric_families

from kvelastic import link_board, metrics
from kvelastic.board_file import BoardFile
from kvelastic.board_layout import CELL_BYTES, MOST_REVISION, RING
from kvelastic.cli.kvctl import main
from kvelastic.cli.link_tables import table
from kvelastic.errors import SegmentBusyError, SegmentError, SegmentNotFoundError
from kvelastic.link_board_format import (
    LAYOUT,
    LinkAnswer,
    LinkFigures,
    LinkRequest,
    NodeFigures,
    pack_answer,
    pack_request,
    pack_snapshot,
)
from kvelastic.link_rows import object_of
from kvelastic.messages import parse_address
from kvelastic.segment_dir import SHM_DIR, link_board_name, reap
from kvelastic.transfer import Link, Node

ONE, TWO = 7_100_000_001, 7_100_000_002  # other tests' nodes are in the same folder
LINK = LinkFigures(
    1, TWO, "process 1", "client", "memory", "linked", "", 0, 0, 0, 0, 0, 0, 0, 0
)  # fmt: skip
NODE = NodeFigures(ONE, 1, "MIX", (), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, (LINK,))
MOST = (1 << 63) - 1


def kvctl(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["links", *arguments])


@contextmanager
def board(node: NodeFigures = NODE, start: bytes | None = None) -> Iterator[BoardFile]:
    """A board of this process that says what it likes."""
    made = BoardFile.create(link_board_name(start or os.urandom(16)), LAYOUT)
    try:
        made.publish(lambda number: pack_snapshot(number, node))
        yield made
    finally:
        made.close()


def shown() -> list[NodeFigures]:
    return [node for node in link_board.nodes() if node.node_id in {ONE, TWO}]


@contextmanager
def unattended(node: Node) -> Iterator[Callable[[], None]]:
    """The node's own thread does not look at its board; what is answered does."""
    looked, begun = node._board, threading.Event()

    class Idle:
        def refresh(self) -> None:
            begun.set()

        def close(self) -> None:
            looked.close()

    node._board = Idle()  # type: ignore[assignment]
    assert begun.wait(60)  # so that no look is under way any more
    try:
        yield looked.refresh
    finally:
        node._board = looked


# --- lies -----------------------------------------------------------------------------------------


LIES = {
    "far too much": NodeFigures(
        ONE, MOST, "r" * 64, ("a" * 128,) * 8, 65535, *[MOST] * 9,
        (LinkFigures(MOST, (1 << 64) - 1, "p" * 64, "client", "tcp", "linked", "r" * 64,
                     *[MOST] * 8),) * 500,
    ),
    "control characters": NodeFigures(
        ONE, 1, "\x1b[2J\nnode 1", ("tcp://\x1b]0;x\x07:1\r\n",), 0, *[0] * 9,
        (LinkFigures(1, TWO, "\x1b[31m\nx\ufffe", "client", "tcp", "ended", "\u202e\ttuc",
                     *[0] * 8),),
    ),
    "one peer twice": NodeFigures(
        ONE, 1, 'a"b\\c', (), 0, *[0] * 9, (LINK, LINK, msgspec.structs.replace(LINK, number=2))
    ),
    "nothing": NodeFigures(ONE, 0, "", (), 0, *[0] * 9, ()),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_whatever_a_board_says_is_shown_and_does_no_harm(lie: str) -> None:
    with board(LIES[lie]):
        (node,) = shown()
        text = table([node])
        assert all(one.isprintable() for one in text.replace("\n", ""))
        assert len(text.splitlines()) == len(node.links) + 3
        assert json.loads(json.dumps(object_of(node)))["node_id"] == ONE
        for arguments in ((), ("--json",), (str(ONE),)):
            assert kvctl(*arguments).exit_code == 0
        series = Counter(
            (sample.name, tuple(sorted(sample.labels.items())))
            for family in text_string_to_metric_families(metrics.render([], [], {}, [node]))
            for sample in family.samples
        )
        assert max(series.values()) == 1  # Prometheus drops a whole scrape for a series twice


@pytest.mark.parametrize(
    "change",
    [
        {"node_id": -1},
        {"pid": -1},
        {"data_port": 1 << 16},
        {"role": "r" * 65},
        {"addresses": ("a",) * 9},
        {"links": (LINK,) * 529},
        {"links": (msgspec.structs.replace(LINK, peer_id=-1),)},
        {"links": (msgspec.structs.replace(LINK, way="pigeon"),)},
        {"links": (msgspec.structs.replace(LINK, state="up"),)},
        {"leases": 1.5},
    ],
)
def test_what_no_node_says_is_not_shown(change: dict[str, object]) -> None:
    with board(msgspec.structs.replace(NODE, **change)):
        assert shown() == []
        result = kvctl()
        assert result.exit_code == 0
        assert "a node is not shown" in result.stderr
        assert "damaged" in result.stderr


def test_figures_of_the_latest_link_with_a_peer(tmp_path: Path) -> None:
    address, ended = address_of("unix", tmp_path), threading.Semaphore(0)
    with Node(ONE, listen=[address]) as owner, Node(TWO) as reader:
        owner._on_end = lambda _: ended.release()
        for failures in (5, 2):
            link = reader.link(address, timeout_s=60)
            owner.links[0].count(failures=failures)
            link.unlink(timeout_s=60)
            assert ended.acquire(timeout=60)
        text = metrics.render([], [], {}, [owner._board._figures()])
        assert [
            line.split()[-1] for line in text.splitlines() if "link_failures_total{" in line
        ] == ["2.0"]


def test_a_node_whose_address_is_no_text_is_shown_all_the_same(tmp_path: Path) -> None:
    """A folder's name may be any bytes."""
    with Node(ONE, listen=[parse_address(f"unix://{tmp_path}/\udcff\n")]):
        (node,) = shown()
        assert node.addresses == (f"unix://{tmp_path}/??",)


# --- files that are no boards ---------------------------------------------------------------------


def _symlink(path: Path, elsewhere: Path) -> None:
    path.symlink_to(elsewhere)


def _hard_link(path: Path, elsewhere: Path) -> None:
    other = path.with_name(f".kvtest_{os.getpid()}")
    other.write_bytes(elsewhere.read_bytes())
    path.hardlink_to(other)


KINDS: dict[str, Callable[[Path, Path], object]] = {
    "symlink": _symlink,
    "pipe": lambda path, _: os.mkfifo(path, 0o600),
    "folder": lambda path, _: path.mkdir(0o700),
    "hard link": _hard_link,
    "empty": lambda path, _: path.touch(0o600),
    "only a header": lambda path, _: path.write_bytes(LAYOUT.pack_header()),
    "zeros": lambda path, _: path.write_bytes(bytes(LAYOUT.file_bytes)),
    "huge": lambda path, _: os.truncate(path.write_bytes(b"KVLINKS\0") and path, 1 << 40),
    "noise": lambda path, _: path.write_bytes(os.urandom(LAYOUT.file_bytes)),
    "a board": lambda path, elsewhere: path.write_bytes(elsewhere.read_bytes()),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_is_no_board_is_neither_shown_nor_waited_for(kind: str, tmp_path: Path) -> None:
    """Nobody holds it, so it is no node's, whatever stands in it; what a link leads to stays."""
    whole = tmp_path / "whole"
    with board() as made:
        whole.write_bytes(made._path.read_bytes())
    path = SHM_DIR / link_board_name(os.urandom(16))
    try:
        KINDS[kind](path, whole)
        if path.is_file():
            path.chmod(0o600, follow_symlinks=kind == "symlink")
        assert shown() == []
        assert kvctl("--json").exit_code == 0
        with pytest.raises(SegmentNotFoundError):
            link_board.cut(NODE, LINK, wait_s=0)
        reap()
        assert whole.exists()
    finally:
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        path.unlink(missing_ok=True)
        path.with_name(f".kvtest_{os.getpid()}").unlink(missing_ok=True)


def test_another_version_is_said_and_not_read() -> None:
    with board() as made:
        newer = dataclasses.replace(LAYOUT, version=9)
        os.pwrite(made._fd, newer.pack_header(), 0)
        assert shown() == []
        for arguments in ((), ("--json",)):
            result = kvctl(*arguments)
            assert result.exit_code == 0
            assert "is of version 9; this kvelastic reads version 1" in result.stderr
        with pytest.raises(SegmentNotFoundError):
            link_board.cut(NODE, LINK, wait_s=0)
        with board(msgspec.structs.replace(NODE, node_id=TWO)):  # it hides no other one
            assert [node.node_id for node in shown()] == [TWO]


@pytest.mark.parametrize("mode", [0o604, 0o640, 0o666, 0o200])
def test_a_board_that_others_may_touch_is_not_trusted(mode: int) -> None:
    with board() as made:
        made._path.chmod(mode)
        is_root_and_private = os.geteuid() == 0 and mode == 0o200
        assert bool(shown()) is is_root_and_private
        if mode != 0o200:
            assert "not a file of its user alone" in kvctl().stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be two users")
def test_another_users_board_is_seen_by_root_and_by_nobody_else() -> None:
    with board() as made:
        os.chown(made._path, 65534, 65534)
        assert [node.node_id for node in shown()] == [ONE]
        os.chown(made._path, 0, 0)
        program = (
            "import os; from kvelastic import link_board; os.setuid(65534);"
            " print(link_board.look())"
        )
        as_nobody = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
        )
        assert str(ONE) not in as_nobody.stdout
        assert as_nobody.returncode == 0, as_nobody.stderr


@pytest.mark.parametrize("size", [0, 10, 5000, LAYOUT.answer_at(0)])
def test_a_board_that_was_cut_short_or_overwritten_is_whole_again(
    size: int, tmp_path: Path
) -> None:
    with Node(ONE, listen=[address_of("unix", tmp_path)]) as owner, unattended(owner) as look:
        path = SHM_DIR / link_board_name(owner.start)
        look()
        os.truncate(path, size)
        kvctl()
        look()
        assert [node.node_id for node in shown()] == [ONE]
        with path.open("r+b") as file:
            file.write(os.urandom(size))
        kvctl()
        look()
        look()  # both snapshots
        assert [node.node_id for node in shown()] == [ONE]


def test_a_board_whose_name_is_gone_harms_nobody(tmp_path: Path) -> None:
    address = address_of("unix", tmp_path)
    with Node(ONE, listen=[address]) as owner, Node(TWO) as reader, unattended(owner) as look:
        link = reader.link(address, timeout_s=60)
        node, (back,) = owner._board, owner.links
        path = SHM_DIR / link_board_name(owner.start)
        path.unlink()
        path.write_text("somebody else's")
        look()
        assert [each.node_id for each in shown()] == [TWO]
        link.check(timeout_s=60)
        assert back.is_open
        assert node is not None
    assert path.read_text() == "somebody else's"  # the node's end removes only its own
    path.unlink()


# --- requests -------------------------------------------------------------------------------------


@contextmanager
def pair(folder: Path) -> Iterator[tuple[Node, Node, Link]]:
    address = address_of("unix", folder)
    with Node(ONE, listen=[address]) as owner, Node(TWO) as reader:
        yield owner, reader, reader.link(address, timeout_s=60)


def figures(node: Node) -> NodeFigures:
    (found,) = [one for one in link_board.nodes() if one.node_id == node.node_id]
    return found


@pytest.mark.parametrize("revision", [RING + 1, 1 << 40, MOST_REVISION - 1])
@pytest.mark.parametrize("where", ["request", "answer"])
def test_a_revision_that_nobody_gives_is_not_the_end_of_requests(
    where: str, revision: int, tmp_path: Path
) -> None:
    with pair(tmp_path) as (owner, _, _), unattended(owner) as look:
        look()
        path = SHM_DIR / link_board_name(owner.start)
        with path.open("r+b") as file:
            if where == "request":
                cell = pack_request(revision, LinkRequest("cut", 99, TWO))
                os.pwrite(file.fileno(), cell, LAYOUT.request_at(revision))
            else:
                cell = pack_answer(LinkAnswer(revision, "done"))
                os.pwrite(file.fileno(), cell, LAYOUT.answer_at(revision))
        look()
        node = figures(owner)
        assert node.answered_revision == 0
        (standing,) = node.links
        with ThreadPoolExecutor(1) as operator:
            asked = operator.submit(link_board.cut, node, standing, 60)
            while not asked.done():
                look()
            # One that stands where the answer was to come has gone with it, and with nothing else.
            is_written_over = where == "answer" and revision % RING == 1
            assert asked.result() == (None if is_written_over else LinkAnswer(1, "done"))
        look()
        assert owner.links == ()
        assert figures(owner).answered_revision == 1


def test_noise_in_the_ring_is_nothing(tmp_path: Path) -> None:
    with pair(tmp_path) as (owner, _, link), unattended(owner) as look:
        look()
        with (SHM_DIR / link_board_name(owner.start)).open("r+b") as file:
            os.pwrite(file.fileno(), os.urandom(2 * RING * CELL_BYTES), LAYOUT.request_at(0))
        look()
        link.check(timeout_s=60)
        assert figures(owner).answered_revision == 0


def test_of_two_operators_one_cuts_and_the_other_is_told(tmp_path: Path) -> None:
    with pair(tmp_path) as (owner, _, _), unattended(owner) as look:
        look()
        node = figures(owner)
        (standing,) = node.links
        with ThreadPoolExecutor(8) as operators:
            asked = [operators.submit(link_board.cut, node, standing, 60) for _ in range(8)]
            while not all(one.done() for one in asked):
                look()
        answers = [one.result() for one in asked]
        assert Counter(answer.state for answer in answers if answer) == {"done": 1, "refused": 7}
        assert sorted(answer.revision for answer in answers if answer) == list(range(1, 9))


def test_an_operator_that_is_stopped_with_the_lock_keeps_nobody_waiting(tmp_path: Path) -> None:
    with pair(tmp_path) as (owner, _, link):
        until_shown(ONE)
        board_path = SHM_DIR / link_board_name(owner.start)
        with board_path.open("rb") as stopped:
            fcntl.flock(stopped, fcntl.LOCK_EX)
            result = kvctl("cut", str(ONE), str(TWO))
            assert result.exit_code == 1
            assert "a kvctl that was stopped?" in result.output
        link.check(timeout_s=60)
        assert kvctl("cut", str(ONE), str(TWO), "--wait", "60").exit_code == 0


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
def node_process(owner: Node) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(TWO), str(owner.addresses[0])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline()
    try:
        yield process
    finally:
        process.kill()
        process.communicate()
        reap()


def until_shown(node_id: int) -> None:
    while not any(node.node_id == node_id and node.links for node in link_board.nodes()):
        threading.Event().wait(0.01)


def test_a_stopped_node_is_shown_and_does_what_it_was_asked_when_it_goes_on(tmp_path: Path) -> None:
    ended = threading.Event()
    with (
        Node(ONE, listen=[address_of("unix", tmp_path)], on_end=lambda _: ended.set()) as owner,
        node_process(owner) as process,
    ):
        until_shown(TWO)
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        assert kvctl(str(TWO)).exit_code == 0
        result = kvctl("cut", str(TWO), str(ONE), "--wait", "0.1")
        assert result.exit_code == 3
        assert "has not answered yet; the request stays" in result.output
        answer = json.loads(kvctl("cut", str(TWO), str(ONE), "--json").stdout)
        assert answer["state"] == "pending"
        assert not ended.is_set()
        process.send_signal(signal.SIGCONT)
        assert ended.wait(60)


def test_a_node_that_dies_while_it_is_asked_is_said_to_have_ended(tmp_path: Path) -> None:
    with Node(ONE, listen=[address_of("unix", tmp_path)]) as owner, node_process(owner) as process:
        until_shown(TWO)
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        with ThreadPoolExecutor(1) as operator:
            asked = operator.submit(kvctl, "cut", str(TWO), str(ONE), "--wait", "60")
            process.kill()
            process.wait()
            result = asked.result()
        assert result.exit_code == 1
        assert ("have ended" in result.output) or ("no node is called" in result.output)


def test_how_long_a_node_has_said_nothing() -> None:
    now_ns = time.time_ns()
    fresh = msgspec.structs.replace(NODE, published_realtime_ns=now_ns)
    assert "said nothing" not in table([fresh])
    old = msgspec.structs.replace(NODE, published_realtime_ns=now_ns - 90 * 10**9)
    assert "It has said nothing for 2 min: it is stopped, or very busy." in table([old])


def test_one_is_not_called_many() -> None:
    text = table([msgspec.structs.replace(NODE, ranges=1, leases=1, copies_lost=1,
                                          strangers_refused=1)])  # fmt: skip
    for said in ("1 link;", "1 range;", "1 lease in force", "1 copy lost", "1 stranger not let in"):
        assert said in text
    none = table([msgspec.structs.replace(NODE, links=())])
    for said in ("0 links;", "0 ranges;", "0 leases", "0 copies", "0 strangers"):
        assert said in none


# --- no room, no descriptors ----------------------------------------------------------------------


LINKED = """
import logging, sys
logging.basicConfig(level=logging.WARNING)
from kvelastic import link_board
from kvelastic.messages import parse_address
from kvelastic.transfer import Node
address = parse_address("unix://" + sys.argv[1] + "/s")
with Node(1, listen=[address]) as owner, Node(2) as reader:
    link = reader.link(address, 60)
    link.check(60)
    owner._endpoint.run_soon(owner._board.refresh)
    link.check(60)
    print([node.node_id for node in link_board.nodes() if node.node_id in (1, 2)])
"""


@pytest.mark.parametrize("room_kib", [0, 64])
def test_without_room_in_shared_memory_nodes_work_and_are_not_shown(
    room_kib: int, tmp_path: Path
) -> None:
    private = ("unshare", "-m", "--propagation", "private", "sh", "-c")
    mount = f"mount -t tmpfs -o size={room_kib or 4}k,mode=1777 tmpfs /dev/shm"
    fill = " && head -c 4096 /dev/zero >/dev/shm/full" if not room_kib else ""
    tried = subprocess.run([*private, mount], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"mounts of its own are not to be had: {tried.stderr.strip()}")
    ended = subprocess.run(
        [
            *private,
            f'{mount}{fill} && exec "$@"',
            "sh",
            sys.executable,
            "-c",
            LINKED,
            str(tmp_path),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() == "[]"
    assert ended.stderr.count("kvctl links does not see node") == 2  # once each


def test_without_descriptors_it_is_said_and_nothing_is_taken_for_none(tmp_path: Path) -> None:
    with Node(ONE, listen=[address_of("unix", tmp_path)]) as owner:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        lowest_free = os.dup(0)
        os.close(lowest_free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
        try:
            with pytest.raises(SegmentError):
                link_board.nodes()
            with pytest.raises(SegmentError):
                link_board.cut(NODE, LINK, wait_s=0)
            owner._board.refresh()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert [node.node_id for node in shown()] == [ONE]


def test_requests_that_nobody_answers_have_a_bound(tmp_path: Path) -> None:
    with pair(tmp_path) as (owner, _, _), unattended(owner) as look:
        look()
        node = figures(owner)
        (standing,) = node.links
        for _ in range(RING):
            assert link_board.cut(node, standing, wait_s=0) is None
        with pytest.raises(SegmentBusyError):
            link_board.cut(node, standing, wait_s=0)
        look()
        assert figures(owner).answered_revision == RING
