"""From segments and ledgers to what kvtop shows: amounts, rates, history, order."""

from __future__ import annotations

from dataclasses import replace

import pytest
from scenes import GIB, MIB, instance

from kvelastic.cli.kvtop.history import HISTORY_LOOKS, Model
from kvelastic.cli.kvtop.scene import ORDERS, Instance, Scene, ordered, scene_of
from kvelastic.shared.ledger_facts import LedgerInfo, Member
from kvelastic.shared.segment import SegmentInfo

PARTS = ("in_use_bytes", "cached_bytes", "parked_bytes", "slack_bytes")


def segment_info(name: str, device: str = "GPU-1", **changes: object) -> SegmentInfo:
    usage = {
        "capacity_bytes": 16 * GIB,
        "mapped_bytes": 4 * GIB,
        "in_use_bytes": 2 * GIB,
        "cached_bytes": GIB,
        "parked_bytes": 512 * MIB,
        "page_bytes": 2 * MIB,
        "limit_bytes": 8 * GIB,
        "asleep": 0,
        "under_pressure": 0,
        "blocks_total": 0,
        "blocks_in_use": 0,
        "blocks_cached": 0,
        "blocks_available": 0,
        "blocks_reserved": 0,
    }
    values: dict[str, object] = {
        "header": {
            "uuid": name.encode().ljust(16),
            "created_realtime_ns": 0,
            "device": device,
            "devices": [(device, 1)],
            "engine": "vllm",
            "model": "m",
            "pid": 1,
            "uid": 0,
        },
        "usage": usage,
        "ack": {
            "revision": 0,
            "state": "applied",
            "effective_limit_bytes": 8 * GIB,
            "over_bytes": 0,
            "min_bytes": GIB,
            "priority": 3,
            "reason": "",
        },
        "request": {"revision": 0, "limit_bytes": None},
        "counters": {"pages_mapped": 10, "pages_unmapped": 4, "blocks_evicted": 2},
    }
    return SegmentInfo(name, **({"status": "alive"} | values | changes))  # type: ignore[arg-type]


def member(name: str, **changes: int) -> Member:
    values = {
        "granted_bytes": 4 * GIB,
        "min_bytes": GIB,
        "limit_bytes": 8 * GIB,
        "priority": 0,
        "in_use_bytes": 2 * GIB,
        "evictable_bytes": GIB,
        "parked_bytes": 512 * MIB,
        "page_bytes": 2 * MIB,
        "ask_bytes": 0,
        "wanted_bytes": 0,
    } | changes
    facts = {"uuid": bytes(16), "pid": 1, "status": "alive", "idle_s": 0.0, "ask_s": 0.0}
    return Member(name=name, **(facts | values))  # type: ignore[arg-type]


def ledger(device: str = "GPU-1", **changes: object) -> LedgerInfo:
    values: dict[str, object] = {
        "status": "readable",
        "group": "default",
        "capacity_bytes": 16 * GIB,
        "others_bytes": GIB,
        "members": (member("a"), member("b", ask_bytes=2 * MIB)),
    }
    return LedgerInfo(device, **(values | changes))  # type: ignore[arg-type]


def instance_of(info: SegmentInfo) -> Instance:
    (found,) = scene_of([info], [], 0.0).instances
    return found


def test_device_shows_its_ledger():
    (device,) = scene_of([segment_info("a")], [ledger()], 0.0).devices
    assert (device.name, device.has_ledger) == ("GPU-1", True)
    assert device.capacity_bytes == 16 * GIB
    assert device.in_use_bytes == 4 * GIB
    assert device.slack_bytes == 2 * (4 * GIB - 3 * GIB - 512 * MIB)
    assert device.held_bytes == 8 * GIB
    assert device.others_bytes == GIB
    assert device.free_bytes == 7 * GIB
    assert device.guaranteed_bytes == 2 * GIB
    assert device.asked_bytes == 2 * MIB


def test_member_usage_comes_from_its_control_block():
    records = [segment_info("a"), segment_info("dead", status="dead")]
    records[0].usage.update(in_use_bytes=GIB, cached_bytes=2 * GIB + 300 * MIB, parked_bytes=0)
    members = [
        member(name, uuid=name.encode().ljust(16), evictable_bytes=GIB)
        for name in ("a", "dead", "hidden")
    ]
    scene = scene_of(records, [ledger(members=tuple(members))], 0.0)
    (device,), (one, _) = scene.devices, scene.instances
    told_apart = [getattr(device, part) - getattr(one, part) for part in PARTS]
    # Of a dead member, and of one whose record cannot be read, there is only the ledger's word.
    assert told_apart == [4 * GIB, 2 * GIB, GIB, GIB]
    assert one.slack_bytes == 4 * GIB - GIB - 2 * GIB - 300 * MIB
    assert device.held_bytes == 12 * GIB


def test_reserves_reduce_gpu_capacity_but_not_host_capacity():
    awake = member("a", reserve_bytes=3 * GIB, pledged_bytes=3 * GIB)
    asleep = member("b", uuid=bytes(15) + b"b", reserve_bytes=2 * GIB, asleep=True, granted_bytes=0)
    facts = {"members": (awake, asleep), "others_bytes": GIB}
    (gpu,) = scene_of([], [ledger(**facts)], 0.0).devices
    assert (gpu.reserved_bytes, gpu.reserved_of_capacity_bytes) == (3 * GIB, 3 * GIB)
    assert (gpu.others_of_capacity_bytes, gpu.free_bytes) == (GIB, 8 * GIB)
    (host,) = scene_of([], [ledger(total_bytes=18 * GIB, **facts)], 0.0).devices
    assert (host.reserved_bytes, host.reserved_of_capacity_bytes) == (3 * GIB, 2 * GIB)
    assert (host.others_of_capacity_bytes, host.free_bytes) == (0, 10 * GIB)


def test_device_without_a_ledger_sums_its_instances():
    found = [segment_info("a"), segment_info("b"), segment_info("dead", status="dead")]
    (device,) = scene_of(found, [], 0.0).devices
    assert (device.has_ledger, device.capacity_bytes) == (False, 16 * GIB)
    assert device.held_bytes == 8 * GIB  # the dead one's memory is back
    assert device.free_bytes == 8 * GIB
    assert device.guaranteed_bytes == 2 * GIB


def test_unreadable_ledger_does_not_hide_the_device():
    broken = LedgerInfo("default_GPU-1", "foreign", problem="user 7\x1b[31m")
    devices = scene_of([segment_info("a")], [broken], 0.0).devices
    assert [device.name for device in devices] == ["GPU-1", "default_GPU-1"]
    assert devices[1].problem == "user 7\ufffd[31m"


def test_groups_of_one_device_are_distinguished():
    found = scene_of([], [ledger(), ledger(group="other")], 0.0).devices
    assert [device.name for device in found] == ["GPU-1", "GPU-1 (other)"]


def test_names_select_instances_and_their_devices():
    found = [segment_info("a"), segment_info("b", device="GPU-2")]
    mine = ledger("GPU-2", members=(member("b"), member("c")))
    of_a = (member("a"),)
    others = [
        ledger("GPU-1", members=of_a),
        ledger("GPU-2", group="other", members=of_a),
        ledger("GPU-3", members=()),
    ]
    scene = scene_of(found, [*others, mine], 0.0, names=["b"])
    assert [one.name for one in scene.instances] == ["b"]
    assert [device.name for device in scene.devices] == ["GPU-2"]
    (device,) = scene_of(found, others, 0.0, names=["b"]).devices
    assert (device.name, device.has_ledger, device.held_bytes) == ("GPU-2", False, 4 * GIB)
    assert scene_of(found, others, 0.0, names=["none"]).devices == ()


def test_sleeping_instance_shows_its_wake_limit():
    awake = segment_info("a")
    assert (instance_of(awake).state, instance_of(awake).asleep) == ("applied", False)
    sleeping = segment_info("a")
    sleeping.usage.update(asleep=1, limit_bytes=2 * GIB)
    sleeping.ack["effective_limit_bytes"] = 0
    one = instance_of(sleeping)
    assert (one.state, one.asleep, one.limit_bytes) == ("asleep", True, 2 * GIB)
    sleeping.ack["state"] = "shrinking"
    assert (instance_of(sleeping).state, instance_of(sleeping).asleep) == ("shrinking", True)


def test_unreadable_segment_is_shown_with_unknown_values():
    one = instance_of(SegmentInfo("x\x1b[2J", "unreadable", problem="version 9"))
    assert (one.name, one.label) == ("x\x1b[2J", "x\ufffd[2J")
    assert (one.state, one.reason, one.mapped_bytes, one.pid) == (
        "unreadable",
        "version 9",
        None,
        None,
    )


# --------------------------------------------------------------------------- rates, history


def scene_at(at_s: float, **changes: object) -> Scene:
    return Scene(at_s, (), (instance("a", **({"pages_in_per_s": None} | changes)),))


def test_rates_are_differences_over_elapsed_time():
    model = Model()
    model.add(scene_at(10.0, pages_in=100, pages_out=7, blocks_evicted=0))
    (then,) = model.add(scene_at(12.0, pages_in=150, pages_out=7, blocks_evicted=3)).instances
    assert (then.pages_in_per_s, then.pages_out_per_s, then.evicted_per_s) == (25.0, 0.0, 1.5)


def test_rate_is_unknown_without_a_comparable_sample():
    model = Model()
    model.add(scene_at(10.0, pages_in=100))
    assert model.add(scene_at(10.0, pages_in=200)).instances[0].pages_in_per_s is None
    assert model.add(scene_at(11.0, pages_in=5)).instances[0].pages_in_per_s is None
    assert model.add(scene_at(12.0, pages_in=None)).instances[0].pages_in_per_s is None
    # Another instance of the same name begins anew.
    (other,) = model.add(scene_at(13.0, pages_in=900, key="another uuid")).instances
    assert other.pages_in_per_s is None


def test_history_has_a_fixed_size():
    model = Model()
    for look in range(HISTORY_LOOKS + 30):
        (one,) = model.add(scene_at(float(look), mapped_bytes=look)).instances
    assert one.history_bytes == tuple(range(30, HISTORY_LOOKS + 30))
    assert model.add(Scene(999.0)).instances == ()
    assert model.ended == ("a",)
    (again,) = model.add(scene_at(1000.0, mapped_bytes=5)).instances
    assert again.history_bytes == (5,)
    assert model.ended == ()


# ------------------------------------------------------------------------------------ order


def test_every_order_keeps_all_instances():
    unknown = instance(
        "u", mapped_bytes=None, in_use_bytes=None, limit_bytes=None, min_bytes=None, priority=None,
        pages_in_per_s=None, pages_out_per_s=None,
    )  # fmt: skip
    found = [instance("b", mapped_bytes=1), unknown, instance("a", mapped_bytes=2)]
    for order in ORDERS:
        for is_reversed in (False, True):
            assert len(ordered(found, order, is_reversed=is_reversed)) == 3
    names = [one.name for one in ordered(found, "mapped")]
    assert names == ["a", "b", "u"]  # largest first, unknown last
    assert [one.name for one in ordered(found, "mapped", is_reversed=True)] == ["b", "a", "u"]
    assert [one.name for one in ordered(found, "name", is_reversed=True)] == ["u", "b", "a"]


@pytest.mark.parametrize("wanted", ["LLAMA", "vll", "shrink", "gpu-7", "one"])
def test_filter_matches_all_texts(wanted):
    hit = instance("one", model="Llama-3", engine="vllm", state="shrinking", device="GPU-7")
    miss = replace(hit, key="2", label="2", model="x", engine="y", state="applied", device="z")
    assert ordered([hit, miss], "name", wanted=wanted) == [hit]
