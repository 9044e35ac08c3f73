"""The maintenance loop: puts models to sleep, and polls the state of engines and memory."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from kvelastic.controller.models import instance_memory
from kvelastic.controller.models.gate import State
from kvelastic.controller.models.memory_history import INTERVAL_S
from kvelastic.controller.models.served_model import ServedModel
from kvelastic.controller.models.sleep_policy import due, victims
from kvelastic.errors import is_out_of_descriptors

if TYPE_CHECKING:
    from kvelastic.controller.app_state import AppState

_log = logging.getLogger("kvelastic.controller")

LOOK_AT_ENGINES_S = 5.0
"""Interval at which idle engines are polled, in case another client put them to sleep."""


class MaintenanceLoop:
    """Two asyncio tasks: one checks models, one samples the devices' memory."""

    def __init__(self, app_state: AppState) -> None:
        self._app_state = app_state
        self._tasks: set[asyncio.Task[None]] = set()
        self._looked_s = time.monotonic()

    def start(self) -> None:
        """Start both tasks; call it in the event loop."""
        loop = asyncio.get_running_loop()
        self._tasks = {loop.create_task(self._run()), loop.create_task(self._sample_on())}

    async def stop(self) -> None:
        """Cancel both tasks and wait for their end."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._app_state.settings.sleep.check_every)
            try:
                await self.look()
            except Exception as error:
                if is_out_of_descriptors(error):
                    self._app_state.files.note("looking at instances' memory")
                    continue
                _log.exception("maintenance failed; it continues")

    async def _sample_on(self) -> None:
        while True:
            began_s = time.monotonic()
            try:
                await self.sample()
            except Exception as error:
                if is_out_of_descriptors(error):
                    self._app_state.files.note("taking a sample of the devices' memory")
                else:
                    _log.exception("no sample of memory was taken; the next one follows")
            await asyncio.sleep(max(0.0, INTERVAL_S - (time.monotonic() - began_s)))

    async def sample(self) -> None:
        """Add one sample of the devices' memory use to the history."""
        devices = await asyncio.to_thread(instance_memory.devices)
        self._app_state.memory_history.add(time.monotonic(), devices)

    async def look(self) -> None:
        """Run one maintenance pass: poll engines, put idle models to sleep, relieve pressure."""
        now_s = time.monotonic()
        if now_s - self._looked_s >= LOOK_AT_ENGINES_S:
            self._looked_s = now_s
            await asyncio.gather(
                *(
                    m.find_state()
                    for m in self._app_state.fleet
                    if m.gate.is_idle and m.gate.state in {State.AWAKE, State.ASLEEP}
                ),
                *(m.look_at_memory() for m in self._app_state.fleet),
                *(m.look_at_engines() for m in self._app_state.fleet if m.state is State.AWAKE),
            )
        for model in due(self._app_state.fleet):
            # After a request's own `keep_alive` the next request does not wait for `min_sleep`.
            _put_to_sleep(model, "idle", by_hand=model.keep_alive_s is not None)
        sleep = self._app_state.settings.sleep
        instances = [m for m in self._app_state.fleet if m.settings.instance is not None]
        if sleep.auto and instances:
            generations = {model: model.gate.generation for model in instances}
            requests, held = await asyncio.to_thread(instance_memory.pressure, sleep.pressure_after)
            # If a model has slept or woken since, the amount read for it is out of date.
            same = [model for model in instances if model.gate.generation == generations[model]]
            for model in victims(same, requests, held):
                _put_to_sleep(model, "others ask for memory")


def _put_to_sleep(model: ServedModel, why: str, *, by_hand: bool = False) -> None:
    """Request sleep. The gate decides."""
    if model.gate.ask_sleep(time.monotonic(), by_hand=by_hand) is None:
        _log.info("falls asleep: %s", why, extra={"model": model.name})
