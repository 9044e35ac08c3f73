"""A model that is awake while its memory is not as the configuration says: what /models shows."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

import pytest
from ledger_instance import Instance
from waiting import DEADLINE_S

from kvelastic.controller.models.gate import State
from kvelastic.controller.models.served_model import ServedModel
from kvelastic.controller.settings.settings import MemorySettings, ModelSettings, SleepSettings
from kvelastic.instance.reading import look_at
from kvelastic.shared import segment

MIB = 1 << 20
NAME = f"problems-{os.getpid()}"


class Calls:
    """Engines that do what they are asked for."""

    is_ready = True

    async def is_healthy(self, *_: object) -> bool:
        return self.is_ready

    async def is_sleeping(self, *_: object) -> bool:
        return False

    async def accepts_connections(self, *_: object) -> bool:
        return True

    async def health_status(self, *_: object) -> int:
        return 200

    async def sleep(self, *_: object) -> None:
        pass

    wake = sleep


def instance() -> Instance:
    return Instance(
        KVELASTIC_IPC_NAME=NAME, KVELASTIC_HOST_MEMORY="256M", KVELASTIC_LEDGER=f"{NAME}-ledger"
    )


def served(calls: Calls, memory: MemorySettings | None = None) -> ServedModel:
    settings = ModelSettings(
        name="m",
        engine="vllm",
        url="http://127.0.0.1:9",
        instance=NAME,
        memory=memory or MemorySettings(),
    )
    return ServedModel(settings, SleepSettings(), calls)  # type: ignore[arg-type]


async def look_until(model: ServedModel, holds: Callable[[], bool]) -> None:
    """Look at the memory until the instance, which may be slow, has done what was requested."""
    while not holds():
        await model.look_at_memory()


def test_restarted_engine_gets_the_configured_memory() -> None:
    async def serve() -> None:
        model = served(Calls(), MemorySettings(limit=32 * MIB, priority=3))
        await model.look_at_first()
        for _ in range(2):
            await model.look_at_memory()
            assert "no limit is in force" in str(model.problems)
            with instance():
                await look_until(model, lambda: look_at(NAME).limit_bytes == 32 * MIB)
                await model.look_at_memory()
                assert model.problems is None
                found = look_at(NAME)
                assert (found.limit_bytes, found.priority) == (32 * MIB, 3)
                # What an operator sets afterwards holds until the engine ends.
                segment.request(NAME, limit_bytes=64 * MIB, wait_s=DEADLINE_S)
                await model.look_at_memory()
                assert look_at(NAME).limit_bytes == 64 * MIB
        assert model.state is State.AWAKE

    asyncio.run(asyncio.wait_for(serve(), DEADLINE_S))


def test_missing_instance_of_stopped_engine_is_no_problem() -> None:
    async def serve() -> None:
        calls = Calls()
        calls.is_ready = False
        model = served(calls, MemorySettings(limit=32 * MIB))
        await model.look_at_first()
        await model.look_at_memory()
        assert model.problems is None

    asyncio.run(asyncio.wait_for(serve(), DEADLINE_S))


def test_missing_instance_is_reported_again_after_sleep() -> None:
    async def serve() -> None:
        model = served(Calls())
        await model.look_at_first()
        for _ in range(2):
            await model.look_at_memory()
            assert "no limit is in force" in str(model.problems)
            model.keep_alive(0)
            await model.settled()
            await model.look_at_memory()
            assert (model.state, model.problems) == (State.ASLEEP, None)
            model.preload()
            await model.settled()
            assert model.state is State.AWAKE

    asyncio.run(asyncio.wait_for(serve(), DEADLINE_S))


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda: segment.request(NAME, min_bytes=0, wait_s=DEADLINE_S), id="by hand"),
        pytest.param(None, id="by the configuration"),
    ],
)
def test_refused_configured_memory_is_reported(change: Callable[[], object] | None) -> None:
    async def serve() -> None:
        with instance():
            model = served(Calls(), MemorySettings(min=1 << 40))
            await model.look_at_first()
            refuses = f"{NAME} refuses what the configuration says"
            await look_until(model, lambda: refuses in str(model.problems))
            assert "guarantee" in str(model.problems)
            if change is None:
                settings = model.settings.model_copy(update={"memory": MemorySettings(min=MIB)})
                model.change(settings, model.sleep_settings)
                await model.memory.request_as_configured()
            else:
                change()
            await model.look_at_memory()
            assert model.problems is None

    asyncio.run(asyncio.wait_for(serve(), DEADLINE_S))
