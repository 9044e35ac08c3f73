"""Segments: made whole or not at all, found, told alive from dead, written to and removed."""

from __future__ import annotations

import mmap
import os
import random
import stat
import threading
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import needs
import pytest
from processes import LineProgram, run_python
from segment_owner import CAPACITY_BYTES, Owner, engine_core
from waiting import DEADLINE_S, wait_until

from kvelastic import _vmm, units
from kvelastic.errors import (
    InvalidArgumentError,
    SegmentBusyError,
    SegmentDeadError,
    SegmentError,
    SegmentExistsError,
    SegmentFormatError,
    SegmentNotFoundError,
)
from kvelastic.shared import liveness, segment, segment_listing
from kvelastic.shared.segment_listing import temporary_name

SHM = Path("/dev/shm")


@pytest.fixture
def name():
    unique = f"kvtest_{os.getpid()}_{random.randrange(1 << 40):x}"
    yield unique
    (SHM / unique).unlink(missing_ok=True)


@pytest.fixture
def mine(name):
    with segment.create(name, engine="test", model="m", device="host") as made:
        yield made


def found(name: str) -> segment.SegmentInfo | None:
    return next((info for info in segment.list_segments() if info.name == name), None)


def forge(name: str, **changes: object) -> bytes:
    """A segment of an identity of our choice; returns its bytes."""
    me = liveness.ProcessIdentity.of_this_process()
    fields: dict[str, Any] = {
        "name": name,
        "engine": "forged",
        "model": "",
        "devices": [("host", 1)],
        "uuid": bytes(16),
        "pid": me.pid,
        "start_time_ticks": me.start_time_ticks,
        "boot_id": me.boot_id,
        "pid_namespace": me.pid_namespace,
        "uid": me.uid,
        "created_realtime_ns": 1,
    }
    memory = mmap.mmap(-1, _vmm.SEGMENT_BYTES)
    _vmm.ControlBlock.create(memory, **(fields | changes)).release()
    (SHM / name).write_bytes(memory[:])
    return memory[:]


def aligned(data: bytes) -> mmap.mmap:
    memory = mmap.mmap(-1, max(1, len(data)))
    memory.write(data)
    return memory


# ---------------------------------------------------------------------------------------- making


def test_header_identifies_its_creator(name):
    me = liveness.ProcessIdentity.of_this_process()
    with segment.create(name, engine="vLLM", model="org/model", device="GPU-1") as made:
        header = made.control_block.read_header()
        assert made.is_owner
        assert segment.inspect(name).status == "alive"
    assert (header["name"], header["engine"], header["model"]) == (name, "vLLM", "org/model")
    assert (header["device"], header["devices"]) == ("GPU-1", [("GPU-1", 1)])
    assert header["pid"] == os.getpid() == me.pid
    assert header["start_time_ticks"] == me.start_time_ticks > 0
    assert header["boot_id"] == me.boot_id != bytes(16)
    assert len(header["uuid"]) == 16
    assert header["state"] == "alive"
    assert header["total_bytes"] == header["ring_offset"] + header["ring_bytes"]


def test_segment_file_has_its_name_and_is_private(name):
    before = os.umask(0)
    try:
        with segment.create(name, engine="test"):
            state = (SHM / name).stat()
            assert stat.S_IMODE(state.st_mode) == 0o600
            assert state.st_size == _vmm.SEGMENT_BYTES
            assert state.st_nlink == 1  # the private name is gone
    finally:
        os.umask(before)


def test_close_removes_the_name_and_is_idempotent(name):
    made = segment.create(name, engine="test")
    made.close()
    made.close()
    assert not (SHM / name).exists()
    with pytest.raises(SegmentError, match="released"):
        made.control_block.read_usage()


def test_automatic_name_is_numbered():
    with segment.create(None, engine="vLLM") as first, segment.create(None, engine="vLLM") as other:
        assert first.name == f"kvelastic_vLLM_{os.getpid()}"
        assert other.name == f"{first.name}_2"
        assert other.control_block.read_header()["name"] == other.name


@pytest.mark.parametrize("bad", ["", ".", "..", "a/b", "../x", ".hidden", "a b", "a\0b", "x" * 65])
def test_invalid_segment_names_are_rejected(bad):
    with pytest.raises(InvalidArgumentError, match="not accepted"):
        segment.create(bad, engine="test")
    with pytest.raises(SegmentError):
        segment.open_readonly(bad)


def test_longest_name_and_truncated_header_texts(name):
    longest = name.ljust(64, "x")
    with segment.create(longest, engine="e" * 99, model="/very/long" * 40, device="d") as made:
        header = made.control_block.read_header()
    assert header["name"] == longest
    assert len(header["engine"].encode()) == 32
    assert header["model"].startswith("...")
    assert header["model"].endswith("/very/long")
    assert len(header["model"]) == 256


def test_live_instance_keeps_its_name(name, mine):
    uuid = mine.control_block.read_header()["uuid"]
    with pytest.raises(SegmentExistsError, match=f"process {os.getpid()}"):
        segment.create(name, engine="other")
    assert segment.inspect(name).header["uuid"] == uuid


@pytest.mark.parametrize(
    ("has_server", "what"),
    [(True, "which is alive"), (False, "an engine core whose server has ended")],
)
def test_taken_name_error_names_the_process_and_remedy(name, has_server, what):
    with engine_core(name, has_server=has_server) as core:
        pid = segment.inspect(name).header["pid"]
        expected = rf"process {pid}, {what}; end it \(kill {pid}\), or choose another"
        with pytest.raises(SegmentExistsError, match=expected):
            segment.check_free(name)
        with pytest.raises(SegmentExistsError, match=expected):
            segment.create(name, engine="test")
        core.finish()
    segment.check_free(name)


@needs.root
def test_name_owned_by_another_user_is_rejected(name, mine):
    code = (
        "import os, sys; from kvelastic.shared import segment; from kvelastic.errors import *;"
        "segment.create(None, engine='test').close()\n"  # it may not read Python's files later
        "os.setuid(65534)\n"
        "for take in (segment.check_free, lambda name: segment.create(name, engine='test')):\n"
        "    try: take(sys.argv[1])\n"
        "    except SegmentExistsError as error: print(error)"
    )
    said = run_python("-c", code, name).stdout.splitlines()
    expected = f"the name {name!r} is taken by another user, who owns /dev/shm/{name}; choose"
    assert [line.startswith(expected) for line in said] == [True, True]


def test_unused_name_and_dead_segment_are_free(name):
    segment.check_free(name)
    forge(name, start_time_ticks=1)
    segment.check_free(name)
    assert not (SHM / name).exists()


def test_dead_instance_is_replaced(name):
    forge(name, start_time_ticks=1)
    with segment.create(name, engine="next") as made:
        assert segment.inspect(name).header["engine"] == "next"
        assert made.name == name


@pytest.mark.parametrize("content", [b"", b"something else" * 400])
def test_foreign_file_is_neither_listed_nor_changed(name, content):
    (SHM / name).write_bytes(content)
    with pytest.raises(SegmentExistsError, match="not a segment"):
        segment.create(name, engine="test")
    with pytest.raises(SegmentFormatError):
        segment.delete(name, force=True)
    assert found(name) is None
    assert name not in segment.reap()
    assert (SHM / name).read_bytes() == content


def test_other_version_is_listed_and_not_changed(name):
    data = bytearray(forge(name, start_time_ticks=1))
    data[8:12] = (77).to_bytes(4, "little")
    (SHM / name).write_bytes(data)
    info = found(name)
    assert info is not None
    assert info.status == "unreadable"
    assert "version 77" in info.problem
    assert name not in segment.reap()
    with pytest.raises(SegmentExistsError, match="version 77"):
        segment.create(name, engine="test")
    with pytest.raises(SegmentFormatError, match="version 77"):
        segment.request(name, limit_bytes=1)
    with pytest.raises(SegmentBusyError, match="version 77"):
        segment.delete(name)
    assert (SHM / name).read_bytes() == data
    segment.delete(name, force=True)
    assert not (SHM / name).exists()


def test_segment_truncated_while_read_is_still_reported(name):
    """In a process of its own: read from a mapping, it would be ended by SIGBUS."""
    forge(name, start_time_ticks=1)
    read = f"""
import os
from kvelastic.shared import segment_listing
path = {str(SHM / name)!r}
ask = segment_listing.liveness
segment_listing.liveness = lambda fd, byte, *more: (os.truncate(path, 0), ask(fd, byte, *more))[1]
print(segment_listing.inspect({name!r}).header["engine"])
"""
    ended = run_python("-c", read)
    assert (ended.stdout, ended.stderr) == ("forged\n", "")
    assert (SHM / name).read_bytes() == b""


def test_non_regular_files_are_ignored(name):
    os.mkfifo(SHM / name)  # opening it to read would block for ever
    assert found(name) is None
    with pytest.raises(SegmentFormatError):
        segment.open_readonly(name)
    (SHM / name).unlink()
    (SHM / name).symlink_to("/etc/hostname")
    assert found(name) is None
    with pytest.raises(SegmentError):
        segment.open_readonly(name)


STARTER = """
import sys
from kvelastic.shared import segment
from kvelastic.errors import SegmentExistsError
print("here", flush=True)
sys.stdin.readline()
try:
    made = segment.create(sys.argv[1], engine="race")
except SegmentExistsError:
    print("lost", flush=True)
else:
    print("won", flush=True)
    sys.stdin.read()
"""


@pytest.mark.slow
@pytest.mark.parametrize("after_a_dead_one", [False, True])
def test_one_of_several_starters_gets_the_name(name, after_a_dead_one):
    if after_a_dead_one:
        forge(name, start_time_ticks=1)
    with ExitStack() as stack:
        starters = [stack.enter_context(LineProgram("-c", STARTER, name)) for _ in range(6)]
        for starter in starters:
            assert starter.read() == "here"
        for starter in starters:
            starter.send("")
        outcomes = [starter.read() for starter in starters]
        assert sorted(outcomes) == ["lost"] * 5 + ["won"]
        winner = starters[outcomes.index("won")]
        assert segment.inspect(name).header["pid"] == winner.pid
        assert winner.finish() == 0
    assert not (SHM / name).exists()


def test_recreated_name_survives_close_of_its_first_owner(name):
    first = segment.create(name, engine="first")
    segment.delete(name, force=True)
    with segment.create(name, engine="second"):
        first.close()
        assert segment.inspect(name).header["engine"] == "second"


def test_forked_child_never_removes_its_parents_segment(name):
    with Owner(name, "fork") as owner:
        assert segment.inspect(name).header["pid"] == owner.pid
        assert segment.request(name, limit_bytes=1 << 30, wait_s=DEADLINE_S).state == "applied"
        assert segment.inspect(name).status == "alive"


# --------------------------------------------------------------------------------- dead or alive


def test_segment_of_a_recycled_pid_is_dead(name):
    me = liveness.ProcessIdentity.of_this_process()
    forge(name, start_time_ticks=me.start_time_ticks + 1)
    assert segment.inspect(name).status == "dead"
    assert name in segment.reap()
    assert not (SHM / name).exists()


def test_segment_of_a_dead_container_is_dead(name):
    """Of a pid namespace that nobody here can look into, the kernel says it all the same."""
    forge(name, pid=1 << 22, pid_namespace=1)
    assert segment.inspect(name).status == "dead"
    assert name in segment.reap()
    assert not (SHM / name).exists()


@needs.root
def test_dead_segment_of_another_user_is_not_reaped(name):
    forge(name, start_time_ticks=1)
    os.chown(SHM / name, 12345, -1)
    info = found(name)
    assert info is not None
    assert (info.status, info.is_ours) == ("dead", False)
    assert name not in segment.reap()
    assert (SHM / name).exists()


def test_unfinished_files_of_dead_starters_are_reaped():
    for of in ("segment", "ledger", "status"):
        left, begun, foreign = (SHM / temporary_name(of) for _ in range(3))
        foreign = foreign.with_name(foreign.name + "-of-another-version")
        try:
            for path in (left, begun, foreign):
                path.write_bytes(b"")
            with begun.open("rb") as file:
                lock = liveness.hold(begun, file.fileno(), liveness.MAKER_BYTE)
            assert left.name in segment.reap()
            assert not left.exists()
            assert begun.exists()
            assert foreign.exists()
            assert not {begun.name, foreign.name} & {info.name for info in segment.list_segments()}
            lock.release()
            assert begun.name in segment.reap()
        finally:
            for path in (left, begun, foreign):
                path.unlink(missing_ok=True)


def test_unfinished_file_reaped_too_early_is_recreated(name, monkeypatch):
    """Somebody looks between the making of the file and the taking of its lock, or before it has
    its name."""
    reaped = []

    def hold_late(path, fd, byte):
        if len(reaped) < 2:
            reaped.append(path)
            if len(reaped) == 1:
                path.unlink()
            else:
                lock = liveness.hold(path, fd, byte)
                path.unlink()
                return lock
        return liveness.hold(path, fd, byte)

    monkeypatch.setattr(segment_listing, "hold", hold_late)
    with segment.create(name, engine="test"):
        assert len(reaped) == 2
        assert segment.inspect(name).status == "alive"


def test_reap_skips_a_locked_segment(name):
    import fcntl

    forge(name, start_time_ticks=1)
    with (SHM / name).open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert name not in segment.reap()
    assert name in segment.reap()


def test_delete_of_a_live_segment_needs_force(name, mine):
    with pytest.raises(SegmentBusyError, match="live instance"):
        segment.delete(name)
    segment.delete(name, force=True)
    assert found(name) is None
    mine.control_block.publish_usage(mapped_bytes=7)  # the instance goes on
    assert mine.control_block.read_usage()["mapped_bytes"] == 7
    with pytest.raises(SegmentNotFoundError):
        segment.delete(name, force=True)


# -------------------------------------------------------------------------- reading and requesting


def test_read_only_mapping_reads_and_rejects_writes(mine):
    reader = segment.open_readonly(mine.name)
    try:
        assert reader.control_block.readonly
        assert not reader.is_owner
        mine.control_block.publish_usage(mapped_bytes=11, in_use_bytes=5, blocks_total=2)
        usage = reader.control_block.read_usage()
        assert (usage["mapped_bytes"], usage["in_use_bytes"], usage["blocks_total"]) == (11, 5, 2)
        assert usage["updated_ns"] > 0
        mine.control_block.add_counter("allocs", 3)
        assert reader.control_block.counters()["allocs"] == 3
        mine.control_block.publish_ack(0, "applied", effective_limit_bytes=9)
        assert reader.control_block.wait_ack(0, 0.0)
        assert not reader.control_block.wait_ack(1, 0.01)
        for forbidden in (
            lambda: reader.control_block.write_request(1),
            reader.control_block.ring_bell,
            lambda: reader.control_block.publish_usage(mapped_bytes=1),
            reader.control_block.set_closing,
        ):
            with pytest.raises(SegmentError):
                forbidden()
    finally:
        reader.close()
    assert (SHM / mine.name).exists()


def test_readers_see_consistent_publications(mine):
    reader = segment.open_readonly(mine.name)
    stop = threading.Event()

    def publish() -> None:
        value = 0
        while not stop.is_set():
            value += 1
            mine.control_block.publish_usage(
                capacity_bytes=value, mapped_bytes=value, under_pressure=value
            )

    writer = threading.Thread(target=publish)
    writer.start()
    try:
        seen = set()
        reads = 0
        while reads < 20_000 or len(seen) < 2:
            reads += 1
            usage = reader.control_block.read_usage()
            assert usage["capacity_bytes"] == usage["mapped_bytes"] == usage["under_pressure"]
            assert usage["whole"]
            seen.add(usage["under_pressure"])
    finally:
        stop.set()
        writer.join()
        reader.close()


def test_requests_are_numbered_and_keep_other_fields(mine):
    assert mine.control_block.owner_request() is None
    with segment.open_writable(mine.name) as other, other.writing() as control_block:
        assert control_block.write_request(10, priority=-3) == 1
        assert control_block.write_request(trim=True) == 2
    request = mine.control_block.owner_request()
    assert (request["revision"], request["limit_bytes"]) == (2, 10)
    assert (request["priority"], request["trim_revision"]) == (-3, 2)
    assert request["writer_pid"] == os.getpid()
    assert request["written_ns"] > 0


def test_trim_before_any_limit_requests_no_limit(mine):
    mine.control_block.write_request(trim=True)
    assert mine.control_block.owner_request()["limit_bytes"] is None


@pytest.mark.parametrize("limit_bytes", [0, 1, 1 << 30, (1 << 63) - 1])
def test_instance_acknowledges_a_request(name, limit_bytes):
    with Owner(name, "apply"):
        answer = segment.request(name, limit_bytes=limit_bytes, wait_s=DEADLINE_S)
        assert (answer.state, answer.effective_limit_bytes) == ("applied", limit_bytes)
        assert answer.is_of_the_request
        info = segment.inspect(name)
        assert info.request["limit_bytes"] == limit_bytes
        assert info.ack["revision"] == info.request["revision"] == 1


@pytest.mark.slow
def test_request_waits_until_the_limit_is_effective(name):
    with Owner(name, "late"):
        assert segment.request(name, limit_bytes=1 << 20, wait_s=DEADLINE_S).state == "applied"
    with Owner(name, "shrink"):

        def answered() -> segment.Ack | None:
            answer = segment.request(name, limit_bytes=1 << 20, wait_s=0.05)
            return answer if answer.is_of_the_request else None

        answer = wait_until(answered)
        assert answer.state == "shrinking"
        assert answer.over_bytes > 0
    with Owner(name, "refuse"):
        answer = segment.request(name, limit_bytes=1 << 20, wait_s=DEADLINE_S)
        assert (answer.state, answer.reason) == ("refused", "it is only a test")
        assert answer.effective_limit_bytes == CAPACITY_BYTES
    with Owner(name, "mute"):
        answer = segment.request(name, limit_bytes=1 << 20, wait_s=0.05)
        assert answer.state == "none"
        assert not answer.is_of_the_request


def test_request_to_a_missing_or_dead_instance_raises(name):
    with pytest.raises(SegmentNotFoundError, match=name):
        segment.request(name, limit_bytes=1)
    forge(name, start_time_ticks=1)
    before = (SHM / name).read_bytes()
    with pytest.raises(SegmentDeadError, match="nothing was changed"):
        segment.request(name, limit_bytes=1)
    assert (SHM / name).read_bytes() == before


@pytest.mark.slow
def test_wait_ends_when_the_instance_dies(name):
    with Owner(name, "mute") as owner:

        def kill_owner() -> None:
            wait_until(lambda: segment.inspect(name).request["revision"] == 1)
            owner.kill()

        killer = threading.Thread(target=kill_owner)
        killer.start()
        with pytest.raises(SegmentDeadError, match="did not answer"):
            segment.request(name, limit_bytes=1, wait_s=DEADLINE_S)
        killer.join()


def test_bell_wakes_a_waiting_owner(mine):
    seen = mine.control_block.bell
    assert not mine.control_block.wait_bell(seen, 0.01)
    ringer = threading.Timer(0.05, lambda: mine.control_block.write_request(1))
    ringer.start()
    assert mine.control_block.wait_bell(seen, DEADLINE_S)
    ringer.join()
    assert mine.control_block.wait_bell(seen, 0)  # a ring is never lost


def test_signal_handler_interrupts_a_wait(mine):
    import signal

    class RangError(Exception):
        pass

    def handler(*_: object) -> None:
        raise RangError

    before = signal.signal(signal.SIGALRM, handler)

    def wait() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        mine.control_block.wait_ack(1, None)

    try:
        with pytest.raises(RangError):
            wait()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.slow
def test_releasing_a_waiters_control_block_is_safe(name):
    made = segment.create(name, engine="test")
    reader = segment.open_readonly(name)
    outcome: list[bool] = []

    def wait() -> None:
        with suppress(SegmentError):
            outcome.append(reader.control_block.wait_ack(1, 0.3))

    waiter = threading.Thread(target=wait)
    waiter.start()
    reader.close()
    made.close()
    waiter.join()
    assert outcome in ([False], [])  # [] if it was closed before the wait began


# ------------------------------------------------------------------------------ malformed bytes


def test_random_bytes_are_rejected():
    random_bytes = random.Random(2)
    for _ in range(500):
        data = random_bytes.randbytes(random_bytes.choice([0, 1, 11, 12, 100, 4095, 4096, 300_000]))
        with pytest.raises(SegmentFormatError):
            _vmm.ControlBlock.open(aligned(data) if data else bytearray())
        with pytest.raises(SegmentFormatError):
            _vmm.ControlBlock.open(aligned(_vmm.CONTROL_BLOCK_MAGIC + data))


def test_every_truncation_is_rejected(name):
    data = forge(name)
    for size in [*range(0, 700, 7), 4095, 4096, 4097, len(data) - 1]:
        (SHM / name).write_bytes(data[:size])
        with pytest.raises(SegmentError):
            segment.open_readonly(name).close()
        info = found(name)
        assert info is None or info.status == "unreadable"
    (SHM / name).write_bytes(data)
    assert found(name).status == "alive"


@pytest.mark.slow
def test_every_flipped_bit_of_the_header_is_detected(name):
    data = aligned(forge(name))
    for bit in range(_vmm.CONTROL_BLOCK_HEADER_BYTES * 8):
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(SegmentFormatError):
            _vmm.ControlBlock.open(data)
        data[bit // 8] ^= 1 << bit % 8
    _vmm.ControlBlock.open(data).release()


def test_random_bytes_after_the_header_are_read_safely(name):
    """The part that changes has no checksum: any bytes in it must read as some values."""
    data = bytearray(forge(name))
    noise = random.Random(3)
    for _ in range(200):
        data[_vmm.CONTROL_BLOCK_HEADER_BYTES : 4096] = noise.randbytes(
            4096 - _vmm.CONTROL_BLOCK_HEADER_BYTES
        )
        (SHM / name).write_bytes(data)
        info = segment.inspect(name)
        assert info.header["state"] in {"alive", "closing", "unknown"}
        assert info.ack["state"] in {"none", "applied", "shrinking", "refused", "unknown"}
        assert isinstance(info.ack["reason"], str)
    with segment.open_writable(name) as other, other.writing() as control_block:
        revision = control_block.write_request(5)  # wraps, if it must
        assert control_block.read_request()["revision"] == revision
        assert control_block.read_request()["limit_bytes"] == 5


def test_unsuitable_buffers_are_rejected():
    with pytest.raises(InvalidArgumentError, match="needs"):
        _vmm.ControlBlock.create(
            bytearray(4096),
            name="a",
            engine="",
            model="",
            devices=[("host", 1)],
            uuid=bytes(16),
            pid=1,
            start_time_ticks=1,
            boot_id=bytes(16),
            pid_namespace=1,
            uid=0,
            created_realtime_ns=0,
        )
    with pytest.raises(TypeError):
        _vmm.ControlBlock.open("text")


@pytest.mark.parametrize("field", ["uuid", "boot_id"])
def test_identities_of_wrong_length_are_rejected(name, field):
    with pytest.raises(InvalidArgumentError, match="16 bytes"):
        forge(name, **{field: b"short"})


def test_unknown_fields_are_named(mine):
    with pytest.raises(InvalidArgumentError, match="no_such"):
        mine.control_block.publish_usage(no_such=1)
    with pytest.raises(InvalidArgumentError, match="no_such"):
        mine.control_block.publish_ack(1, "no_such", effective_limit_bytes=0)
    with pytest.raises(InvalidArgumentError, match="no_such"):
        mine.control_block.add_counter("no_such")


@pytest.mark.parametrize("priority", [1001, -1001, 5_000_000])
def test_priority_out_of_bounds_is_rejected(name, mine, priority):
    with pytest.raises(InvalidArgumentError, match=f"priority={priority} .* -1000 to 1000"):
        segment.request(name, priority=priority)
    with segment.open_writable(name) as open_, pytest.raises(InvalidArgumentError, match="-1000"):
        open_.control_block.write_request(priority=priority)
    assert mine.control_block.read_request()["revision"] == 0


def test_priority_bound_matches_native_code() -> None:
    """Said to those who read the configuration too, who do not load native code."""
    assert units.MAX_PRIORITY == _vmm.MAX_PRIORITY


def test_nan_as_wait_is_rejected(name, mine):
    """It was never over, and the loop that waits never slept."""
    with pytest.raises(InvalidArgumentError, match="wait_s=nan"):
        segment.request(name, limit_bytes=1, wait_s=float("nan"))
    assert mine.control_block.read_request()["revision"] == 0


def test_name_reused_during_a_check_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The owner leaves, and another one starts, while somebody holds the lock to look at it."""
    name = f"kvelastic_anew_{os.getpid()}"
    made = []
    look = segment_listing._inspect

    with Owner(name) as former:

        def inspect_late(fd: int, name: str) -> segment.SegmentInfo:
            monkeypatch.undo()
            former.end()
            made.append(segment.create(name, engine="b"))
            return look(fd, name)

        monkeypatch.setattr(segment_listing, "_inspect", inspect_late)
        segment_listing.remove_if_reapable(name)
        with made[0]:
            assert segment.inspect(name).header["engine"] == "b"
