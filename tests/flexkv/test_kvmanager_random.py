"""KVManager against a model that is too simple to be wrong, with failures at each copy.

The model knows only what must hold whatever the tiers keep: what comes back has the bytes that its
tokens say, a mask is one run of whole blocks, nothing that was cancelled or refused writes to a
block, and when all is over nothing is held.
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flexkv_engine import (
    ENGINE_BLOCKS,
    MODEL,
    SOON_S,
    TOKENS,
    Engine,
    cache_config,
    prompt,
    slots_of,
)
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvelastic.errors import DriverError, InvalidArgumentError
from kvelastic.flexkv.common.request import KVResponse, KVResponseStatus
from kvelastic.flexkv.common.transfer import DeviceType
from kvelastic.flexkv.kvmanager import KVManager

pytestmark = pytest.mark.slow


BLOCKS = 6
"""Of the longest prompt."""
PROMPTS = 8
GOOD = (KVResponseStatus.SUCCESS, KVResponseStatus.FAILED)


def tokens_of(seed: int, blocks: int) -> Any:
    """Prompts that share beginnings: pairs of seeds have their first two blocks in common."""
    tokens = prompt(seed // 2, BLOCKS)
    tokens[2 * TOKENS :] += seed % 2
    return tokens[: blocks * TOKENS]


class Faults:
    """Counts calls of copies and stores; the armed one fails as its kind does."""

    def __init__(self, manager: KVManager) -> None:
        self.left = -1
        self.hits = 0
        tasks = manager.task_engine
        worker: Any = tasks.transfer_engine.gpu_worker
        for name in ("copy_out", "copy_in"):
            setattr(worker, name, self._raising(getattr(worker, name)))
        for store in tasks.storage.stores.values():
            each: Any = store
            each.put = self._refusing(each.put, None)
            each.get = self._refusing(each.get, None)

    def _turn(self) -> bool:
        if self.left < 0:
            return False
        self.left -= 1
        self.hits += self.left < 0
        return self.left < 0

    def _raising(self, call: Any) -> Any:
        def wrapped(*arguments: Any) -> None:
            if self._turn():
                raise DriverError("a copy that was made to fail")
            call(*arguments)

        return wrapped

    def _refusing(self, call: Any, _: None) -> Any:
        def wrapped(keys: bytes, *arguments: Any, **more: Any) -> list[bool]:
            if self._turn():
                return [False] * (len(keys) // 16)
            answer: list[bool] = call(keys, *arguments, **more)
            return answer

        return wrapped


class Machine:
    """One manager and what the model knows; a step is a method."""

    def __init__(self, folder: Path) -> None:
        self.manager = KVManager(
            MODEL, cache_config(folder, num_cpu_blocks=14, num_ssd_blocks=24, staging_bytes=4 << 10)
        )
        self.manager.start()
        self.engine = Engine(self.manager)
        self.manager.register_kv_caches([self.engine.tensor], self.engine.layout)
        self.faults = Faults(self.manager)
        self.free = list(range(ENGINE_BLOCKS))
        self.open: dict[int, tuple[str, Any, Any]] = {}
        self.running: dict[int, tuple[str, Any, list[int], int]] = {}
        self.came = 0
        self.failed = 0

    # --- steps -----------------------------------------------------------------------------

    def get_match(self, seed: int, blocks: int, skip: int) -> None:
        tokens = tokens_of(seed, blocks)
        wanted = np.arange(len(tokens)) >= skip * TOKENS
        task, mask = self.manager.get_match(tokens, wanted)
        self.check_mask(mask, skip)
        if mask.any():
            self.open[task] = ("get", tokens, mask)

    def put_match(self, seed: int, blocks: int) -> None:
        tokens = tokens_of(seed, blocks)
        task, mask = self.manager.put_match(tokens)
        if mask.any():
            self.check_mask(mask, int(mask.argmax()) // TOKENS)
            assert mask[int(mask.argmax()) :].all()
            self.open[task] = ("put", tokens, mask)

    @staticmethod
    def check_mask(mask: Any, first: int) -> None:
        count = int(mask.sum())
        assert count % TOKENS == 0
        assert mask[first * TOKENS : first * TOKENS + count].all()

    def launch(self, pick: int) -> None:
        task = list(self.open)[pick % len(self.open)]
        kind, tokens, mask = self.open[task]
        count, first = int(mask.sum()) // TOKENS, int(mask.argmax()) // TOKENS
        if count > len(self.free):
            return
        blocks = [self.free.pop() for _ in range(count)]
        for at, block in enumerate(blocks):
            if kind == "put":
                self.engine.write(block, tokens, first + at)
            else:
                self.engine.tensor[:, :, block] = 0
        del self.open[task]
        self.manager.launch(task, slots_of(blocks))
        self.running[task] = (kind, tokens, blocks, first)

    def lie(self, pick: int, blocks: int) -> None:
        """A launch that does not fit changes nothing."""
        task = list(self.open)[pick % len(self.open)]
        for wrong in (slots_of(range(blocks))[:-1], slots_of([ENGINE_BLOCKS]), [[1, 2]], None):
            with pytest.raises(InvalidArgumentError):
                self.manager.launch(task, wrong)
        assert self.manager.try_wait(task)[task].status is KVResponseStatus.UNREADY

    def wait(self, pick: int, completely: bool) -> None:
        task = list(self.running)[pick % len(self.running)]
        answer = self.manager.wait(task, SOON_S, completely)[task]
        self.take(task, answer)

    def take(self, task: int, answer: KVResponse) -> None:
        """A result stands: compare what came, and have the blocks back."""
        kind, tokens, blocks, first = self.running.pop(task)
        assert answer.status in GOOD, answer
        assert answer.return_mask is not None
        came = int(answer.return_mask.sum()) // TOKENS
        if answer.status is KVResponseStatus.SUCCESS:
            assert came == len(blocks)
        else:
            self.failed += 1
        if kind == "get":
            for at in range(came):
                assert self.engine.holds(blocks[at], tokens, first + at), "wrong bytes came back"
            self.came += came
        for block in blocks:  # whoever has it next writes what it likes
            self.engine.tensor[:, :, block] = -1
        self.free += blocks

    def cancel(self, pick: int) -> None:
        every = [*self.open, *self.running]
        task = every[pick % len(every)]
        self.manager.cancel(task)
        self.open.pop(task, None)
        running = self.running.pop(task, None)
        if running is not None:
            _, _, blocks, _ = running
            self.free += blocks
            for block in blocks:
                self.engine.tensor[:, :, block] = -1
            assert self.manager.task_engine.transfer_engine.drain(SOON_S)
            assert all((self.engine.tensor[:, :, block] == -1).all() for block in blocks)

    def prefetch(self, seed: int, blocks: int) -> None:
        task = self.manager.prefetch_async(tokens_of(seed, blocks))
        assert self.manager.wait(task, SOON_S)[task].status in GOOD

    def evict(self, count: int, device: DeviceType) -> None:
        self.manager.task_engine.cache_engine.engine(device).evict(count)

    def reset(self) -> None:
        self.manager.reset()
        for task, answer in self.manager.wait([*self.open, *self.running], 0).items():
            cancelled = answer.status is KVResponseStatus.CANCELLED
            assert cancelled or task in self.running
        for _, _, blocks, _ in self.running.values():
            self.free += blocks
        self.open.clear()
        self.running.clear()
        for store in self.manager.task_engine.storage.stores.values():
            assert store.capacity().records == 0

    def arm(self, turns: int) -> None:
        self.faults.left = turns

    # --- what always holds -----------------------------------------------------------------

    def check(self) -> None:
        tasks = self.manager.task_engine
        tasks.check_integrity()
        held = sum(len(blocks) for _, _, blocks, _ in self.running.values())
        assert held + len(self.free) == ENGINE_BLOCKS

    def end(self) -> None:
        """Nothing is held when all is over."""
        try:
            self.faults.left = -1
            while self.running:
                self.wait(0, True)
            self.manager.cancel(list(self.open))
            tasks = self.manager.task_engine
            assert tasks.transfer_engine.drain(SOON_S)
            self.check()
            assert tasks.open_tasks == 0
            for store in tasks.storage.stores.values():
                records = store.capacity().records
                each: Any = store
                stats = each._index.stats()
                assert stats["held"] == 0, stats
                assert stats["pending"] == 0, stats
                assert store.evict(records) == records, "a record is held by nobody we know"
        finally:
            self.manager.shutdown()


SEEDS = st.integers(0, PROMPTS - 1)
COUNTS = st.integers(1, BLOCKS)
PICKS = st.integers(0, 99)


class KVManagerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.machine = Machine(Path(self.folder.name))

    @rule(seed=SEEDS, blocks=COUNTS, skip=st.integers(0, 2))
    def get_match(self, seed: int, blocks: int, skip: int) -> None:
        self.machine.get_match(seed, blocks, skip)

    @rule(seed=SEEDS, blocks=COUNTS)
    def put_match(self, seed: int, blocks: int) -> None:
        self.machine.put_match(seed, blocks)

    @rule(pick=PICKS)
    def launch(self, pick: int) -> None:
        if self.machine.open:
            self.machine.launch(pick)

    @rule(pick=PICKS, blocks=COUNTS)
    def lie(self, pick: int, blocks: int) -> None:
        if self.machine.open:
            self.machine.lie(pick, blocks)

    @rule(pick=PICKS, completely=st.booleans())
    def wait(self, pick: int, completely: bool) -> None:
        if self.machine.running:
            self.machine.wait(pick, completely)

    @rule(pick=PICKS)
    def cancel(self, pick: int) -> None:
        if self.machine.open or self.machine.running:
            self.machine.cancel(pick)

    @rule(seed=SEEDS, blocks=COUNTS)
    def prefetch(self, seed: int, blocks: int) -> None:
        self.machine.prefetch(seed, blocks)

    @rule(count=st.integers(0, 12), device=st.sampled_from([DeviceType.CPU, DeviceType.SSD]))
    def evict(self, count: int, device: DeviceType) -> None:
        self.machine.evict(count, device)

    @rule(turns=st.integers(0, 6))
    def arm(self, turns: int) -> None:
        self.machine.arm(turns)

    @rule()
    def reset(self) -> None:
        self.machine.reset()

    @invariant()
    def holds(self) -> None:
        self.machine.check()

    def teardown(self) -> None:
        try:
            self.machine.end()
        finally:
            self.folder.cleanup()


KVManagerMachine.TestCase.settings = settings(
    max_examples=20, stateful_step_count=40, deadline=None
)
TestKVManagerMachine = KVManagerMachine.TestCase


def random_steps(folder: Path, seed: int, steps: int) -> Machine:
    """A long run of one manager: what short ones do not fill, this one does."""
    pick = random.Random(seed)
    machine = Machine(folder)
    try:
        for step in range(steps):
            choices = ["get", "get", "get", "put", "put", "prefetch", "evict", "arm"]
            choices += ["launch"] * (4 if machine.open else 0)
            choices += ["wait"] * (4 if machine.running else 0)
            choices += ["cancel", "lie"] if machine.open else []
            choices += ["reset"] if step % 97 == 96 else []
            todo = pick.choice(choices)
            seed_of, blocks, at = (
                pick.randrange(PROMPTS),
                pick.randint(1, BLOCKS),
                pick.randrange(99),
            )
            if todo == "get":
                machine.get_match(seed_of, blocks, pick.randrange(3))
            elif todo == "put":
                machine.put_match(seed_of, blocks)
            elif todo == "launch":
                machine.launch(at)
            elif todo == "wait":
                machine.wait(at, pick.random() < 0.5)
            elif todo == "cancel":
                machine.cancel(at)
            elif todo == "lie":
                machine.lie(at, blocks)
            elif todo == "prefetch":
                machine.prefetch(seed_of, blocks)
            elif todo == "evict":
                device = pick.choice([DeviceType.CPU, DeviceType.SSD])
                machine.evict(pick.randrange(6), device)
            elif todo == "arm":
                machine.arm(pick.randrange(20))
            else:
                machine.reset()
            if step % 10 == 0:
                machine.check()
    except BaseException as error:
        machine.manager.shutdown()
        raise AssertionError(f"seed {seed}, step {step}, {todo}") from error
    machine.end()
    return machine


def test_long_random_run_leaks_and_corrupts_nothing(tmp_path: Path) -> None:
    machine = random_steps(tmp_path, 1, 500)
    assert machine.came > 0
    assert machine.failed > 0


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(2, 4))
def test_ten_thousand_random_steps(tmp_path: Path, seed: int) -> None:
    machine = random_steps(tmp_path, seed, 10_000)
    assert machine.came > 1000
    assert machine.failed > 50
