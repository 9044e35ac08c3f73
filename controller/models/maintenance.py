"""The maintenance loop: puts models to sleep, and polls the state of engines and memory."""

from __future__ import annotations

import asyncio
import logging
import math
import time

from kvelastic.controller.models import instance_memory
from kvelastic.controller.models.gate import State
from kvelastic.controller.models.memory_history import INTERVAL_S
from kvelastic.controller.models.served_model import ServedModel
from kvelastic.controller.models.serving import Serving
from kvelastic.controller.models.sleep_policy import Candidate, MemoryRequest, due, victims
from kvelastic.errors import is_out_of_descriptors

_log = logging.getLogger("kvelastic.controller")

LOOK_AT_ENGINES_S = 5.0
"""Interval at which idle engines are polled, in case another client put them to sleep."""


class MaintenanceLoop:
    """Two asyncio tasks: one checks models, one samples the devices' memory."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
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
            await asyncio.sleep(self._serving.settings.sleep.check_every)
            try:
                await self.look()
            except Exception as error:
                if is_out_of_descriptors(error):
                    self._serving.files.note("looking at instances' memory")
                    continue
                _log.exception("maintenance failed; it continues")

    async def _sample_on(self) -> None:
        while True:
            began_s = time.monotonic()
            try:
                await self.sample()
            except Exception as error:
                if is_out_of_descriptors(error):
                    self._serving.files.note("taking a sample of the devices' memory")
                else:
                    _log.exception("no sample of memory was taken; the next one follows")
            await asyncio.sleep(max(0.0, INTERVAL_S - (time.monotonic() - began_s)))

    async def sample(self) -> None:
        """Add one sample of the devices' memory use to the history."""
        devices = await asyncio.to_thread(instance_memory.devices)
        self._serving.memory_history.add(time.monotonic(), devices)

    async def look(self) -> None:
        """Run one maintenance pass: poll engines, put idle models to sleep, relieve pressure."""
        now_s = time.monotonic()
        if now_s - self._looked_s >= LOOK_AT_ENGINES_S:
            self._looked_s = now_s
            await asyncio.gather(
                *(
                    m.find_state()
                    for m in self._serving.fleet
                    if m.gate.is_idle and m.gate.state in {State.AWAKE, State.ASLEEP}
                ),
                *(m.look_at_memory() for m in self._serving.fleet),
                *(m.look_at_engines() for m in self._serving.fleet if m.state is State.AWAKE),
            )
        for name in due([candidate_of(model) for model in self._serving.fleet]):
            model = self._serving.fleet.need(name)
            # After a request's own `keep_alive` the next request does not wait for `min_sleep`.
            self._put_to_sleep(name, "idle", by_hand=model.keep_alive_s is not None)
        sleep = self._serving.settings.sleep
        instances = [m for m in self._serving.fleet if m.settings.instance is not None]
        if sleep.auto and instances:
            generations = {model: model.gate.generation for model in instances}
            requests, held = await asyncio.to_thread(instance_memory.pressure, sleep.pressure_after)
            # If a model has slept or woken since, the amount read for it is out of date.
            same = [model for model in instances if model.gate.generation == generations[model]]
            if requests:
                self._relieve(same, requests, held)

    def _relieve(
        self,
        instances: list[ServedModel],
        requests: list[MemoryRequest],
        held: dict[str, tuple[frozenset[str], int]],
    ) -> None:
        candidates = [
            candidate_of(model, *held.get(model.settings.instance or "", (frozenset(), 0)))
            for model in instances
        ]
        for name in victims(candidates, requests):
            self._put_to_sleep(name, "others ask for memory")

    def _put_to_sleep(self, name: str, why: str, *, by_hand: bool = False) -> None:
        """Request sleep. The gate decides: the model's state may have changed since the check."""
        model = self._serving.fleet.find(name)
        if model is not None and model.gate.ask_sleep(time.monotonic(), by_hand=by_hand) is None:
            _log.info("falls asleep: %s", why, extra={"model": name})


def candidate_of(
    model: ServedModel, devices: frozenset[str] = frozenset(), held_bytes: int = 0
) -> Candidate:
    """Return the model's input to the sleep policy."""
    settings, sleep = model.settings, model.sleep_settings
    idle_after_s = settings.ttl
    if idle_after_s is None and sleep.auto:
        idle_after_s = sleep.idle_after
    if model.keep_alive_s is not None:
        idle_after_s = None if math.isinf(model.keep_alive_s) else model.keep_alive_s
    return Candidate(
        name=model.name,
        is_awake=model.gate.state is State.AWAKE,
        is_idle=model.gate.is_idle,
        can_sleep=model.can_sleep,
        pinned=settings.pin,
        idle_s=model.idle_s,
        idle_after_s=idle_after_s,
        priority=settings.memory.priority or 0,
        devices=devices,
        held_bytes=held_bytes,
    )
