"""The memory of one model's instance: sleep, wake and state, for use in the event loop.

    problem = await model.memory.wake()      # None: it may hold memory again

If the settings name no instance, every operation succeeds and the state is unknown. The same holds
before the instance has started and after it has ended. Blocking calls run in a thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from kvelastic.controller.models import instance_memory
from kvelastic.controller.settings.settings import ModelSettings, SleepSettings
from kvelastic.errors import KvelasticError, SegmentNotFoundError
from kvelastic.instance.status import InstanceStatus
from kvelastic.shared.segment import Request

_WAKE_WAIT_S = 6.0
"""A waking instance waits up to 5 s for others to release the memory that it has reserved."""


class ModelMemory:
    """Sleep, wake and state of one model's instance. Use it in the event loop only."""

    def __init__(self, settings: ModelSettings, sleep: SleepSettings) -> None:
        self._settings = settings
        self._sleep = sleep
        self._requesting = asyncio.Lock()
        self._requested_of = b""
        """UUID of the instance that has received the configured request; empty: none."""
        self._revision = 0
        """Revision of that request."""

    def change(self, settings: ModelSettings, sleep: SleepSettings) -> None:
        """Take new settings. `request_as_configured` sends them to the instance."""
        self._settings, self._sleep = settings, sleep

    async def sleep(self) -> str | None:
        """Put the instance to sleep: it releases all memory and keeps its limit.

        Returns None, or the problem if it refuses. Waits for at most `sleep.sleep_timeout`.
        """
        # Others may use the memory once the instance sleeps, so wait until it is released.
        return await self._request(asleep=True, wait_s=self._sleep.sleep_timeout)

    async def wake(self) -> str | None:
        """Wake the instance, so that it may hold memory. Waits for at most 6 s.

        Returns None, or the problem if the device lacks memory for it.
        """
        return await self._request(asleep=False, wait_s=_WAKE_WAIT_S)

    async def _request(self, *, asleep: bool, wait_s: float) -> str | None:
        name = self._settings.instance
        if name is None:
            return None
        try:
            answer = await instance_memory.request(name, Request(asleep=asleep), wait_s=wait_s)
        except SegmentNotFoundError:
            return None  # nothing is held
        except KvelasticError as error:
            return f"{error.code}: {error}"
        if answer["state"] == "refused":
            return f"its instance refuses to {'sleep' if asleep else 'wake'}: {answer['reason']}"
        return None

    async def problem(self, is_engine_ready: Callable[[], Awaitable[bool]]) -> str | None:
        """Return the memory problem of a model that is awake, or None if none is known.

        If the instance has not received the configured request, it is sent. That is the case if its
        engine was started or restarted after the controller.
        """
        name = self._settings.instance
        if name is None:
            return None
        try:
            found = await asyncio.to_thread(instance_memory.look, name)
            if found is not None and found.uuid != self._requested_of:
                await self._request_as_configured(name, found)
        except KvelasticError as error:
            return f"its instance {name} cannot be read, or takes no request: {error}"
        if found is None:
            return _missing(name) if await is_engine_ready() else None
        if found.request_state == "refused" and found.revision == self._revision:
            return (
                f"its instance {name} refuses what the configuration says of memory, and none of"
                f" that is in force: {found.reason or 'no reason'}"
            )
        if found.asleep:
            return (
                f"its instance {name} was put to sleep outside the controller, and requests wait:"
                f" wake it with kvctl wake {name} or POST /action/wakeup/{self._settings.name}"
            )
        return None

    async def is_asleep(self) -> bool:
        """Return whether the instance sleeps; False if that is unknown."""
        found = await self._look()
        return found is not None and found.asleep

    async def engine_asleep(self) -> bool | None:
        """Return whether its engine sleeps, as recorded by the engine; None if unknown."""
        found = await self._look()
        return None if found is None else found.engine_asleep

    async def _look(self) -> InstanceStatus | None:
        name = self._settings.instance
        if name is not None:
            with suppress(KvelasticError):
                return await asyncio.to_thread(instance_memory.look, name)
        return None

    async def request_as_configured(self) -> None:
        """Send the configured memory settings to the instance, if it is running."""
        name = self._settings.instance
        if name is None:
            return
        self._requested_of = b""
        with suppress(KvelasticError):  # `problem` retries and reports the error
            found = await asyncio.to_thread(instance_memory.look, name)
            if found is not None:
                await self._request_as_configured(name, found)

    async def _request_as_configured(self, name: str, found: InstanceStatus) -> None:
        async with self._requesting:  # in order, so that the newest configuration is sent last
            memory = self._settings.memory
            request = Request(memory.limit, memory.min, memory.priority)
            if not request.is_empty:
                answer = await instance_memory.request(name, request)
                self._revision = answer["requested_revision"]
            self._requested_of = found.uuid


def _missing(name: str) -> str:
    return (
        f"its engine is ready without the instance {name}: no limit is in force. The engine needs"
        f" kvelastic, ENABLE_KVELASTIC=true and KVELASTIC_IPC_NAME={name}; the controller sets both"
        " for an engine that it launches, unless launch.env sets them"
    )
