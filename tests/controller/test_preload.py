"""A model that its controller wakes without a request, and a request that comes for it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from running import app_state
from test_swap import on_demand
from waiting import DEADLINE_S

from kvelastic.controller.models.gate import State, Ticket
from kvelastic.controller.models.served_model import ServedModel

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("state", [State.STARTING, State.WAKING])
def test_request_during_a_preload_displaces_others(tmp_path: Path, state: State) -> None:
    models = on_demand(tmp_path, "a", "b")
    for model in models:
        del model["instance"]
        model["memory"] = {"needs": "16G"}
        model["launch"]["command"].remove("--instance")
    models[1]["launch"]["preload"] = True
    sections = {"devices": {"gpu0": "24G"}, "swap": {"min_awake": 0}}

    async def served(model: ServedModel) -> None:
        ticket = Ticket()
        await model.enter(ticket)
        model.leave(ticket)

    async def serve() -> None:
        first = sections | {"models": models[:1]}
        async with app_state(first, sections | {"models": models}) as front:
            await served(front.fleet.need("a"))
            await front.reload()
            preloaded = front.fleet.need("b")
            while preloaded.state is not state:
                await asyncio.sleep(0)
            await served(preloaded)
            assert front.fleet.need("a").state is State.ASLEEP

    asyncio.run(asyncio.wait_for(serve(), DEADLINE_S))
