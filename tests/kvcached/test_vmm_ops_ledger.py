"""Pages mapped by hand: none without a grant, and everybody sees who holds them."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from ledger_instance import BLOCKS_PER_PAGE, Instance
from open_memfds import open_memfds

from kvelastic import _vmm, errors, vmm_ops
from kvelastic.shared import ledger, segment
from kvelastic.shared.ledger_facts import Member

MIB = 1 << 20
PAGE = 2 * MIB
CAPACITY_PAGES = 32
SHM = Path("/dev/shm")


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a ledger of the test's own, over a device of 64 MiB."""
    name = f"test-{os.getpid()}-{random.randrange(1 << 32):x}"[:32]
    monkeypatch.setenv("KVELASTIC_LEDGER", name)
    monkeypatch.setenv("KVELASTIC_HOST_MEMORY", "64M")
    monkeypatch.setenv("KVELASTIC_PAGE_PREALLOC_ENABLED", "false")
    before = {path.name for path in SHM.iterdir()}
    yield name
    vmm_ops.shutdown_kvelastic()
    assert {path.name for path in SHM.iterdir()} <= before


def tensors(pages: int, group_id: int = 0) -> None:
    """One layer of so many pages, each one extent of 2 MiB."""
    vmm_ops.create_kv_tensors(pages * PAGE, 2, "cpu", 1, num_kv_buffers=1, group_id=group_id)


def members(group: str) -> dict[str, Member]:
    (info,) = [info for info in ledger.list_ledgers() if info.group == group]
    return {member.name: member for member in info.members}


def own(group: str) -> Member:
    (found,) = [member for member in members(group).values() if member.pid == os.getpid()]
    return found


def shown() -> segment.SegmentInfo:
    (found,) = [info for info in segment.list_segments() if info.header.get("pid") == os.getpid()]
    return found


def resident_bytes(before: set[int]) -> int:
    return sum(
        fd.stat().st_blocks * 512 for inode, fd in open_memfds().items() if inode not in before
    )


def test_mapping_never_exceeds_the_grant(group: str) -> None:
    before = set(open_memfds())
    vmm_ops.init_kvelastic("cpu", PAGE)
    tensors(128)
    with pytest.raises(errors.OutOfMemoryError, match=r"256.00 MiB mapped .* limit of 64.00 MiB"):
        vmm_ops.map_to_kv_tensors(range(128))
    assert resident_bytes(before) == own(group).granted_bytes == 0, "all of them or none"
    for page in range(CAPACITY_PAGES):
        vmm_ops.map_to_kv_tensors([page])
    with pytest.raises(MemoryError):
        vmm_ops.map_to_kv_tensors([CAPACITY_PAGES])
    assert resident_bytes(before) == own(group).granted_bytes == 64 * MIB
    tensors(8, group_id=1)
    with pytest.raises(errors.OutOfMemoryError, match=r"of the 64.00 MiB that instances may hold"):
        vmm_ops.map_to_kv_tensors([0], group_id=1)
    with pytest.raises(errors.InvalidArgumentError, match="0 is mapped already"):
        vmm_ops.map_to_kv_tensors([0])
    vmm_ops.shutdown_kvelastic()
    assert resident_bytes(before) == 0


def test_unmapped_pages_stay_granted_until_trim(group: str) -> None:
    before = set(open_memfds())
    vmm_ops.init_kvelastic("cpu", PAGE)
    tensors(8)
    vmm_ops.map_to_kv_tensors([0, 1, 2, 3])
    vmm_ops.unmap_from_kv_tensors([1, 2])
    usage = shown().usage
    assert (usage["mapped_bytes"], usage["parked_bytes"]) == (4 * PAGE, 2 * PAGE)
    assert own(group).granted_bytes == resident_bytes(before) == 4 * PAGE
    vmm_ops.map_to_kv_tensors([5, 6, 7])
    assert own(group).granted_bytes == resident_bytes(before) == 5 * PAGE, "two are used anew"
    vmm_ops.unmap_from_kv_tensors([5, 6])
    vmm_ops.trim_kv_tensors()
    assert own(group).granted_bytes == resident_bytes(before) == shown().usage["mapped_bytes"]
    assert own(group).granted_bytes == 3 * PAGE
    with pytest.raises(errors.InvalidArgumentError):
        vmm_ops.map_to_kv_tensors([1, 99])
    assert own(group).granted_bytes == 3 * PAGE
    counters = shown().counters
    assert (counters["pages_created"], counters["pages_destroyed"]) == (5, 2)


def test_memory_of_other_processes_is_exact_after_calls(group: str) -> None:
    vmm_ops.init_kvelastic("cpu", PAGE)
    tensors(8)
    neighbour = ledger.join(
        "host", group=group, capacity_bytes=64 * MIB, name="neighbour", uuid=bytes(16)
    )
    device_set = _vmm.DeviceSet([(neighbour.member, [0])], PAGE)
    foreign_bytes = 3 * PAGE

    def is_certain() -> bool:
        used = sum(one.granted_bytes for one in members(group).values()) + foreign_bytes
        sight = device_set.see_devices(lambda: [(64 * MIB, 64 * MIB - used)])
        (info,) = (info for info in ledger.list_ledgers() if info.group == group)
        return (sight, info.others_bytes) == ("exact", foreign_bytes)

    vmm_ops.map_to_kv_tensors([0, 1, 2, 3])
    assert is_certain()
    with pytest.raises(errors.InvalidArgumentError):
        vmm_ops.map_to_kv_tensors([4, 99])
    assert is_certain()
    vmm_ops.unmap_from_kv_tensors([1, 2])
    assert is_certain()
    vmm_ops.map_to_kv_tensors([5])
    vmm_ops.trim_kv_tensors()
    assert is_certain()
    neighbour.close()


def test_pool_and_manual_pages_share_one_ledger(group: str) -> None:
    vmm_ops.init_kvelastic("cpu", PAGE)
    tensors(CAPACITY_PAGES)
    vmm_ops.map_to_kv_tensors(range(20))
    with Instance() as pool:
        assert pool.alloc(14 * BLOCKS_PER_PAGE) is None, "only 12 pages are free"
        mine = own(group)
        assert (mine.granted_bytes, mine.in_use_bytes) == (20 * PAGE, 20 * PAGE)
        assert {mine.name, pool.name} == set(members(group))
        ids = pool.alloc(11 * BLOCKS_PER_PAGE)
        assert ids is not None
        with pytest.raises(errors.OutOfMemoryError):
            vmm_ops.map_to_kv_tensors(range(20, 30))
        assert own(group).granted_bytes == 20 * PAGE
        assert own(group).ask_bytes == 0
        # What is left of unmapped pages is others' at the next call, and what is trimmed at once.
        vmm_ops.unmap_from_kv_tensors(range(20))
        vmm_ops.trim_kv_tensors()
        more = pool.alloc(14 * BLOCKS_PER_PAGE)
        assert more is not None


def test_idle_neighbour_gives_up_its_cached_pages(
    group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVELASTIC_RECLAIM_WAIT", "300")
    monkeypatch.setenv("KVELASTIC_PRIORITY", "1")
    with Instance(KVELASTIC_PRIORITY="0") as pool:
        ids = pool.alloc(24 * BLOCKS_PER_PAGE)
        assert ids is not None
        pool.cache(ids)
        vmm_ops.init_kvelastic("cpu", PAGE)
        tensors(16)
        vmm_ops.map_to_kv_tensors(range(16))
        assert own(group).granted_bytes == 16 * PAGE
        assert pool.mapped_bytes <= 16 * PAGE


def test_manual_pages_are_visible_and_not_controllable(
    group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVELASTIC_LIMIT", "8M")
    monkeypatch.setenv("KVELASTIC_PRIORITY", "7")
    monkeypatch.setenv("KVELASTIC_IPC_NAME", group)
    vmm_ops.init_kvelastic("cpu", PAGE)
    tensors(8)
    vmm_ops.map_to_kv_tensors([0, 1, 2])
    info = shown()
    assert (info.name, info.header["engine"]) == (f"{group}_vmm_g0", "vmm_ops")
    assert (info.ack["state"], info.ack["effective_limit_bytes"]) == ("applied", 8 * MIB)
    assert (info.ack["priority"], own(group).priority) == (7, 7)
    assert segment.request(info.name, limit_bytes=2 * MIB, wait_s=0.0).state == "none"
    with pytest.raises(errors.OutOfMemoryError, match="KVELASTIC_LIMIT"):
        vmm_ops.map_to_kv_tensors([3, 4])
    answer = shown().ack
    assert (answer["state"], answer["revision"]) == ("refused", 1)
    assert "by hand" in answer["reason"]


def test_forked_child_is_rejected_and_releases_nothing(group: str) -> None:
    vmm_ops.init_kvelastic("cpu", PAGE)
    tensors(8)
    vmm_ops.map_to_kv_tensors([0, 1])
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with pytest.raises(errors.DeviceUnavailableError):
                vmm_ops.map_to_kv_tensors([2])
            vmm_ops.shutdown_kvelastic()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert own(group).granted_bytes == shown().usage["mapped_bytes"] == 2 * PAGE
    vmm_ops.map_to_kv_tensors([2])


def test_group_that_cannot_join_leaves_nothing(group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVELASTIC_MIN", "65M")
    vmm_ops.init_kvelastic("cpu", PAGE)
    with pytest.raises(errors.GuaranteeError):
        tensors(8)
    assert not vmm_ops.kv_tensors_created()
    assert not [info for info in ledger.list_ledgers() if info.group == group]
