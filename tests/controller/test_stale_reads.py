"""What was read before a change does not undo the change."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from running import Engine, app_state, config_for
from waiting import DEADLINE_S

from kvelastic.controller.models import instance_memory
from kvelastic.controller.models.gate import State
from kvelastic.controller.models.served_model import ServedModel
from kvelastic.controller.models.sleep_policy import MemoryRequest
from kvelastic.controller.settings.settings import ModelSettings, SleepSettings


class SlowCalls:
    """An engine whose answers to `is_sleeping` come when the test lets them."""

    def __init__(self) -> None:
        self.asked: asyncio.Queue[asyncio.Future[bool]] = asyncio.Queue()
        self.done: list[str] = []

    async def is_sleeping(self, *_: Any) -> bool:
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.asked.put_nowait(answer)
        return await answer

    async def accepts_connections(self, *_: Any) -> bool:
        return True

    async def sleep(self, *_: Any) -> None:
        self.done.append("sleep")

    async def wake(self, *_: Any) -> None:
        self.done.append("wake")


async def awake_model(calls: SlowCalls) -> ServedModel:
    settings = ModelSettings(name="m", engine="vllm", url="http://127.0.0.1:1")
    model = ServedModel(settings, SleepSettings(), calls)  # type: ignore[arg-type]
    first = asyncio.create_task(model.look_at_first())
    (await calls.asked.get()).set_result(False)
    await first
    assert model.state is State.AWAKE
    return model


async def sleep(model: ServedModel) -> None:
    assert model.gate.ask_sleep(time.monotonic(), by_hand=True) is None
    await model.settled()
    assert model.state is State.ASLEEP


@pytest.mark.parametrize("answer", [False, True])
def test_state_read_before_sleep_or_wake_is_discarded(answer: bool) -> None:
    async def run() -> None:
        calls = SlowCalls()
        model = await awake_model(calls)
        if answer:
            await sleep(model)
        look = asyncio.create_task(model.find_state())
        asked = await calls.asked.get()  # it says how it is now, and the answer is on its way
        if answer:
            assert model.gate.ask_wake(time.monotonic()) is None
            await model.settled()
        else:
            await sleep(model)
        asked.set_result(answer)
        await look
        await model.settled()
        assert model.state is (State.AWAKE if answer else State.ASLEEP)

    asyncio.run(run())


def test_state_read_before_wake_sleep_cycle_is_discarded() -> None:
    async def run() -> None:
        calls = SlowCalls()
        model = await awake_model(calls)
        await sleep(model)
        look = asyncio.create_task(model.find_state())
        asked = await calls.asked.get()
        assert model.gate.ask_wake(time.monotonic()) is None
        await model.settled()
        await sleep(model)
        asked.set_result(False)  # it was awake in between
        await look
        await model.settled()
        assert model.state is State.ASLEEP

    asyncio.run(run())


def test_state_read_in_current_generation_is_applied() -> None:
    async def run() -> None:
        calls = SlowCalls()
        model = await awake_model(calls)
        await sleep(model)
        look = asyncio.create_task(model.find_state())
        (await calls.asked.get()).set_result(False)
        await look
        await model.settled()
        assert model.state is State.AWAKE
        assert calls.done == ["sleep"]  # somebody else has woken the engine

    asyncio.run(run())


def test_model_removed_during_memory_read_stays_awake(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its engine may serve another model, or another controller's, by then."""

    async def serve(engine: Engine) -> None:
        sleep = {"auto": True, "check_every": "1h"}
        config = config_for(engine, sleep=sleep, model={"instance": "one"})
        loop = asyncio.get_running_loop()
        async with app_state(config, {"models": []}) as front:
            model = front.fleet.need("m")

            def pressure(_: float) -> object:
                asyncio.run_coroutine_threadsafe(front.reload(), loop).result()
                return [MemoryRequest("host", 1, 0)], {"one": (frozenset({"host"}), 1)}

            monkeypatch.setattr(instance_memory, "pressure", pressure)
            await front.maintenance.look()
            await model.settled()
            assert model.state is State.AWAKE

    with Engine() as engine:
        asyncio.run(asyncio.wait_for(serve(engine), DEADLINE_S))
        assert engine.count("sleep_calls") == 0
