"""Scenes that tests of kvtop share: made by hand, no instance behind them."""

from __future__ import annotations

from msgspec.structs import replace

from kvelastic.cli.kvtop.scene import Device, Instance, Scene
from kvelastic.shared.tier_status import TierStatus

MIB, GIB = 1 << 20, 1 << 30


def instance(name: str, **changes: object) -> Instance:
    values: dict[str, object] = {
        "key": f"uuid of {name}",
        "name": name,
        "label": name,
        "device": "host",
        "engine": "vllm",
        "model": "Qwen/Qwen3-8B",
        "pid": 4711,
        "limit_bytes": 4 * GIB,
        "min_bytes": GIB,
        "priority": 0,
        "capacity_bytes": 16 * GIB,
        "mapped_bytes": 2 * GIB,
        "in_use_bytes": GIB,
        "cached_bytes": 512 * MIB,
        "parked_bytes": 256 * MIB,
        "over_bytes": 0,
        "pages_in": 100,
        "pages_out": 50,
        "blocks_evicted": 7,
        "pages_in_per_s": 12.5,
        "pages_out_per_s": 0.0,
        "evicted_per_s": None,
        "history_bytes": tuple(range(0, 2 * GIB, GIB // 40)),
    }
    return Instance(**(values | changes))  # type: ignore[arg-type]


def device(name: str = "host", **changes: object) -> Device:
    values: dict[str, object] = {
        "capacity_bytes": 16 * GIB,
        "in_use_bytes": 4 * GIB,
        "cached_bytes": 2 * GIB,
        "parked_bytes": GIB,
        "slack_bytes": GIB,
        "others_bytes": GIB,
        "others_of_capacity_bytes": GIB,
        "free_bytes": 7 * GIB,
        "guaranteed_bytes": 2 * GIB,
        "asked_bytes": 64 * MIB,
        "has_ledger": True,
    }
    return Device(name, **(values | changes))  # type: ignore[arg-type]


EMPTY = Scene(1.0)
ONE = Scene(1.0, (device(),), (instance("kvelastic_vllm_1"),))
MANY = Scene(
    1.0,
    (
        device(),
        device("GPU-8f3c1b2a-0000-1111-2222-333344445555"),
        Device("host (other)", problem="it belongs to user 1000; it is not used"),
    ),
    tuple(
        instance(
            f"kvelastic_sglang_{n}", mapped_bytes=n * GIB, state="shrinking" if n % 7 else "refused"
        )
        for n in range(60)
    ),
)
WIDE = Scene(
    1.0,
    (device("装置-日本語の名前がとても長い"),),
    (
        instance("漢字の名前がとても長いインスタンス", model="模型/大きい", reason="理由がある"),
        instance(
            "e\u0301e\u0301e\u0301" * 10, state="pending", limit_bytes=None, mapped_bytes=None
        ),
        instance("🚀" * 40, priority=-(1 << 62), pages_in_per_s=1e12, mapped_bytes=1 << 62),
    ),
)
HOST = TierStatus(
    tier="host",
    kind="host",
    used_bytes=3 * GIB,
    limit_bytes=4 * GIB,
    records=1204,
    puts=1500,
    refused=0,
    hits=12_345,
    misses=678,
    torn=0,
    evicted=296,
    errors=0,
    bytes_written=5 * GIB,
    bytes_read=9 * GIB,
    load_us=720,
    write_budget_bytes=None,
    write_left_bytes=None,
    waiting_bytes=0,
    is_stuck=False,
    is_current=True,
)
TIERS = Scene(
    1.0,
    (device(),),
    (
        instance(
            "a_with_tiers",
            tiers=(
                HOST,
                replace(HOST, tier="disk", kind="disk", errors=7, is_stuck=True),
                replace(HOST, tier="mooncake", kind="mooncake", limit_bytes=None, load_us=None),
            ),
        ),
        instance("b_without"),
    ),
)
ALL = {"empty": EMPTY, "one": ONE, "many": MANY, "wide": WIDE, "tiers": TIERS}
