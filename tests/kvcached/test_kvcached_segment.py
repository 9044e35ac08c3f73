"""kvcached's 24-byte segment beside an instance's own: clients read usage and set limits by it."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from called_kvctl import kvctl
from kvcached_instance import (
    CAPACITY_BYTES,
    FILE,
    MIB,
    NAME,
    limit_of,
    opened,
    values,
    wait_for_limit,
    write_limit,
)
from processes import PROGRAMS, LineProgram, run_python
from waiting import wait_until

from kvelastic import errors
from kvelastic._vmm import UNLIMITED_BYTES, KvcachedSegment
from kvelastic.pool.pool import ElasticPool
from kvelastic.shared import segment
from kvelastic.shared.kvcached_segment import beside

CLIENT = PROGRAMS / "kvcached_client.py"


def test_client_reads_the_usage_that_kvctl_lists(pool: ElasticPool) -> None:
    assert pool.blocks.alloc(100) is not None

    def agrees() -> bool:
        limit_bytes, used_bytes, _ = map(int, run_python(CLIENT, NAME, "read").stdout.split())
        (row,) = json.loads(kvctl("list", NAME, "--json").stdout)
        assert (row["ipc"], row["name"]) == (NAME, f"{NAME}.kvelastic")
        return bool(row["used_bytes"] == used_bytes > 0 and row["limit_bytes"] == limit_bytes)

    wait_until(agrees)


@pytest.mark.parametrize("command", ["list", "watch --count 1", "kvtop --once"])
def test_lists_accept_the_kvcached_name(pool: ElasticPool, command: str) -> None:
    shown = kvctl(*command.split(), NAME)
    assert (shown.exit_code, shown.stderr) == (0, "")
    assert f"{NAME}.kvelastic" in shown.stdout


def test_file_shows_usage_when_alloc_returns(
    pool: ElasticPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"{NAME}_alone"
    monkeypatch.setenv("KVCACHED_IPC_NAME", name)
    monkeypatch.setenv("KVCACHED_PAGE_PREALLOC_ENABLED", "false")  # only alloc maps pages
    with opened() as other:
        other.start_maintenance()
        for _ in range(20):
            assert other.blocks.alloc(10) is not None
            usage = other.segment.control_block.read_usage()
            used_bytes = usage["mapped_bytes"] - usage["parked_bytes"]
            assert values(FILE.with_name(name))[1] == used_bytes > 0
        other.close(discard=True)


def test_client_limit_becomes_an_acknowledged_request(pool: ElasticPool) -> None:
    run_python(CLIENT, NAME, "limit", str(64 * MIB))
    wait_for_limit(pool, 64 * MIB)
    answer = wait_until(
        lambda: (a := segment.inspect(NAME).ack)["state"] == "applied" and a, "no answer"
    )
    assert answer["effective_limit_bytes"] == 64 * MIB
    said = kvctl("explain", NAME).stdout
    assert f"A kvcached client set the limit through {FILE}." in said
    assert json.loads(kvctl("explain", NAME, "--json").stdout)["is_limit_of_kvcached_client"]
    run_python("-m", "kvelastic.cli", "limit", NAME, "96M", "--wait", "60")  # another process
    assert "kvcached client" not in kvctl("explain", NAME).stdout
    wait_until(lambda: values()[0] == 96 * MIB, "the operator's limit is not in the file")


def test_client_that_keeps_its_mapping_sets_limits(pool: ElasticPool) -> None:
    with LineProgram(CLIENT, NAME, "keep") as client:
        for limit_bytes in (64 * MIB, 32 * MIB):
            assert client.ask(str(limit_bytes)) == "set"
            wait_for_limit(pool, limit_bytes)
        assert kvctl("limit", NAME, "96M", "--wait", "60").exit_code == 0
        wait_until(lambda: values()[0] == 96 * MIB, "the operator's limit is not in the file")
        assert client.ask(str(48 * MIB)) == "set"
        wait_for_limit(pool, 48 * MIB)


def test_limit_written_before_start_is_applied(
    pool: ElasticPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"{NAME}_early"
    monkeypatch.setenv("KVCACHED_IPC_NAME", name)
    with opened() as other:
        run_python(CLIENT, name, "limit", str(48 * MIB))
        other.start_maintenance()
        wait_for_limit(other, 48 * MIB)


@pytest.mark.parametrize("nonsense", [0, -1, -(1 << 63)])
def test_invalid_limit_is_replaced_by_the_effective_limit(pool: ElasticPool, nonsense: int) -> None:
    write_limit(80 * MIB)
    wait_for_limit(pool, 80 * MIB)
    write_limit(nonsense)
    wait_until(lambda: values()[0] == 80 * MIB, "the nonsense stays")
    assert limit_of(pool) == 80 * MIB


def test_extreme_limits_match_those_of_kvctl(pool: ElasticPool) -> None:
    write_limit(1)
    wait_for_limit(pool, 1)
    write_limit((1 << 63) - 1)
    wait_for_limit(pool, UNLIMITED_BYTES)
    wait_until(lambda: values()[0] == CAPACITY_BYTES, "the file does not show the device's size")


@pytest.fixture
def own() -> Iterator[segment.Segment]:
    """The own segment of an instance that does nothing."""
    with segment.create(f"{NAME}.kvelastic", engine="vLLM") as made:
        made.control_block.publish_usage(limit_bytes=64 * MIB, capacity_bytes=CAPACITY_BYTES)
        yield made


@pytest.fixture
def file(own: segment.Segment) -> Iterator[KvcachedSegment]:
    """kvcached's segment of that instance, without its thread."""
    made = beside(own, NAME)
    yield made
    made.close()


def apply(own: segment.Segment) -> int:
    """Acknowledge the last request, as the instance's maintenance thread does; its limit."""
    request = own.control_block.read_request()
    limit_bytes: int = request["limit_bytes"]
    own.control_block.publish_usage(
        limit_bytes=limit_bytes if limit_bytes < CAPACITY_BYTES else UNLIMITED_BYTES,
        capacity_bytes=CAPACITY_BYTES,
    )
    own.control_block.publish_ack(
        request["revision"], "applied", effective_limit_bytes=min(limit_bytes, CAPACITY_BYTES)
    )
    return limit_bytes


def test_own_limit_wins_if_both_have_changed(own: segment.Segment, file: KvcachedSegment) -> None:
    write_limit(32 * MIB)
    segment.post(own.name, segment.Request(limit_bytes=96 * MIB)).close()
    file.look()
    assert values()[0] == 96 * MIB
    assert own.control_block.read_request()["limit_bytes"] == 96 * MIB
    write_limit(32 * MIB)  # later than both: the last writer wins
    file.look()
    assert own.control_block.read_request()["limit_bytes"] == 32 * MIB


def test_limit_after_one_above_the_capacity_counts(
    own: segment.Segment, file: KvcachedSegment
) -> None:
    write_limit((1 << 63) - 1)
    file.look()
    assert apply(own) >= CAPACITY_BYTES
    write_limit(32 * MIB)
    file.look()
    assert apply(own) == 32 * MIB
    file.look()
    assert values()[0] == 32 * MIB


def test_lock_held_at_start_keeps_the_first_limit(
    own: segment.Segment, file: KvcachedSegment
) -> None:
    own.control_block.publish_usage(
        limit_bytes=32 * MIB, capacity_bytes=CAPACITY_BYTES, mapped_bytes=MIB
    )
    with FILE.open("r+b") as client:
        fcntl.flock(client, fcntl.LOCK_EX)
        file.start()
        wait_until(lambda: values()[1] == MIB, "the usage is not published")
        assert values()[0] == 64 * MIB
    wait_until(lambda: values()[0] == 32 * MIB, "the first limit is not published")
    assert own.control_block.read_request()["limit_revision"] == 0


@pytest.mark.parametrize("size_bytes", [0, 4, 24])
def test_limit_is_not_replaced_under_clients_lock(
    own: segment.Segment, file: KvcachedSegment, size_bytes: int
) -> None:
    with FILE.open("r+b") as client:
        fcntl.flock(client, fcntl.LOCK_EX)
        os.pwrite(client.fileno(), struct.pack("<q", -1), 0)
        os.ftruncate(client.fileno(), size_bytes)
        own.control_block.publish_usage(
            limit_bytes=64 * MIB, capacity_bytes=CAPACITY_BYTES, mapped_bytes=MIB
        )
        file.look()
        assert FILE.read_bytes()[:8] == b"\xff" * min(size_bytes, 8)
        os.pwrite(client.fileno(), struct.pack("<3q", 32 * MIB, 0, 0), 0)
    file.look()
    assert values() == (32 * MIB, MIB, 0)
    assert own.control_block.read_request()["limit_bytes"] == 32 * MIB


def test_old_usage_of_a_client_is_replaced(own: segment.Segment, file: KvcachedSegment) -> None:
    own.control_block.publish_usage(
        limit_bytes=64 * MIB, capacity_bytes=CAPACITY_BYTES, mapped_bytes=MIB
    )
    file.look()
    FILE.write_bytes(struct.pack("<3q", 64 * MIB, 7, 7))
    file.look()
    assert values() == (64 * MIB, MIB, 0)


def test_client_holding_the_lock_delays_only_the_limit(pool: ElasticPool) -> None:
    with LineProgram(CLIENT, NAME, "hold") as client:
        assert client.read() == "held"
        assert kvctl("limit", NAME, "96M", "--wait", "60").exit_code == 0
        assert pool.blocks.alloc(100) is not None
        wait_until(lambda: values()[1] > 0, "the usage is not published")
        assert values()[0] == CAPACITY_BYTES
        client.kill()
        wait_until(lambda: values()[0] == 96 * MIB, "the limit is not published")


@pytest.mark.parametrize("size_bytes", [0, 12, 4096])
def test_file_of_wrong_size_is_repaired(pool: ElasticPool, size_bytes: int) -> None:
    write_limit(80 * MIB)
    wait_for_limit(pool, 80 * MIB)
    os.truncate(FILE, size_bytes)
    wait_until(lambda: FILE.stat().st_size == 24 and values()[0] == 80 * MIB)
    assert limit_of(pool) == 80 * MIB


def test_removed_file_is_recreated(pool: ElasticPool) -> None:
    write_limit(80 * MIB)
    wait_for_limit(pool, 80 * MIB)
    FILE.unlink()
    wait_until(lambda: FILE.exists() and FILE.stat().st_size == 24, "it is not made again")
    assert values()[0] == 80 * MIB
    write_limit(64 * MIB)
    wait_for_limit(pool, 64 * MIB)


def test_replacement_file_of_a_client_sets_a_limit(pool: ElasticPool) -> None:
    new = FILE.with_name(f"{NAME}_new")
    new.write_bytes(struct.pack("<3q", 72 * MIB, 0, 0))
    new.rename(FILE)
    wait_for_limit(pool, 72 * MIB)


@pytest.mark.parametrize("kind", ["symlink", "directory", "large", "foreign"])
def test_foreign_replacement_file_is_left_alone(
    pool: ElasticPool, kind: str, tmp_path: Path
) -> None:
    target = tmp_path / "target"
    target.write_bytes(struct.pack("<3q", 72 * MIB, 0, 0))
    if kind == "foreign" and os.geteuid():
        pytest.skip("only root makes files of another user")
    held = FILE.with_name(f"{NAME}_held")
    if kind == "symlink":
        held.symlink_to(target)
    elif kind == "directory":
        held.mkdir()
    else:
        held.write_bytes(target.read_bytes() * (100 if kind == "large" else 1))
    if kind == "foreign":
        os.chown(held, 12345, 12345)
    FILE.unlink()
    while True:  # the instance makes its file at once
        with suppress(OSError):
            FILE.unlink()
        with suppress(OSError):
            held.rename(FILE)
            break
    inode = FILE.lstat().st_ino
    assert kvctl("limit", f"{NAME}.kvelastic", "96M", "--wait", "60").exit_code == 0
    assert pool.blocks.alloc(10) is not None
    assert FILE.lstat().st_ino == inode
    assert struct.unpack("<3q", target.read_bytes())[0] == 72 * MIB
    if kind == "directory":
        FILE.rmdir()
    else:
        FILE.unlink()
    wait_until(lambda: FILE.is_file() and FILE.stat().st_size == 24, "it is not made again")
    assert values()[0] == 96 * MIB


def test_name_of_another_file_is_rejected(
    pool: ElasticPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"{NAME}_taken"
    monkeypatch.setenv("KVCACHED_IPC_NAME", name)
    other = FILE.with_name(name)
    other.write_bytes(b"x" * 100)
    try:
        with pytest.raises(errors.SegmentExistsError, match="KVCACHED_IPC_NAME"):
            opened()
        assert not FILE.with_name(f"{name}.kvelastic").exists()
    finally:
        other.unlink()
    monkeypatch.setenv("KVCACHED_IPC_NAME", NAME)
    with pytest.raises(errors.SegmentExistsError):
        opened()


def test_forked_child_neither_removes_nor_keeps_the_file(
    own: segment.Segment, file: KvcachedSegment
) -> None:
    child = os.fork()
    if not child:
        file.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    write_limit(32 * MIB)
    file.look()
    assert own.control_block.read_request()["limit_bytes"] == 32 * MIB
    file.close()
    assert not FILE.exists()


def test_full_file_system_refuses_start_without_leftovers(own: segment.Segment) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8, hard))  # Python ignores the signal
    try:
        with pytest.raises(errors.SegmentError, match="cannot write"):
            beside(own, NAME)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not FILE.exists()


def test_next_command_removes_files_of_killed_instance(pool: ElasticPool) -> None:
    name = f"{NAME}_killed"
    program = """
import sys
from kvcached_instance import opened
pool = opened()
pool.start_maintenance()
print("ready", flush=True)
sys.stdin.read()
"""
    path = os.pathsep.join([str(Path(__file__).parent), str(PROGRAMS)])
    environment = {"KVCACHED_IPC_NAME": name, "PYTHONPATH": path}
    with LineProgram("-c", program, environment=environment) as instance:
        assert instance.read() == "ready"
        assert FILE.with_name(name).exists()
        with pytest.raises(errors.SegmentExistsError):
            segment.check_free(name)
        instance.kill()
    segment.check_free(name)
    assert not FILE.with_name(name).exists()
    assert not FILE.with_name(f"{name}.kvelastic").exists()
    assert FILE.exists()


@pytest.mark.parametrize("writes", [pytest.param(2500, marks=pytest.mark.soak), pytest.param(40)])
def test_killed_writers_lose_no_limit(pool: ElasticPool, writes: int) -> None:
    def start(seed: int, *count: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-S", str(CLIENT), NAME, "random", str(seed), *count]
        return subprocess.Popen(command)

    victims = [start(seed) for seed in range(4)]
    for one in [start(seed, str(writes)) for seed in range(4, 8)]:
        victims[-1].kill()
        victims.pop().wait()
        assert one.wait() == 0
    last_bytes = 123 * MIB
    write_limit(last_bytes)
    wait_for_limit(pool, last_bytes)
    pool.blocks.check_integrity()
    assert values()[0] == last_bytes
