"""Ledgers: one a device, whoever comes and goes; no other file is misread."""

from __future__ import annotations

import logging
import mmap
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from ledger_instance import Instance
from processes import LineProgram, run_python
from waiting import DEADLINE_S, wait_until

from kvelastic import _vmm
from kvelastic.errors import (
    DeviceUnavailableError,
    GuaranteeError,
    InvalidArgumentError,
    KvelasticError,
    LedgerError,
    LedgerForeignError,
    SegmentBusyError,
    SegmentFormatError,
)
from kvelastic.shared import ledger, segment
from kvelastic.shared.liveness import Liveness, ProcessIdentity
from kvelastic.units import format_size

MIB = 1 << 20
PAGE = 2 * MIB
CAPACITY = 64 * MIB
GROUP = f"test-{os.getpid()}"


@pytest.fixture
def device() -> Iterator[str]:
    """A device of a test's own, whose ledger is gone when the test is over."""
    name = f"dev-{os.getpid()}-{random.randrange(1 << 40):x}"
    path = ledger.ledger_path(GROUP, name)
    yield name
    left = path.exists() or path.is_symlink()
    if left:
        path.rmdir() if path.is_dir() else path.unlink()
    assert not left, f"{path} is left behind"


def join(device: str, **changes: Any) -> ledger.JoinedLedger:
    fields: dict[str, Any] = {
        "group": GROUP,
        "capacity_bytes": CAPACITY,
        "name": "mine",
        "uuid": bytes(range(16)),
    }
    return ledger.join(device, **(fields | changes))


def found(device: str) -> ledger.LedgerInfo | None:
    """The ledger as everybody sees it; a foreign or unreadable one is known by its file's name."""
    path = ledger.ledger_path(GROUP, device)
    named = (device, path.name.removeprefix(".kvelastic_ledger_"))
    return next((info for info in ledger.list_ledgers() if info.device in named), None)


MEMBER = """
import sys
from kvelastic.shared import ledger
device, group, min_bytes = sys.argv[1:4]
with ledger.join(device, group=group, capacity_bytes=64 << 20, name="other", uuid=bytes(16),
                 min_bytes=int(min_bytes), priority=3) as joined:
    print(joined.member.grant(8, 2 << 20), flush=True)
    sys.stdin.read()
"""


class Other(LineProgram):
    """A member in a process of its own that holds eight pages."""

    def __init__(self, device: str, min_bytes: int = 0) -> None:
        super().__init__("-c", MEMBER, device, GROUP, str(min_bytes))
        assert self.read() == "8"


# ------------------------------------------------------------------------------- come and go


def test_first_member_creates_and_last_removes_the_ledger(device):
    path = ledger.ledger_path(GROUP, device)
    assert not path.exists()
    with join(device) as first:
        assert first.path == path
        assert path.stat().st_mode & 0o777 == 0o600
        with join(device):
            assert len(found(device).members) == 2
        assert len(found(device).members) == 1
        with join(device):
            first.close()
            first.close()
            assert path.exists()
            assert len(found(device).members) == 1
        assert not path.exists()
    assert found(device) is None


def test_umask_does_not_change_the_ledger_mode(device):
    before = os.umask(0o777)
    try:
        with join(device), join(device):
            assert ledger.ledger_path(GROUP, device).stat().st_mode & 0o777 == 0o600
    finally:
        os.umask(before)


def test_ledger_lists_members_and_totals(device):
    with join(device, min_bytes=3 * PAGE, priority=-7) as mine, Other(device) as other:
        assert mine.member.grant(5, PAGE) == 5
        mine.member.publish(2 * PAGE, PAGE, PAGE, PAGE, active=True)
        info = found(device)
        assert (info.device, info.group, info.status) == (device, GROUP, "readable")
        assert info.capacity_bytes == CAPACITY
        assert info.granted_bytes == 13 * PAGE
        assert info.guaranteed_bytes == 3 * PAGE
        assert info.free_bytes == CAPACITY - 13 * PAGE
        me, you = info.members
        assert (me.name, me.uuid, me.pid, me.status) == (
            "mine",
            bytes(range(16)),
            os.getpid(),
            "alive",
        )
        assert (me.granted_bytes, me.min_bytes, me.priority) == (5 * PAGE, 3 * PAGE, -7)
        assert (me.in_use_bytes, me.evictable_bytes, me.parked_bytes) == (2 * PAGE, PAGE, PAGE)
        assert me.page_bytes == PAGE
        assert (you.name, you.pid, you.priority) == ("other", other.pid, 3)
        assert you.granted_bytes == 8 * PAGE

        def is_shown() -> bool:
            mine.member.request_memory(64 * PAGE)  # which counts for 250 ms
            info = found(device)
            return info is not None and info.asked_bytes == 64 * PAGE

        wait_until(is_shown)
        mine.member.end_memory_request()
        assert found(device).asked_bytes == 0
        mine.member.set_others(4 * PAGE)
        assert found(device).free_bytes == CAPACITY - 17 * PAGE
        assert other.finish() == 0


def test_groups_have_separate_ledgers(device):
    with join(device) as mine, join(device, group=GROUP + "-b", capacity_bytes=PAGE) as alone:
        assert mine.path != alone.path
        assert mine.member.grant(99, PAGE) == 32
        assert alone.member.grant(99, PAGE) == 1
    assert not alone.path.exists()


def test_group_and_device_names_give_distinct_paths():
    pairs = [("a_b", "c"), ("a", "b_c"), ("a", "b-c"), ("a-b", "c"), ("a", "c"), ("a_", "c")]
    assert len({ledger.ledger_path(*pair) for pair in pairs}) >= len(pairs) - 1
    assert ledger.ledger_path("a", "../../etc/x").parent == Path("/dev/shm")


def test_capacity_of_the_first_member_counts(device, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("kvelastic"), "propagate", True)
    with join(device) as first, caplog.at_level(logging.WARNING, logger="kvelastic"):
        with join(device):
            assert caplog.messages == []
        with join(device, capacity_bytes=3 * CAPACITY) as second:
            assert second.member.capacity_bytes == first.member.capacity_bytes == CAPACITY
            # pytest listens at a logger that did not propagate before, and at the root.
            (warning,) = set(caplog.messages)
            assert device in warning
            assert "64" in warning
            assert "192" in warning
            assert second.member.grant(99, PAGE) == CAPACITY // PAGE


def test_forked_child_cannot_close_its_parents_membership(device):
    with join(device) as mine:
        mine.member.grant(3, PAGE)
        child = os.fork()
        if child == 0:
            mine.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert mine.path.exists()
        assert mine.member.granted_bytes == found(device).granted_bytes == 3 * PAGE


FORKER = """
import os, sys
from kvelastic.shared import ledger
def main():
    joined = ledger.join(sys.argv[1], group=sys.argv[2], capacity_bytes=64 << 20, name="n",
                        uuid=bytes(16))
    member = joined.member
    member.grant(3, 2 << 20)
    child = os.fork()
    if child == 0:
        del member, joined
        return
    status = os.waitpid(child, 0)[1]
    print(status, member.granted_bytes, len(ledger.list_ledgers()) > 0, joined.path.exists())
    joined.close()
main()
"""


def test_exit_of_forked_child_keeps_the_parents_membership(device):
    """An engine forks its workers: what they drop, or end with, is still the parent's."""
    assert run_python("-c", FORKER, device, GROUP).stdout == f"0 {3 * PAGE} True True\n"


def test_join_of_a_full_ledger_raises(device):
    with ExitStack() as stack, Other(device) as other:
        for _ in range(_vmm.LEDGER_SLOTS - 1):
            last = stack.enter_context(join(device))
        with pytest.raises(LedgerError, match="128 slots"):
            join(device)
        last.close()
        join(device).close()
        stack.enter_context(join(device))
        with pytest.raises(LedgerError, match="128 slots"):
            join(device)
        other.kill()  # whoever joins looks for the dead first
        stack.enter_context(join(device))
        assert len(found(device).members) == _vmm.LEDGER_SLOTS


def test_join_leaves_no_file_open(device):
    before = len(list(Path("/proc/self/fd").iterdir()))
    with join(device), join(device):
        for _ in range(3):
            with pytest.raises(GuaranteeError):
                join(device, min_bytes=2 * CAPACITY)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


CHURN = """
import os, sys
from pathlib import Path
from kvelastic.shared import ledger
device, group, rounds, token = sys.argv[1:5]
what = {"group": group, "capacity_bytes": 2 << 20, "name": "n", "uuid": bytes(16)}
for _ in range(int(rounds)):
    with ledger.join(device, **what) as joined:
        # The ledger of the name is the one that this process is in, as long as it is in it.
        assert os.fstat(joined._fd).st_ino == joined.path.stat().st_ino
        info = next(info for info in ledger.list_ledgers() if info.device == device)
        assert os.getpid() in [member.pid for member in info.members]
        # And there is one page, for one of all of them.
        if joined.member.grant(1, 2 << 20):
            os.close(os.open(token, os.O_CREAT | os.O_EXCL))
            Path(token).unlink()
            joined.member.give_back(1, 2 << 20)
print("done")
"""


@pytest.mark.slow
def test_concurrent_joins_and_leaves_share_one_ledger(device, tmp_path):
    """Of a last leaver and two joiners nobody ends in a ledger that the others do not see."""
    arguments = [device, GROUP, "120", str(tmp_path / "token")]
    children = [
        subprocess.Popen(
            [sys.executable, "-c", CHURN, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(5)
    ]
    for child in children:
        said, trouble = child.communicate()
        assert (said, trouble) == ("done\n", "")
    assert not ledger.ledger_path(GROUP, device).exists()
    assert not list(Path("/dev/shm").glob(".kvelastic_new_ledger_*"))


def test_join_recreates_a_ledger_removed_meanwhile(device, monkeypatch):
    """The race of the last leaver and a joiner, step by step."""
    last = join(device)
    real = ledger._open_or_make
    opened = []

    def open_then_remove(*arguments: object) -> int:
        fd = real(*arguments)
        opened.append(fd)
        if len(opened) == 1:
            last.close()  # between the opening and the lock
            assert not last.path.exists()
        return fd

    monkeypatch.setattr(ledger, "_open_or_make", open_then_remove)
    with join(device) as mine:
        assert len(opened) == 2
        assert os.fstat(mine._fd).st_ino == mine.path.stat().st_ino
        assert [member.name for member in found(device).members] == ["mine"]


# ---------------------------------------------------------------------------------- guarantees


def test_excessive_guarantee_is_refused_with_room_and_holders(device):
    with join(device, min_bytes=40 * MIB) as mine, Other(device, 10 * MIB):
        with pytest.raises(GuaranteeError) as refused:
            join(device, min_bytes=14 * MIB + 1)
        for number in (14 * MIB + 1, 14 * MIB, 40 * MIB, 10 * MIB, CAPACITY):
            assert format_size(number) in str(refused.value)
        assert [member.min_bytes for member in found(device).members] == [40 * MIB, 10 * MIB]
        with join(device, min_bytes=14 * MIB):
            assert found(device).guaranteed_bytes == CAPACITY
            with pytest.raises(GuaranteeError):
                mine.member.set_min(40 * MIB + 1)
            assert mine.member.min_bytes == 40 * MIB
        mine.member.set_min(54 * MIB)


@pytest.mark.parametrize("priority", [1001, -1001])
def test_priority_out_of_bounds_is_rejected(device, priority):
    with pytest.raises(InvalidArgumentError, match=f"priority={priority} .* -1000 to 1000"):
        join(device, priority=priority)
    assert found(device) is None
    with join(device, priority=1000) as joined:
        with pytest.raises(InvalidArgumentError, match=f"priority={priority}"):
            joined.member.set_priority(priority)
        assert joined.member.priority == 1000


def test_rejected_first_member_leaves_no_ledger(device):
    with pytest.raises(GuaranteeError):
        join(device, min_bytes=CAPACITY + 1)
    assert not ledger.ledger_path(GROUP, device).exists()


def test_dead_member_guarantees_nothing(device):
    with Other(device, 60 * MIB) as other, join(device) as mine:
        with pytest.raises(GuaranteeError):
            mine.member.set_min(5 * MIB)
        other.kill()
        mine.member.set_min(5 * MIB)
        assert [member.pid for member in found(device).members] == [os.getpid()]


def instance(device_group: str, **environ: str) -> Instance:
    return Instance(
        KVELASTIC_LEDGER=device_group,
        KVELASTIC_HOST_MEMORY="64M",
        KVELASTIC_PAGE_PREALLOC_ENABLED="false",
        **environ,
    )


@pytest.mark.slow
def test_guarantee_and_priority_are_set_and_changed():
    group = f"{GROUP}-requests"
    path = ledger.ledger_path(group, "host")

    def standing() -> list[tuple[int, int]]:
        (info,) = [info for info in ledger.list_ledgers() if info.group == group]
        return [(member.min_bytes, member.priority) for member in info.members]

    with instance(group, KVELASTIC_MIN="40M", KVELASTIC_PRIORITY="5") as a, instance(group) as b:
        assert standing() == [(40 * MIB, 5), (0, 0)]
        with pytest.raises(RuntimeError, match=r"GUARANTEE.*26.00 MiB.*24.00 MiB.*64.00 MiB.*40"):
            instance(group, KVELASTIC_MIN="27M")  # 26 MiB in whole pages
        assert standing() == [(40 * MIB, 5), (0, 0)]

        before = segment.request(b.name, limit_bytes=32 * MIB, priority=2, wait_s=DEADLINE_S)
        assert (before.state, before.min_bytes, before.priority) == ("applied", 0, 2)
        # A refused request changes nothing, also not what could have been had of it.
        answer = segment.request(
            b.name, limit_bytes=27 * MIB, min_bytes=27 * MIB, priority=9, wait_s=DEADLINE_S
        )
        assert answer.state == "refused"
        for number in (26 * MIB, 24 * MIB, 40 * MIB, 64 * MIB):
            assert format_size(number) in answer.reason
        assert (answer.min_bytes, answer.priority) == (0, 2)
        assert answer.effective_limit_bytes == 32 * MIB
        assert standing() == [(40 * MIB, 5), (0, 2)]

        answer = segment.request(b.name, min_bytes=24 * MIB, priority=-3, wait_s=DEADLINE_S)
        assert (answer.state, answer.min_bytes, answer.priority) == ("applied", 24 * MIB, -3)
        assert answer.effective_limit_bytes == 32 * MIB
        assert standing() == [(40 * MIB, 5), (24 * MIB, -3)]
        assert segment.request(a.name, min_bytes=0, wait_s=DEADLINE_S).state == "applied"
        # Above the limit that was refused, and below the one in force.
        assert segment.request(b.name, min_bytes=28 * MIB, wait_s=DEADLINE_S).state == "applied"
        assert standing() == [(0, 5), (28 * MIB, -3)]
        a.kill()
        b.close()
    ledger.reap()
    segment.reap()
    assert not path.exists()


# ----------------------------------------------------------------------- what is not to be used


def refused(device: str, kind: type[KvelasticError], status: str, match: str) -> None:
    """Nobody joins it, nobody takes it for a ledger, and nobody changes or removes it."""
    path = ledger.ledger_path(GROUP, device)
    before = path.read_bytes() if path.is_file() and not path.is_symlink() else None
    with pytest.raises(kind, match=match):
        join(device)
    info = found(device)
    if info is not None:
        assert info.status == status
        assert info.problem
        assert info.members == ()
        assert info.granted_bytes == info.capacity_bytes == 0
    assert path not in ledger.reap()
    assert path.exists() or path.is_symlink()
    if before is not None:
        assert path.read_bytes() == before
        assert info is not None
    path.rmdir() if path.is_dir() else path.unlink()


def ledger_file_bytes(device: str) -> bytearray:
    """The bytes of a ledger with a member that holds something."""
    with join(device) as mine:
        mine.member.grant(3, PAGE)
        return bytearray(mine.path.read_bytes())


def test_ledger_of_another_user_is_rejected(device, monkeypatch):
    path = ledger.ledger_path(GROUP, device)
    path.write_bytes(ledger_file_bytes(device))
    if os.geteuid() == 0:
        os.chown(path, 12345, 12345)
        owner = 12345
    else:
        owner = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    refused(device, LedgerForeignError, "foreign", f"user {owner}")


def test_unreadable_ledger_of_another_user_is_rejected(device, monkeypatch):
    path = ledger.ledger_path(GROUP, device)
    path.write_bytes(ledger_file_bytes(device))
    real = os.open

    def guarded(name: object, *arguments: object, **named: object) -> int:
        if str(name) == str(path):
            raise PermissionError(13, "Permission denied")
        return real(name, *arguments, **named)

    monkeypatch.setattr(os, "open", guarded)
    refused(device, LedgerForeignError, "foreign", "run as that user, or set KVELASTIC_LEDGER")


def test_ledger_of_another_version_is_rejected(device):
    content = ledger_file_bytes(device)
    for version in (0, _vmm.LEDGER_ABI_VERSION + 1, 0xFFFFFFFF):
        content[8:12] = version.to_bytes(4, "little")
        ledger.ledger_path(GROUP, device).write_bytes(content)
        refused(device, LedgerError, "unreadable", f"version {version}.*KVELASTIC_LEDGER")


@pytest.mark.parametrize("size", [0, 1, 11, 12, 255, 256, 4096, -1])
def test_truncated_ledger_is_rejected(device, size):
    ledger.ledger_path(GROUP, device).write_bytes(ledger_file_bytes(device)[:size])
    refused(device, LedgerError, "unreadable", "KVELASTIC_LEDGER")


def test_corrupt_header_byte_is_rejected(device):
    """With the file in place all the time: that is what a reader meets."""
    content = ledger_file_bytes(device)
    path = ledger.ledger_path(GROUP, device)
    path.write_bytes(content)
    assert found(device).status == "readable"
    for at in range(0, 256, 3):
        wrong = bytearray(content)
        wrong[at] ^= 0x40
        path.write_bytes(wrong)
        with pytest.raises(LedgerError):
            join(device)
        assert found(device).status == "unreadable"
        assert path not in ledger.reap()
    path.unlink()


@pytest.mark.parametrize(
    "content",
    [
        bytes(_vmm.LEDGER_BYTES),
        random.Random(1).randbytes(_vmm.LEDGER_BYTES),
        b"KVLEDGER" + random.Random(2).randbytes(_vmm.LEDGER_BYTES),
        b"KVLEDGER" + b"\x01\0\0\0" + bytes(_vmm.LEDGER_BYTES),
    ],
    ids=["zeros", "garbage", "a good first word", "a good version"],
)
def test_random_ledger_content_is_rejected(device, content):
    ledger.ledger_path(GROUP, device).write_bytes(content)
    refused(device, LedgerError, "unreadable", "KVELASTIC_LEDGER")


def test_ledger_path_must_be_a_regular_file(device, tmp_path):
    path = ledger.ledger_path(GROUP, device)
    target = tmp_path / "target"
    target.write_bytes(ledger_file_bytes(device))
    path.symlink_to(target)
    refused(device, LedgerError, "", "cannot open")
    path.mkdir()
    refused(device, LedgerError, "", str(path))
    os.mkfifo(path)
    refused(device, LedgerError, "", str(path))


def test_full_shared_memory_is_reported(device, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(LedgerError, match="No space left"):
        join(device)
    assert not list(Path("/dev/shm").glob(f".kvelastic_new_ledger_{os.getpid()}_*"))


# ------------------------------------------------------------------------- the dead and the rest


def test_grants_of_a_dead_member_are_released(device):
    path = ledger.ledger_path(GROUP, device)
    with join(device) as mine, Other(device) as other:
        assert mine.member.room(PAGE) == 24
        other.kill()
        info = found(device)
        assert [member.status for member in info.members] == ["alive", "dead"]
        assert info.granted_bytes == 8 * PAGE
        assert path not in ledger.reap()
        assert found(device).granted_bytes == 0
        assert mine.member.room(PAGE) == 32


def test_ledger_of_dead_members_is_removed(device):
    path = ledger.ledger_path(GROUP, device)
    with Other(device) as one, Other(device) as two:
        one.kill()
        assert path not in ledger.reap()
        two.kill()
        assert [member.status for member in found(device).members] == ["dead"]
        assert path in ledger.reap()
        assert not path.exists()
        assert path not in ledger.reap()


def test_last_leaver_removes_ledger_with_dead_members(device):
    with Other(device) as other:
        other.kill()
        with join(device) as mine:
            assert mine.member.grant(99, PAGE) == 32
    assert found(device) is None
    with Other(device) as other, join(device):
        other.kill()
    assert found(device) is None


def raw_join(memory: mmap.mmap, **changes: Any) -> _vmm.LedgerMember:
    me = ProcessIdentity.of_this_process()
    fields: dict[str, Any] = {
        "name": "raw",
        "uuid": bytes(16),
        "pid": me.pid,
        "start_time_ticks": me.start_time_ticks,
        "pid_namespace": me.pid_namespace,
        "uid": me.uid,
    }
    member = _vmm.LedgerMember.join(memory, **(fields | changes))
    assert member is not None
    return member


def one_that_died(mine: ledger.JoinedLedger, **changes: object) -> None:
    """A member with four pages whose process has ended without a word."""
    child = os.fork()
    if child == 0:
        try:
            gone = raw_join(mine._memory, **{"path": str(mine.path), "fd": mine._fd} | changes)
            os._exit(0 if gone.grant(4, PAGE) == 4 else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0


def test_grants_of_a_dead_container_are_released(device):
    with join(device) as mine:
        one_that_died(mine, pid=1 << 21, pid_namespace=12)
        assert [member.status for member in found(device).members] == ["alive", "dead"]
        assert mine.member.room(PAGE) == 28
        ledger.reap()
        assert mine.member.room(PAGE) == 32


def test_member_of_unknown_liveness_is_kept(device):
    with join(device) as mine:
        one_that_died(mine)
        with mmap.mmap(mine._fd, 0) as memory, Path("/proc/self/status").open("rb") as no_tmpfs:
            for fd in (-1, no_tmpfs.fileno()):
                entries = _vmm.read_ledger(memory, fd)["members"]
                assert [entry["status"] for entry in entries] == ["unknown", "unknown"]
                assert _vmm.ledger_reap(memory, fd) == 0
        assert mine.member.room(PAGE) == 28
    assert found(device) is None  # who leaves can ask


def test_recycled_pid_is_not_the_member(device):
    with join(device) as mine:
        me = ProcessIdentity.of_this_process()
        one_that_died(mine, pid=me.pid, start_time_ticks=me.start_time_ticks + 1)
        assert [member.status for member in found(device).members] == ["alive", "dead"]
        ledger.reap()
        assert [member.name for member in found(device).members] == ["mine"]


def test_running_member_without_liveness_lock_is_alive(device):
    with join(device) as mine:
        me = ProcessIdentity.of_this_process()
        one_that_died(mine, pid=me.pid, start_time_ticks=me.start_time_ticks)
        assert [member.status for member in found(device).members] == ["alive", "alive"]
        ledger.reap()
        assert mine.member.room(PAGE) == 28
    ledger.ledger_path(GROUP, device).unlink()


THREAD_GOES_ON = """
import ctypes, sys, threading
from kvelastic.shared import ledger
device, group = sys.argv[1:3]
joined = ledger.join(device, group=group, capacity_bytes=64 << 20, name="other", uuid=bytes(16))
assert joined.member.grant(4, 2 << 20) == 4
threading.Thread(target=sys.stdin.read).start()
print("here", flush=True)
ctypes.CDLL(None).syscall(60, 0)  # exit of this thread only
"""


def test_member_lives_until_its_last_thread_ends(device):
    """Its memory is there as long as another thread goes on."""
    with LineProgram("-c", THREAD_GOES_ON, device, GROUP) as other:
        assert other.read() == "here"
        stat = Path(f"/proc/{other.pid}/stat")
        wait_until(lambda: stat.read_text().rsplit(")", 1)[1].split()[0] == "Z")
        with join(device) as mine:
            ledger.reap()
            assert [member.status for member in found(device).members] == ["alive", "alive"]
            assert mine.member.room(PAGE) == 28
            other.kill()
            ledger.reap()
            assert mine.member.room(PAGE) == 32


WORKER = """
import sys
from kvelastic.shared import ledger
lives = ledger.hold_as_worker(bytes.fromhex(sys.argv[1]), int(sys.argv[2]))
print(len(lives), flush=True)
sys.stdin.read()
"""


def test_pages_of_a_worker_outlive_its_scheduler(device):
    """What maps the pages still runs: they are not free, and the ledger is not empty."""
    path = ledger.ledger_path(GROUP, device)
    uuid = os.urandom(16)
    with ExitStack() as ends:
        member = MEMBER.replace("bytes(16)", repr(uuid))
        scheduler = ends.enter_context(LineProgram("-c", member, device, GROUP, "0"))
        assert scheduler.read() == "8"
        workers = [
            ends.enter_context(LineProgram("-c", WORKER, uuid.hex(), str(rank))) for rank in (0, 63)
        ]
        for worker in workers:
            assert worker.read() == "1"
        with pytest.raises(SegmentBusyError):
            ledger.hold_as_worker(uuid, 63)
        scheduler.kill()
        assert path not in ledger.reap()
        assert [member.status for member in found(device).members] == ["alive"]
        workers[0].kill()
        assert path not in ledger.reap()
        workers[1].kill()
        assert path in ledger.reap()
        with pytest.raises(LedgerError, match="rank 2"):
            ledger.hold_as_worker(uuid, 2)


def test_ledger_is_readable_through_a_read_only_mapping(device):
    with join(device) as mine, mine.path.open("rb") as file:
        mine.member.grant(3, PAGE)
        with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as memory:
            assert _vmm.read_ledger(memory)["members"][0]["granted_bytes"] == 3 * PAGE
            mine.member.grant(4, PAGE)
            assert _vmm.read_ledger(memory)["members"][0]["granted_bytes"] == 7 * PAGE
            with pytest.raises(BufferError):
                raw_join(memory)
            with pytest.raises(BufferError):
                _vmm.ledger_reap(memory, file.fileno())
        with pytest.raises(SegmentFormatError):
            _vmm.read_ledger(bytes(_vmm.LEDGER_BYTES))


def test_stopped_member_does_not_block_others(device):
    with Other(device, 8 * PAGE) as other, join(device) as mine:
        other.stop()
        assert mine.member.grant(99, PAGE) == 24
        mine.member.give_back(24, PAGE)
        mine.member.set_min(24 * PAGE)
        with join(device) as third:

            def one_page_is_kept() -> bool:
                mine.member.request_memory(PAGE)  # which counts for 250 ms
                granted = third.member.grant(99, PAGE)
                if granted == 24:
                    third.member.give_back(granted, PAGE)
                return granted == 23

            wait_until(one_page_is_kept)
        info = found(device)
        assert [member.status for member in info.members] == ["alive", "alive"]
        ledger.reap()
        assert found(device).granted_bytes == 8 * PAGE
        mine.close()
        other.kill()
    ledger.reap()


def test_stopped_lock_holder_does_not_block_others(device, monkeypatch):
    """A kvctl that was stopped while it looked whether the file can go."""
    import fcntl

    monkeypatch.setattr(ledger, "_LOCK_S", 3600.0)
    with join(device) as mine:
        fd = os.open(mine.path, os.O_RDWR)
        fcntl.flock(fd, fcntl.LOCK_EX)
        with join(device) as other:
            assert other.member.grant(99, PAGE) == 32
        assert ledger.reap() == []
    # Who has the lock removes the file, and else whoever looks next.
    assert ledger.ledger_path(GROUP, device) not in ledger.reap()
    with join(device) as again:
        assert again.member.room(PAGE) == 32
    os.close(fd)
    assert ledger.ledger_path(GROUP, device) in ledger.reap()


def test_death_between_shut_and_unlink_blocks_no_join(device):
    path = ledger.ledger_path(GROUP, device)
    with join(device) as mine:
        kept = os.open(path, os.O_RDWR)
        mine.member.leave()
        with mmap.mmap(kept, 0) as memory:
            assert _vmm.ledger_shut(memory)
        with join(device) as next_one:
            assert next_one.member.grant(99, PAGE) == 32
            assert os.fstat(kept).st_ino != path.stat().st_ino
            mine.close()
            assert found(device).granted_bytes == CAPACITY
    os.close(kept)


def test_without_liveness_locks_joins_are_serialized(device, monkeypatch):
    """Of members there nobody knows whether they live, so they stay until they leave."""
    import fcntl

    monkeypatch.setattr(ledger, "liveness", lambda *_: Liveness.UNKNOWN)
    monkeypatch.setattr(ledger, "_LOCK_S", 0.05)
    with join(device) as mine, mine.path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(LedgerError, match="lock"):
            join(device)


def test_full_ledger_error_names_the_remedy(device):
    with join(device) as mine:
        others = [
            raw_join(mine._memory, path=str(mine.path), fd=mine._fd)
            for _ in range(_vmm.LEDGER_SLOTS - 1)
        ]
        assert mine.path not in ledger.reap()
        assert {member.status for member in found(device).members} == {"alive"}
        with pytest.raises(LedgerError, match=r"all 128 slots .* end an instance .*, or set"):
            join(device)
        others.pop().leave()
        with join(device):
            pass
        for other in others:
            other.leave()


EXITS = """
import sys
from kvelastic.shared import ledger
joined = ledger.join(sys.argv[1], group=sys.argv[2], capacity_bytes=64 << 20, name="other",
                    uuid=bytes(16))
"""


def test_normal_exit_leaves_no_file(device):
    run_python("-c", EXITS, device, GROUP)
    assert found(device) is None


def test_forked_child_is_rejected(device):
    with join(device) as mine:
        mine.member.grant(3, PAGE)
        child = os.fork()
        if child == 0:
            refused = 0
            member = mine.member
            for call in (
                lambda: member.grant(1, PAGE),
                lambda: member.give_back(1, PAGE),
                lambda: member.request_memory(PAGE),
                lambda: member.set_min(0),
                lambda: member.set_priority(9),
                lambda: member.publish(1, 2, 3, 4, True),
                member.leave,
            ):
                with pytest.raises(DeviceUnavailableError, match="forked child"):
                    call()
                refused += 1
            mine.close()
            os._exit(refused)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert mine.member.granted_bytes == 3 * PAGE
        assert [member.status for member in found(device).members] == ["alive"]
