"""The pool of an engine that schedules and computes in one process: a toy, and SGLang's wake."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
from toy_engine import BLOCK_TOKENS, ToyEngine, answer_of
from waiting import DEADLINE_S

from kvelastic import _vmm, config
from kvelastic.device.selection import Device
from kvelastic.errors import ConfigError, OutOfMemoryError, ReserveError
from kvelastic.integration.sglang import in_scheduler
from kvelastic.integration.sglang.late_releases import LateReleases
from kvelastic.pool.engine_pool import EnginePool, device_for, open_engine_pool
from kvelastic.pool.layout import PageLayout
from kvelastic.shared import segment
from kvelastic.units import MIB_BYTES

PAGE_BYTES = 2 * MIB_BYTES
LAYOUT = PageLayout.solve(64 << 10, 4)
"""Eight blocks of 256 KiB in a page."""


class Toy:
    """What an engine has to do: a device, a layout, and a pool that begins once it has loaded."""

    def __init__(
        self, stack: ExitStack, wanted_blocks: int | None = 100, device: Device | None = None
    ) -> None:
        self.settings = config.load()
        device = device or device_for(self.settings, "Toy", gpu=None)
        self.cache: EnginePool = open_engine_pool(
            self.settings,
            device,
            LAYOUT,
            block_tokens=BLOCK_TOKENS,
            wanted_blocks=wanted_blocks,
            engine="Toy",
            model="bear",
        )
        stack.callback(self.cache.close)

    def begin(self, held_besides_bytes: int = 0) -> Toy:
        self.cache.begin(self.settings, held_besides_bytes)
        return self

    def engine(self) -> ToyEngine:
        """Its scheduler."""
        memory = self.cache.pool.memory
        assert isinstance(memory, _vmm.Range)
        return ToyEngine(
            self.cache.blocks,
            memory=memory,
            layout=LAYOUT,
            pages=self.cache.pages,
            steps_on_their_way=1,
        )


@pytest.fixture
def stack(monkeypatch: pytest.MonkeyPatch) -> Iterator[ExitStack]:
    monkeypatch.setenv("KVELASTIC_HOST_MEMORY", "32M")
    monkeypatch.setenv("KVELASTIC_IPC_NAME", f"kvtoy_{os.getpid()}")
    with ExitStack() as stack:
        yield stack


def test_toy_engine_is_visible_limited_and_closed(stack: ExitStack) -> None:
    toy = Toy(stack)
    name = toy.cache.pool.name
    assert toy.cache.pool.blocks.mapped_bytes == 0
    toy.begin()
    seen = segment.inspect(name)
    assert (seen.header["engine"], seen.header["model"]) == ("Toy", "bear")
    assert seen.usage["mapped_bytes"] == PAGE_BYTES
    ids = toy.cache.pool.blocks.alloc(20)
    assert ids is not None
    assert segment.inspect(name).usage["mapped_bytes"] >= 3 * PAGE_BYTES
    toy.cache.pool.blocks.free(ids)
    assert segment.request(name, limit_bytes=PAGE_BYTES, wait_s=DEADLINE_S).state == "applied"
    toy.cache.close()
    assert name not in {info.name for info in segment.list_segments()}


@pytest.mark.slow
def test_busy_toy_engine_gets_cached_pages_of_idle(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine as `docs/ARCHITECTURE.md` describes it, with maintenance threads and ledger."""
    monkeypatch.setenv("KVELASTIC_MAX_CACHED_TOKENS", "-1")
    prompts = {f"r{number}": [number] * 11 * BLOCK_TOKENS for number in range(9)}
    toys = [Toy(stack, wanted_blocks=None).begin() for _ in range(2)]
    idle, busy = engines = [toy.engine() for toy in toys]
    for name, prompt in prompts.items():
        idle.submit(name, prompt, 4)
    idle.finish()
    assert idle.answers == {name: answer_of(prompt, 4) for name, prompt in prompts.items()}
    assert idle.blocks.pool.stats()["blocks_cached"] > 10 * 8, "more than half of the device"
    long = [7] * 90 * BLOCK_TOKENS
    busy.submit("long", long, 4)
    busy.finish()
    assert busy.answers == {"long": answer_of(long, 4)}
    idle.check_integrity()
    assert idle.evicted > 0
    name = toys[1].cache.pool.name
    assert segment.request(name, limit_bytes=PAGE_BYTES, wait_s=DEADLINE_S).state == "applied"
    assert segment.inspect(name).usage["mapped_bytes"] <= PAGE_BYTES
    assert segment.request(name, limit_bytes=16 * PAGE_BYTES, wait_s=DEADLINE_S).state == "applied"
    for engine in engines:
        engine.submit("again", prompts["r0"], 9)
        engine.finish()
        assert engine.answers["again"] == answer_of(prompts["r0"], 9)


@pytest.mark.slow
def test_start_waits_for_null_block_then_fails(stack: ExitStack) -> None:
    """Kernels access the null block at any time: an engine without it would crash."""
    neighbour = Toy(stack, wanted_blocks=None).begin()
    blocks = neighbour.cache.pool.blocks
    ids = blocks.alloc(blocks.available_size())
    assert ids is not None
    late = Toy(stack)
    with pytest.raises(OutOfMemoryError, match=f"one page of {late.cache.pool.name}"):
        late.begin()
    assert late.cache.pool.blocks.mapped_bytes == 0
    blocks.free(ids)
    blocks.trim()
    late.begin()
    assert late.cache.pool.blocks.mapped_bytes == PAGE_BYTES


def test_second_cache_of_a_process_is_numbered(stack: ExitStack) -> None:
    first, second = Toy(stack).begin(), Toy(stack).begin(8 * MIB_BYTES)
    assert second.cache.pool.name == f"{first.cache.pool.name}_2"
    (ledger,) = second.cache.pool.ledgers
    assert ledger.member.reserve_bytes == 0, "weights are the process's: the first has said them"


def reserve_bytes(toy: Toy) -> int:
    (ledger,) = toy.cache.pool.ledgers
    reserved: int = ledger.member.reserve_bytes
    return reserved


def test_caches_on_two_devices_reserve_on_each(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVELASTIC_RESERVE", "4M")
    devices = [
        Device(f"toys-{os.getpid()}-{gpu}", 64 * MIB_BYTES, _vmm.HostDriver) for gpu in "abb"
    ]
    toys = [Toy(stack, device=device).begin() for device in devices]
    assert [reserve_bytes(toy) for toy in toys] == [4 * MIB_BYTES, 4 * MIB_BYTES, 0]


def test_later_cache_reserves_when_the_first_closed(stack: ExitStack) -> None:
    first, second = Toy(stack).begin(8 * MIB_BYTES), Toy(stack).begin(8 * MIB_BYTES)
    first.cache.close()
    third, fourth = Toy(stack).begin(8 * MIB_BYTES), Toy(stack).begin(8 * MIB_BYTES)
    assert [reserve_bytes(toy) for toy in (second, third, fourth)] == [0, 8 * MIB_BYTES, 0]


def test_step_reserve_is_kept_on_a_gpu(stack: ExitStack, caplog: pytest.LogCaptureFixture) -> None:
    """A neighbour must not take what activations leave between two steps."""
    device = Device(f"toys-{os.getpid()}", 64 * MIB_BYTES, _vmm.HostDriver)
    toy = Toy(stack, device=device).begin(8 * MIB_BYTES)
    (joined,) = toy.cache.pool.ledgers
    follower = toy.cache.step_reserve
    assert follower is not None
    assert joined.member.reserve_bytes == 10 * MIB_BYTES, "1/32 of the device is for a step"
    follower.follow(10 * MIB_BYTES)
    assert joined.member.reserve_bytes == 10 * MIB_BYTES
    follower.follow(20 * MIB_BYTES)
    assert joined.member.reserve_bytes == 20 * MIB_BYTES + MIB_BYTES // 2
    follower.follow(11 * MIB_BYTES)
    assert joined.member.reserve_bytes == 20 * MIB_BYTES + MIB_BYTES // 2
    follower.follow(65 * MIB_BYTES)
    assert joined.member.reserve_bytes == 20 * MIB_BYTES + MIB_BYTES // 2
    assert "could not be raised" in caplog.text


def test_configured_reserve_disables_the_step_reserve(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVELASTIC_RESERVE", "4M")
    device = Device(f"toys-{os.getpid()}", 64 * MIB_BYTES, _vmm.HostDriver)
    toy = Toy(stack, device=device).begin(8 * MIB_BYTES)
    (joined,) = toy.cache.pool.ledgers
    assert joined.member.reserve_bytes == 4 * MIB_BYTES
    assert toy.cache.step_reserve is None


def test_capacity_is_requested_blocks_bounded_by_the_device(
    stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    assert Toy(stack, wanted_blocks=100).cache.capacity_blocks == 100
    assert "Toy requests" not in caplog.text
    assert Toy(stack, wanted_blocks=None).cache.capacity_blocks == 16 * 8 - 1
    assert Toy(stack, wanted_blocks=500).cache.capacity_blocks == 16 * 8 - 1
    wanted = "Toy requests 126.00 MiB of KV cache and gets at most 32.00 MiB, the capacity of KVEL"
    (said,) = [record for record in caplog.records if wanted in record.getMessage()]
    assert said.levelname == "INFO", "what an engine asks for by default is no reason to worry"


def test_unsuitable_device_is_rejected(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVELASTIC_DEVICE", "cuda:0")
    with pytest.raises(ConfigError, match="does not fit a model of Toy on cpu"):
        Toy(stack)


@pytest.mark.slow
def test_sglang_resume_waits_if_reserve_is_unavailable(
    stack: ExitStack, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answer cannot say that it failed, and an error would end its scheduler."""
    modules: dict[str, dict[str, Any]] = {
        "sglang": {},
        "sglang.srt": {},
        "sglang.srt.constants": {"GPU_MEMORY_ALL_TYPES": ["kv_cache", "weights"]},
        "sglang.srt.managers": {},
        "sglang.srt.managers.io_struct": {
            "ReleaseMemoryOccupationReqOutput": object,
            "ResumeMemoryOccupationReqOutput": object,
        },
    }
    for name, content in modules.items():
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**content))
    device = Device(f"toys-{os.getpid()}", 32 * MIB_BYTES, _vmm.HostDriver)
    toy = Toy(stack, device=device).begin(7 * MIB_BYTES)
    allocator = SimpleNamespace(
        blocks=toy.cache.pool.blocks,
        wakes_later=False,
        late_releases=LateReleases(),
        get_kvcache=lambda: SimpleNamespace(elastic=toy.cache),
    )
    tree = SimpleNamespace(prefix_loads=None, settle=lambda: None)
    scheduler = SimpleNamespace(
        token_to_kv_pool_allocator=allocator, tree_cache=tree, _engine_paused=False
    )
    updater = SimpleNamespace(
        scheduler=scheduler,
        is_fully_idle=lambda ignore_waiting: True,
        offload_tags={"kv_cache", "weights"},
    )
    scheduler.weight_updater = updater
    request = SimpleNamespace(tags=None)
    in_scheduler.release_memory(lambda *_: None, updater, request)
    assert toy.cache.pool.blocks.is_asleep
    other = Toy(stack, device=device).begin()
    ids = other.cache.pool.blocks.alloc(100)
    assert ids is not None
    with pytest.raises(ReserveError):
        toy.cache.pool.blocks.wake(0.01)
    in_scheduler.resume_memory(lambda *_: None, updater, request)
    assert toy.cache.pool.blocks.is_asleep
    assert "The KV cache could not wake" in caplog.text
    in_scheduler.ingest_requests(lambda *_: None, scheduler)
    assert toy.cache.pool.blocks.is_asleep
    other.cache.pool.blocks.free(ids)
    other.cache.close()
    in_scheduler.ingest_requests(lambda *_: None, scheduler)
    assert not toy.cache.pool.blocks.is_asleep
