"""StatusFiles of links that lie, are damaged, of another version or of somebody else."""

from __future__ import annotations

import dataclasses
import json
import os
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from link_statuses import LINK, MOST, NODE, ONE, TWO, counts, kvctl, shown, status_file, unattended
from linked import address_of
from metrics_text import render
from processes import run_python
from prometheus_client.parser import text_string_to_metric_families
from waiting import DEADLINE_S

from kvelastic.cli.commands.links import table
from kvelastic.errors import SegmentNotFoundError
from kvelastic.messages import parse_address
from kvelastic.shared import link_status
from kvelastic.shared.link_status import KIND, LinkStatus, NodeStatus, object_of
from kvelastic.shared.segment_listing import SHM_DIR, link_status_name, reap
from kvelastic.transfer import Node

# --- lies -----------------------------------------------------------------------------------------


LIES = {
    "far too much": NodeStatus(
        ONE, MOST, "r" * 64, ("a" * 128,) * 8, 65535, *counts(MOST),
        (LinkStatus(MOST, (1 << 64) - 1, "p" * 64, "client", "tcp", "linked", "r" * 64,
                     *[MOST] * 8),) * 500,
    ),
    "control characters": NodeStatus(
        ONE, 1, "\x1b[2J\nnode 1", ("tcp://\x1b]0;x\x07:1\r\n",), 0, *counts(0),
        (LinkStatus(1, TWO, "\x1b[31m\nx\ufffe", "client", "tcp", "ended", "\u202e\ttuc",
                     *[0] * 8),),
    ),
    "one peer twice": NodeStatus(
        ONE, 1, 'a"b\\c', (), 0, *counts(0), (LINK, LINK, msgspec.structs.replace(LINK, number=2))
    ),
    "nothing": NodeStatus(ONE, 0, "", (), 0, *counts(0), ()),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_lying_status_file_is_harmless(lie: str) -> None:
    with status_file(LIES[lie]):
        (node,) = shown()
        text = table([node])
        assert all(one.isprintable() for one in text.replace("\n", ""))
        assert len(text.splitlines()) == len(node.links) + 3
        assert json.loads(json.dumps(object_of(node)))["node_id"] == ONE
        for arguments in ((), ("--json",), (str(ONE),)):
            assert kvctl(*arguments).exit_code == 0
        series = Counter(
            (sample.name, tuple(sorted(sample.labels.items())))
            for family in text_string_to_metric_families(render([], [], {}, [node]))
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
def test_invalid_status_is_not_shown(change: dict[str, object]) -> None:
    with status_file(msgspec.structs.replace(NODE, **change)):
        assert shown() == []
        result = kvctl()
        assert result.exit_code == 0
        assert "a node is not shown" in result.stderr
        assert "damaged" in result.stderr


def test_metrics_use_the_latest_link_per_peer(tmp_path: Path) -> None:
    address, ended = address_of("unix", tmp_path), threading.Semaphore(0)
    with Node(ONE, listen=[address]) as owner, Node(TWO) as reader:
        owner._on_end = lambda _: ended.release()
        for failures in (5, 2):
            link = reader.link(address, timeout_s=DEADLINE_S)
            owner.links[0].count("failures", failures)
            link.unlink(timeout_s=DEADLINE_S)
            assert ended.acquire(timeout=DEADLINE_S)
        text = render([], [], {}, [owner._status._status(0)])
        assert [
            line.split()[-1] for line in text.splitlines() if "link_failures_total{" in line
        ] == ["2.0"]


def test_node_with_non_utf8_address_is_shown(tmp_path: Path) -> None:
    """A folder's name may be any bytes."""
    with Node(ONE, listen=[parse_address(f"unix://{tmp_path}/\udcff\n")]):
        (node,) = shown()
        assert node.addresses == (f"unix://{tmp_path}/??",)


# --- files that are not status files --------------------------------------------------------------


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
    "only a header": lambda path, _: path.write_bytes(KIND.header),
    "zeros": lambda path, _: path.write_bytes(bytes(KIND.file_bytes)),
    "huge": lambda path, _: os.truncate(path.write_bytes(b"KVLINKS\0") and path, 1 << 40),
    "noise": lambda path, _: path.write_bytes(os.urandom(KIND.file_bytes)),
    "a status file": lambda path, elsewhere: path.write_bytes(elsewhere.read_bytes()),
}


@pytest.mark.parametrize("kind", KINDS)
def test_foreign_file_is_ignored(kind: str, tmp_path: Path) -> None:
    """Nobody holds it, so it is no node's, whatever stands in it; what a link leads to stays."""
    whole = tmp_path / "whole"
    with status_file() as made:
        whole.write_bytes(made._path.read_bytes())
    path = SHM_DIR / link_status_name(os.urandom(16))
    try:
        KINDS[kind](path, whole)
        if path.is_file():
            path.chmod(0o600, follow_symlinks=kind == "symlink")
        assert shown() == []
        assert kvctl("--json").exit_code == 0
        with pytest.raises(SegmentNotFoundError):
            link_status.cut(NODE, LINK, wait_s=0)
        reap()
        assert whole.exists()
    finally:
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        path.unlink(missing_ok=True)
        path.with_name(f".kvtest_{os.getpid()}").unlink(missing_ok=True)


def test_other_version_is_reported_and_not_read() -> None:
    with status_file() as made:
        newer = dataclasses.replace(KIND, version=9)
        os.pwrite(made._fd, newer.header, 0)
        assert shown() == []
        for arguments in ((), ("--json",)):
            result = kvctl(*arguments)
            assert result.exit_code == 0
            assert "is of version 9; this kvelastic reads version 3" in result.stderr
        with pytest.raises(SegmentNotFoundError):
            link_status.cut(NODE, LINK, wait_s=0)
        with status_file(msgspec.structs.replace(NODE, node_id=TWO)):  # it hides no other one
            assert [node.node_id for node in shown()] == [TWO]


@pytest.mark.parametrize("mode", [0o604, 0o640, 0o666, 0o200])
def test_status_file_accessible_to_others_is_not_trusted(mode: int) -> None:
    with status_file() as made:
        made._path.chmod(mode)
        is_root_and_private = os.geteuid() == 0 and mode == 0o200
        assert bool(shown()) is is_root_and_private
        if mode != 0o200:
            assert "not a file of its user alone" in kvctl().stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be two users")
def test_only_root_sees_status_files_of_others() -> None:
    with status_file() as made:
        os.chown(made._path, 65534, 65534)
        assert [node.node_id for node in shown()] == [ONE]
        os.chown(made._path, 0, 0)
        program = (
            "import os; from kvelastic.shared import link_status; os.setuid(65534);"
            " print(link_status.look())"
        )
        assert str(ONE) not in run_python("-c", program).stdout


@pytest.mark.slow
@pytest.mark.parametrize("size", [0, 10, 5000, KIND.answer_at(0)])
def test_truncated_or_overwritten_status_file_is_repaired(size: int, tmp_path: Path) -> None:
    with Node(ONE, listen=[address_of("unix", tmp_path)]) as owner, unattended(owner) as look:
        path = SHM_DIR / link_status_name(owner.start)
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


@pytest.mark.slow
def test_unlinked_status_file_does_not_stop_the_node(tmp_path: Path) -> None:
    address = address_of("unix", tmp_path)
    with Node(ONE, listen=[address]) as owner, Node(TWO) as reader, unattended(owner) as look:
        link = reader.link(address, timeout_s=DEADLINE_S)
        node, (back,) = owner._status, owner.links
        path = SHM_DIR / link_status_name(owner.start)
        path.unlink()
        path.write_text("somebody else's")
        look()
        assert [each.node_id for each in shown()] == [TWO]
        link.check(timeout_s=DEADLINE_S)
        assert back.is_open
        assert node is not None
    assert path.read_text() == "somebody else's"  # the node's end removes only its own
    path.unlink()
