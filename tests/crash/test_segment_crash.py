"""Segments under SIGKILL and SIGSTOP: nobody waits for the dead, and nothing is left behind."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
from processes import LineProgram
from segment_owner import Owner
from waiting import DEADLINE_S, wait_until

from kvelastic.errors import SegmentBusyError, SegmentNotFoundError
from kvelastic.shared import liveness, segment

SHM = Path("/dev/shm")


@pytest.fixture
def name():
    unique = f"kvcrash_{os.getpid()}_{random.randrange(1 << 40):x}"
    yield unique
    (SHM / unique).unlink(missing_ok=True)


# A writer that dies, or stops, in the middle of a request with the writers' lock in its hand.
HALF_WRITER = """
import sys
from kvelastic.shared import segment
with segment.open_writable(sys.argv[1]) as other, other.writing() as record:
    record.write_half_request(123)
    print("half", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("waited_for", [True, False], ids=["waited-for", "zombie"])
def test_segment_of_a_killed_owner_is_reaped(name, waited_for):
    with Owner(name) as owner:
        owner.kill(wait=waited_for)
        assert segment.inspect(name).status == "dead"
        assert name in segment.reap()
        assert not (SHM / name).exists()
        with pytest.raises(SegmentNotFoundError):
            segment.request(name, limit_bytes=1)


def test_name_of_a_killed_instance_is_reusable_immediately(name):
    first = Owner(name)
    first.kill()
    with Owner(name) as second:
        assert segment.inspect(name).header["pid"] == second.pid
        assert segment.request(name, limit_bytes=5, wait_s=DEADLINE_S).state == "applied"
    first.__exit__(None)


@pytest.mark.parametrize("with_thread", [False, True])
def test_process_with_exited_main_thread_is_alive(with_thread):
    """The leader of a thread group is a zombie in /proc while its other threads go on."""
    program = """
import ctypes, sys, threading
if sys.argv[1] == "True":
    threading.Thread(target=sys.stdin.read).start()
print("here", flush=True)
ctypes.CDLL(None).syscall(60, 0)  # exit of this thread only
"""
    with LineProgram("-c", program, str(with_thread)) as process:
        ticks = liveness.start_time_ticks(process.pid)
        assert process.read() == "here"
        stat = Path(f"/proc/{process.pid}/stat")
        wait_until(
            lambda: stat.read_text().rsplit(")", 1)[1].split()[0] == "Z",
            "the kernel has not carried the exit out",
        )
        assert liveness.start_time_ticks(process.pid) == (ticks if with_thread else None)


def test_writer_killed_mid_request_changes_nothing(name):
    with Owner(name):
        assert segment.request(name, limit_bytes=7 << 20, wait_s=DEADLINE_S).state == "applied"
        with LineProgram("-c", HALF_WRITER, name) as writer:
            assert writer.read() == "half"
        # The old request is whole, for the instance and for anyone who looks ...
        info = segment.inspect(name)
        assert info.request["whole"]
        assert (info.request["revision"], info.request["limit_bytes"]) == (1, 7 << 20)
        # ... and the next writer finds neither its lock nor its rubbish in his way.
        answer = segment.request(name, limit_bytes=9 << 20, wait_s=DEADLINE_S)
        assert (answer.state, answer.revision) == ("applied", 2)
        assert answer.effective_limit_bytes == 9 << 20


@pytest.mark.slow
def test_writer_stopped_mid_request_does_not_stall_instance(name):
    with Owner(name, "publish") as owner, LineProgram("-c", HALF_WRITER, name) as writer:
        assert writer.read() == "half"
        os.kill(writer.pid, signal.SIGSTOP)
        before = segment.inspect(name).usage["updated_ns"]
        wait_until(
            lambda: segment.inspect(name).usage["updated_ns"] != before,
            "the owner stands still",
        )
        with pytest.raises(SegmentBusyError, match="lock"):
            segment.request(name, limit_bytes=1)
        assert segment.inspect(name).request["revision"] == 0
        # Nor does it keep the instance from ending.
        assert owner.end() == 0
        assert not (SHM / name).exists()


def test_stopped_owner_acknowledges_request_after_resuming(name):
    with Owner(name) as owner:
        owner.stop()
        answer = segment.request(name, limit_bytes=3 << 20, wait_s=0.1)
        assert answer.state == "none"
        info = segment.inspect(name)
        assert info.status == "alive"
        assert name not in segment.reap()
        assert info.request["limit_bytes"] == 3 << 20
        owner.go_on()
        with segment.open_readonly(name) as reader:
            assert reader.control_block.wait_ack(answer.requested_revision, DEADLINE_S)
        assert segment.inspect(name).ack["effective_limit_bytes"] == 3 << 20


@pytest.mark.slow
def test_usage_is_consistent_after_writer_killed_or_stopped(name):
    for _ in range(10):
        with Owner(name, "publish") as owner:
            owner.stop()  # at a random point of publishing, most likely
            assert segment.inspect(name).usage["whole"]
            owner.kill()
            usage = segment.inspect(name).usage
            assert usage["whole"]
            assert usage["mapped_bytes"] == 96 << 20
            assert name in segment.reap()


STARTER = """
import sys
from kvelastic.shared import segment
print("here", flush=True)
while True:
    with segment.create(sys.argv[1], engine="loop"):
        pass
"""


@pytest.mark.slow
def test_instance_killed_during_start_is_reaped(name):
    moments = random.Random(5)
    for _ in range(12):
        with LineProgram("-c", STARTER, name) as process:
            assert process.read() == "here"
            time.sleep(moments.random() * 0.01)  # the moment: any will do
        if (SHM / name).exists():
            assert segment.inspect(name).status == "dead"  # whole, never half a segment
        segment.reap()
        left = [path.name for path in SHM.iterdir() if f"_{process.pid}_" in path.name]
        assert left == []
        assert not (SHM / name).exists()
