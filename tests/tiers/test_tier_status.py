"""The tier status_file: what is on it is whole or nothing, whoever writes to it and whatever."""

from __future__ import annotations

import os
import random
import stat
import struct
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fake_tiers import FakeStaging, FakeStore
from msgspec.structs import astuple, replace
from processes import LineProgram, run_python
from waiting import DEADLINE_S, wait_until

from kvelastic.errors import (
    IntegrityError,
    InvalidArgumentError,
    SegmentBusyError,
    SegmentDeadError,
    SegmentError,
    SegmentFormatError,
    SegmentNotFoundError,
)
from kvelastic.shared import segment
from kvelastic.shared.segment_listing import SHM_DIR, SegmentInfo, tier_status_name
from kvelastic.shared.status_file import CELL_BYTES, RING, Shown, StatusFile
from kvelastic.shared.tier_status import (
    KIND,
    MOST_AGE_S,
    MOST_BYTES,
    MOST_MODEL_BYTES,
    MOST_PROBLEM_BYTES,
    MOST_REASON_BYTES,
    BlockCounts,
    TierAck,
    TierRequest,
    TiersStatus,
    TierStatus,
    ask,
    check_request,
    post,
    read,
    received,
    tiers_of,
)
from kvelastic.tier_list import MOST_TIERS
from kvelastic.tiers import operator_requests
from kvelastic.tiers.base import Capacity, Selection, Store
from kvelastic.tiers.namespace import Namespace
from kvelastic.tiers.operator_requests import labels_of

TierStatusFile = StatusFile[TiersStatus, TierRequest, TierAck]
TIER = TierStatus(
    "disk", "disk", 10, None, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, None, 14, 15, 16, False, True
)
HOST = replace(TIER, tier="host", kind="host", limit_bytes=0, load_us=250, is_stuck=True)
STATUS = TiersStatus(5, 0, "write_through", BlockCounts(*range(11)), (HOST, TIER))


@pytest.fixture
def info() -> Iterator[SegmentInfo]:
    name = f"status_file_{os.getpid()}_{random.randrange(1 << 40):x}"
    with segment.create(name, engine="test"):
        yield segment.inspect(name)


@pytest.fixture
def status_file(info: SegmentInfo) -> Iterator[TierStatusFile]:
    one = StatusFile.create(tier_status_name(info.header["uuid"]), KIND)
    one.publish(STATUS)
    yield one
    one.close()
    assert not path_of(info).exists()


def path_of(info: SegmentInfo) -> Path:
    return SHM_DIR / tier_status_name(info.header["uuid"])


def overwrite(info: SegmentInfo, at: int, raw: bytes) -> None:
    with path_of(info).open("r+b") as file:
        file.seek(at)
        file.write(raw)


# ---------------------------------------------------------------------------------------- format


def test_requests_and_statistics_survive_packing() -> None:
    assert KIND.unpack(TiersStatus, KIND.pack(7, STATUS)) == (7, STATUS)
    for request in (
        TierRequest("limit", "disk2", 1 << 40),
        TierRequest("trim", "host", 0),
        TierRequest("clear"),
        TierRequest("erase", model="a/b é", older_than_s=1.5),
        TierRequest("erase", older_than_s=0.001),
        TierRequest("verify"),
    ):
        check_request(request)
        assert KIND.unpack(TierRequest, KIND.pack(3, request)) == (3, request)
    answer = TierAck(9, "refused", (None, 0, 12), "why")
    assert KIND.unpack(TierAck, KIND.pack(9, answer)) == (9, answer)


def test_largest_values_fit_the_status_file(info: SegmentInfo, status_file: TierStatusFile) -> None:
    most = (1 << 63) - 1
    figures: Callable[..., TierStatus] = TierStatus
    tier = figures("x" * 16, "mooncake", *[most] * 16, True, False, "x" * MOST_PROBLEM_BYTES)
    blocks = BlockCounts(*[most] * 11)
    full = TiersStatus(most, most, "write_through", blocks, (tier,) * MOST_TIERS)
    status_file.publish(full)
    assert read(info) == full
    status_file.publish(STATUS)
    model = "\udcff" * MOST_MODEL_BYTES  # bytes that are no UTF-8
    request = TierRequest("erase", "x" * 16, MOST_BYTES - 1, model, MOST_AGE_S)
    with pytest.raises(InvalidArgumentError, match="no tier"):
        ask(info, request, 0)
    with post(info, replace(request, tier="disk")) as asked:
        ((revision, found),) = status_file.pending().items()
        assert received(found) == replace(request, tier="disk")
        answer = TierAck(revision, "failed", (most,) * MOST_TIERS, "x" * MOST_REASON_BYTES)
        status_file.answer(answer)
        assert asked.wait(DEADLINE_S) == answer


@pytest.mark.parametrize("seed", range(3))
def test_flipped_bit_or_noise_is_rejected(seed: int) -> None:
    dice = random.Random(seed)
    cells: tuple[tuple[bytes, type[Shown]], ...] = (
        (KIND.pack(7, STATUS), TiersStatus),
        (KIND.pack(3, TierRequest("clear")), TierRequest),
        (KIND.pack(9, TierAck(9, "done", (), "")), TierAck),
    )
    for cell, of in cells:
        for _ in range(200):
            broken = bytearray(cell)
            broken[dice.randrange(len(cell))] ^= 1 << dice.randrange(8)
            assert KIND.unpack(of, bytes(broken)) is None
            assert KIND.unpack(of, dice.randbytes(len(cell))) is None
            assert KIND.unpack(of, cell[: dice.randrange(len(cell))]) is None
        others: tuple[type[Shown], ...] = (TierRequest, TierAck)
        assert all(KIND.unpack(other, cell) is None for other in others if other is not of), (
            "a cell is taken for another kind"
        )


def sealed(of: type, body: bytes) -> bytes:
    """A cell with a right checksum, whatever is in it: as a liar writes it."""
    head = struct.pack("<QI", 5, len(body))
    sum_ = zlib.crc32(head + body, zlib.crc32(b"KVTIERS\0" + of.__name__.encode()))
    return head + struct.pack("<I", sum_) + body


@pytest.mark.parametrize("seed", range(3))
def test_malicious_content_with_valid_checksum_is_harmless(seed: int) -> None:
    dice = random.Random(seed)
    values = (STATUS, TierRequest("clear"), TierAck(9, "done", (), ""))
    for _ in range(300):
        for value in values:
            body = bytearray(msgspec.msgpack.encode(value))
            for _ in range(dice.randrange(1, 4)):
                body[dice.randrange(len(body))] = dice.randrange(256)
            KIND.unpack(type(value), sealed(type(value), bytes(body)))
            KIND.unpack(type(value), sealed(type(value), dice.randbytes(dice.randrange(400))))
    lie = msgspec.msgpack.encode(TierRequest("#200"))
    found = KIND.unpack(TierRequest, sealed(TierRequest, lie))
    assert found is not None
    with pytest.raises(InvalidArgumentError, match="not known"):
        received(found[1])
    with pytest.raises(InvalidArgumentError, match="Unicode"):
        received(TierRequest("erase", model="\u20ac"))


@pytest.mark.parametrize(
    "request_",
    [
        TierRequest("erase"),
        TierRequest("erase", older_than_s=-1.0),
        TierRequest("erase", older_than_s=0.0),
        TierRequest("erase", older_than_s=float("nan")),
        TierRequest("erase", older_than_s=float("inf")),
        TierRequest("erase", older_than_s=(2**64 - 1) / 1000),
        TierRequest("erase", model=""),
        TierRequest("erase", model="x" * 257),
        TierRequest("limit", "disk", -1),
        TierRequest("limit", "disk", 1 << 62),
        TierRequest("limit", "", 5),
        TierRequest("format", "disk", 5),
    ],
)
def test_malformed_request_is_rejected_on_both_sides(
    info: SegmentInfo, status_file: TierStatusFile, request_: TierRequest
) -> None:
    with pytest.raises(InvalidArgumentError, match="nothing was asked"):
        ask(info, request_, 0)
    assert status_file.pending() == {}
    tiers = FakeTiers()
    assert carry_out(1, request_, tiers).state == "refused"
    assert tiers.did == []


# ------------------------------------------------------------------------------------------ file


def test_status_file_is_private_and_removed_on_close(info: SegmentInfo) -> None:
    assert read(info) is None
    status_file = StatusFile.create(tier_status_name(info.header["uuid"]), KIND)
    try:
        state = path_of(info).stat()
        assert stat.S_IMODE(state.st_mode) == 0o600
        assert state.st_size == KIND.file_bytes
        with pytest.raises(SegmentFormatError, match="damaged"):
            read(info)  # nothing is published yet
        status_file.publish(STATUS)
        assert read(info) == STATUS
        assert tiers_of([info]) == {info.name: STATUS}
        with pytest.raises(SegmentError, match="cannot make"):
            StatusFile.create(tier_status_name(info.header["uuid"]), KIND)
        assert read(info) == STATUS, "who came second has removed the status file of the first"
        assert segment.reap() == []
        assert path_of(info).exists(), "a live status file was reaped"
    finally:
        status_file.close()
        status_file.close()
    assert not path_of(info).exists()
    assert read(info) is None
    with pytest.raises(SegmentNotFoundError, match="has no tiers"):
        ask(info, TierRequest("verify"), 0)


def test_status_file_without_instance_is_reaped_silently(info: SegmentInfo) -> None:
    path = path_of(info)
    path.write_bytes(KIND.header)
    assert segment.reap() == []
    assert not path.exists()


def test_status_file_accessible_to_others_is_not_read(
    info: SegmentInfo, status_file: TierStatusFile
) -> None:
    path_of(info).chmod(0o644)
    with pytest.raises(SegmentFormatError, match="user alone"):
        read(info)
    path_of(info).chmod(0o600)
    assert read(info) == STATUS


def test_link_is_not_followed(info: SegmentInfo, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"")
    path_of(info).symlink_to(target)
    try:
        with pytest.raises(SegmentError, match="cannot open"):
            read(info)
        with pytest.raises(SegmentError, match="cannot make"):
            StatusFile.create(tier_status_name(info.header["uuid"]), KIND)
    finally:
        path_of(info).unlink()
    assert target.read_bytes() == b""


def test_partial_write_changes_nothing(info: SegmentInfo, status_file: TierStatusFile) -> None:
    newer = replace(STATUS, blocks=replace(STATUS.blocks, matched=1000))
    cell = KIND.pack(2, newer)
    for length in (1, 8, 100, len(cell) // 2, len(cell) - 1):
        overwrite(info, KIND.snapshot_at(2), cell[:length] + bytes(8)[: len(cell) - length])
        assert read(info) == STATUS
    status_file.publish(newer)
    assert read(info) == newer
    request = KIND.pack(1, TierRequest("clear"))
    overwrite(info, KIND.request_at(1), request[:-1])
    assert status_file.pending() == {}


def test_other_version_and_truncated_file_are_reported(
    info: SegmentInfo, status_file: TierStatusFile
) -> None:
    overwrite(info, 8, struct.pack("<I", 99))
    with pytest.raises(SegmentFormatError, match="of version 99"):
        read(info)
    overwrite(info, 0, KIND.header)
    for size in (5000, 12, 0):
        os.truncate(path_of(info), size)
        with pytest.raises(SegmentFormatError, match="damaged" if size > 12 else "status_file"):
            read(info)
        assert status_file.pending() == {}
    status_file.publish(STATUS)
    overwrite(info, 0, KIND.header)
    assert read(info) == STATUS


@pytest.mark.parametrize("seed", range(4))
def test_next_publication_repairs_a_corrupt_file(
    info: SegmentInfo, status_file: TierStatusFile, seed: int
) -> None:
    dice = random.Random(seed)
    for _ in range(100):
        at = dice.randrange(KIND.file_bytes)
        overwrite(info, at, dice.randbytes(dice.randrange(1, 6000)))
        with suppress(SegmentError):
            assert read(info) == STATUS
        with suppress(SegmentError):
            ask(info, TierRequest("verify"), 0)
        for revision, request in status_file.pending().items():
            assert request == TierRequest("verify")
            status_file.answer(TierAck(revision, "done", (), ""))
        os.truncate(path_of(info), KIND.file_bytes)
        status_file.publish(STATUS)
        overwrite(info, 0, KIND.header)
        assert read(info) == STATUS


# -------------------------------------------------------------------------------------- requests


def test_concurrent_operators_get_their_own_results(
    info: SegmentInfo, status_file: TierStatusFile
) -> None:
    """More operators than the ring has places, at once; each asks for a size of its own."""
    operators, each = 12, 6
    got: dict[int, TierAck | None] = {}
    is_over = threading.Event()

    def serve() -> None:
        # It looks now and then, as a publisher does: one that spins keeps the others from the lock.
        while not is_over.wait(0.001):
            for revision, request in status_file.pending().items():
                status_file.answer(TierAck(revision, "done", (request.size_bytes,), ""))
                status_file.publish(replace(STATUS, answered_revision=revision))

    def operate(number: int) -> None:
        for at in range(each):
            size = number * each + at
            while size not in got:
                # Busy: others had the lock for a second, and nothing was asked.
                with (
                    suppress(SegmentBusyError),
                    post(info, TierRequest("limit", "disk", size)) as asked,
                ):
                    answer = asked.wait(DEADLINE_S)
                    # A thread that looks late may find a later answer in the place of its own.
                    if not asked.is_lost:
                        got[size] = answer

    server = threading.Thread(target=serve)
    server.start()
    threads = [threading.Thread(target=operate, args=(n,)) for n in range(operators)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    is_over.set()
    server.join()
    assert sorted(got) == list(range(operators * each))
    for size, answer in got.items():
        assert answer is not None
        assert answer.counts[0] == size, "an operator has another one's answer"
    assert len({answer.revision for answer in got.values() if answer}) == operators * each


def test_full_request_ring_rejects_further_requests(
    info: SegmentInfo, status_file: TierStatusFile
) -> None:
    for size in range(RING):
        assert ask(info, TierRequest("limit", "disk", size), 0) is None
    with pytest.raises(SegmentBusyError, match="nothing was asked"):
        ask(info, TierRequest("verify"), 0)
    for size in range(RING):
        found = next(iter(status_file.pending().items()))
        assert found == (size + 1, TierRequest("limit", "disk", size))
        status_file.answer(TierAck(found[0], "done", (), ""))
    assert status_file.pending() == {}
    assert ask(info, TierRequest("verify"), 0) is None


def test_unknown_tier_is_rejected_before_writing(
    info: SegmentInfo, status_file: TierStatusFile
) -> None:
    with pytest.raises(InvalidArgumentError, match="no tier 'tape'; it has host, disk"):
        ask(info, TierRequest("limit", "tape", 5), 0)
    assert status_file.pending() == {}


def test_wait_ends_when_the_instance_ends(info: SegmentInfo) -> None:
    status_file = StatusFile.create(tier_status_name(info.header["uuid"]), KIND)
    status_file.publish(STATUS)

    def close_on_request() -> None:
        while not status_file.pending():
            pass
        status_file.close()

    thread = threading.Thread(target=close_on_request)
    thread.start()
    with pytest.raises(SegmentDeadError, match="have ended"):
        ask(info, TierRequest("verify"), DEADLINE_S)
    thread.join()


def test_truncated_file_does_not_crash_waiting_processes(
    info: SegmentInfo, status_file: TierStatusFile
) -> None:
    """The futex words lie in a page that is gone then: a load from it would be a SIGBUS."""
    with post(info, TierRequest("verify")) as asked:
        seen = status_file.bell
        os.truncate(path_of(info), 0)
        status_file.wait(seen, 0.01)
        status_file.wait(status_file.bell, 0.01)
        status_file.ring()
        assert asked.wait(0.01) is None
        os.truncate(path_of(info), KIND.file_bytes)
        status_file.answer(TierAck(1, "done", (), ""))
        answer = asked.wait(DEADLINE_S)
        assert answer is not None
        assert answer.state == "done"


def test_request_and_result_wake_their_waiters(
    info: SegmentInfo, status_file: TierStatusFile
) -> None:
    def serve() -> None:
        seen = status_file.bell
        while not (pending := status_file.pending()):
            status_file.wait(seen, DEADLINE_S)
            seen = status_file.bell
        status_file.answer(TierAck(max(pending), "done", (), ""))

    server = threading.Thread(target=serve)
    server.start()
    answer = ask(info, TierRequest("verify"), DEADLINE_S)
    server.join()
    assert answer == TierAck(1, "done", (), "")


def test_overwritten_bell_loses_no_request(info: SegmentInfo, status_file: TierStatusFile) -> None:
    overwrite(info, 64, b"\xff" * 128)
    with post(info, TierRequest("verify")) as asked:
        assert status_file.bell == 0, "the largest number is followed by 0"
        overwrite(info, 64, bytes(128))
        (revision,) = status_file.pending()
        status_file.answer(TierAck(revision, "done", (), ""))
        assert asked.wait(DEADLINE_S) is not None


def test_oversized_content_is_rejected_and_not_written(
    info: SegmentInfo, status_file: TierStatusFile
) -> None:
    with pytest.raises(SegmentError, match="no room for a cell"):
        status_file.answer(TierAck(1, "done", (), "x" * CELL_BYTES))
    with pytest.raises(SegmentError, match="no room for a cell"):
        status_file.publish(
            replace(STATUS, tiers=(replace(TIER, problem="x" * KIND.snapshot_bytes),))
        )
    assert read(info) == STATUS


def test_close_wakes_the_waiter_and_ignores_forked_children(
    info: SegmentInfo, status_file: TierStatusFile
) -> None:
    if (child := os.fork()) == 0:
        status_file.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert read(info) == STATUS
    waiter = threading.Thread(target=status_file.wait, args=(status_file.bell, DEADLINE_S))
    waiter.start()
    status_file.close()
    waiter.join(DEADLINE_S)
    assert not waiter.is_alive()
    status_file.wait(status_file.bell, DEADLINE_S)
    status_file.ring()


WRITER = """
import sys
from kvelastic.shared.segment_listing import tier_status_name
from kvelastic.shared.status_file import StatusFile
from kvelastic.shared.tier_status import KIND, BlockCounts, TiersStatus
file = StatusFile.create(tier_status_name(bytes.fromhex(sys.argv[1])), KIND)
number = 0
while True:
    number += 1
    file.publish(TiersStatus(number, 0, "write_back", BlockCounts(*[number] * 11), ()))
    if number == 1:
        print("ready", flush=True)
"""


def test_killed_writer_leaves_a_consistent_snapshot(info: SegmentInfo) -> None:
    def is_whole() -> int:
        shown = read(info)
        assert shown is not None
        assert set(astuple(shown.blocks)) == {shown.published_realtime_ns}
        return shown.published_realtime_ns

    with LineProgram("-c", WRITER, info.header["uuid"].hex()) as writer:
        assert writer.read() == "ready"
        first = is_whole()
        wait_until(lambda: is_whole() > first + 1000)
        writer.kill()
    last = is_whole()
    assert last > first
    with pytest.raises(SegmentDeadError, match="nothing was asked"):
        ask(info, TierRequest("verify"), 0)
    segment.reap()
    assert read(info) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be two users")
def test_another_user_can_neither_read_nor_request(
    info: SegmentInfo, status_file: TierStatusFile
) -> None:
    program = f"""
import os
from kvelastic.shared import segment, tier_status
info = segment.inspect({info.name!r})
os.setuid(65534)
assert tier_status.tiers_of([info]) == {{}}
for call in (tier_status.read, lambda of: tier_status.ask(of, tier_status.TierRequest("clear"), 0)):
    try:
        call(info)
    except tier_status.SegmentError as error:
        print(error)
"""
    said = run_python("-c", program).stdout
    assert said.count("Permission denied") == 2
    assert status_file.pending() == {}


# ------------------------------------------------------------------------------------- carry out


class LimitedStore(FakeStore):
    def __init__(self, name: str, did: list[tuple[object, ...]]) -> None:
        super().__init__(name, FakeStaging(1))
        self.did = did
        self.held = Capacity(100, 500, 10)

    def capacity(self) -> Capacity:
        return self.held

    def set_limit(self, limit_bytes: int) -> None:
        self.did.append((self.name, limit_bytes))
        used = min(self.held.used_bytes, limit_bytes)
        self.held = Capacity(used, limit_bytes, used // 10)


def carry_out(revision: int, request: TierRequest, tiers: Any) -> TierAck:
    return operator_requests.carry_out(revision, request, tiers)


class FakeTiers:
    def __init__(self) -> None:
        self.did: list[tuple[object, ...]] = []
        self.limited = [LimitedStore(kind, self.did) for kind in ("host", "disk", "disk")]
        self.stores: tuple[Store, ...] = tuple(self.limited)
        self.namespace = Namespace("m")
        self.answers = {0: 1, 1: 2, 2: 3}
        self.problem: Exception | None = None

    def erase(self, selection: Selection) -> dict[int, int]:
        self.did.append((selection,))
        return self.answers

    def check_integrity(self) -> None:
        if self.problem is not None:
            raise self.problem


def test_each_request_is_executed_as_specified() -> None:
    tiers = FakeTiers()
    assert labels_of(tiers.stores) == ("host", "disk", "disk2")
    done = carry_out(1, TierRequest("limit", "disk2", 50), tiers)
    assert done == TierAck(1, "done", (None, None, 5), "")
    assert tiers.did == [("disk", 50)]
    tiers.did.clear()
    assert carry_out(2, TierRequest("trim", "host", 30), tiers).counts == (3, None, None)
    assert tiers.did == [("host", 30), ("host", 500)], "the limit is not what it was"
    tiers.did.clear()
    assert carry_out(3, TierRequest("trim", "host", 30), tiers).state == "done"
    assert tiers.did == [], "there was nothing to trim"
    assert carry_out(4, TierRequest("clear"), tiers).counts == (1, 2, 3)
    erase = TierRequest("erase", model="m", older_than_s=60.0)
    assert carry_out(5, erase, tiers).state == "done"
    assert tiers.did == [
        (Selection(namespace=tiers.namespace, every_generation=True),),
        (Selection(model="m", older_than_s=60.0),),
    ]
    assert carry_out(6, TierRequest("verify"), tiers).counts == (3, 10, 5)


def test_failures_are_reported_and_never_raised() -> None:
    tiers = FakeTiers()
    refused = carry_out(1, TierRequest("limit", "tape", 1), tiers)
    assert (refused.state, "no tier 'tape'" in refused.reason) == ("refused", True)
    tiers.limited[0].held = Capacity(1, None, 1)
    for kind in ("limit", "trim"):
        assert carry_out(1, TierRequest(kind, "host", 1), tiers).state == "refused"
    assert tiers.did == []
    tiers.answers = {0: 1, 2: 3}
    silent = carry_out(1, TierRequest("clear"), tiers)
    assert (silent.state, silent.counts) == ("failed", (1, None, 3))
    assert silent.reason.startswith("disk did not answer")
    for problem in (IntegrityError("slot 5"), SegmentError("gone"), OSError("odd")):
        tiers.problem = problem
        answer = carry_out(1, TierRequest("verify"), tiers)
        assert answer.state == "failed"
        assert str(problem) in answer.reason
