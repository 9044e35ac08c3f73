"""The memory of one model's instance, as the loop asks for it: put to sleep, woken, looked at.

    problem = await model.memory.wake()      # None: it may hold memory again

A model whose settings name no instance has none: everything succeeds, and nothing is known. So it
is while its instance has not started, or has ended. What blocks runs in a thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from kvelastic.controller import instance_memory
from kvelastic.controller.instance_memory import Found
from kvelastic.controller.settings import ModelSettings, SleepSettings
from kvelastic.errors import KvelasticError, SegmentNotFoundError
from kvelastic.segment import Request

_WAKE_WAIT_S = 6.0
"""An instance that wakes waits up to five seconds for others to give what it has reserved."""


class ModelMemory:
    """See the module. Used in the loop only."""

    def __init__(self, settings: ModelSettings, sleep: SleepSettings) -> None:
        self._settings = settings
        self._sleep = sleep
        self._requesting = asyncio.Lock()
        self._requested_of = b""
        """The instance that has got what the configuration requests, by its uuid."""
        self._revision = 0
        """Of that request."""

    def change(self, settings: ModelSettings, sleep: SleepSettings) -> None:
        """Take new settings; `request_as_configured` tells the instance."""
        self._settings, self._sleep = settings, sleep

    async def sleep(self) -> str | None:
        """It holds nothing from now on; its limit stays. A problem if it refuses."""
        # What a sleeper holds is another's as soon as it sleeps: that is waited for.
        return await self._request(asleep=True, wait_s=self._sleep.sleep_timeout)

    async def wake(self) -> str | None:
        """It may hold memory again; a problem if the device lacks room for it."""
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
        """What is wrong with the memory of a model that is awake; None: nothing that is known.

        An instance that the configuration's request has not reached yet gets it: its engine was
        started, or started anew, after the controller.
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
        if found.refused and found.revision == self._revision:
            return (
                f"its instance {name} refuses what the configuration says of memory, and none of"
                f" that is in force: {found.refused}"
            )
        if found.is_asleep:
            return (
                f"its instance {name} was put to sleep outside the controller, and requests wait:"
                " wake it with kvctl wake or /action/wakeup"
            )
        return None

    async def engine_asleep(self) -> bool | None:
        """Whether its engine sleeps, as far as that has noted it there."""
        name = self._settings.instance
        if name is None:
            return None
        try:
            return await asyncio.to_thread(instance_memory.engine_asleep, name)
        except KvelasticError:
            return None

    async def request_as_configured(self) -> None:
        """Tell it what the configuration says of its memory, if it is there."""
        name = self._settings.instance
        if name is None:
            return
        self._requested_of = b""
        with suppress(KvelasticError):  # `problem` tries again, and says it
            found = await asyncio.to_thread(instance_memory.look, name)
            if found is not None:
                await self._request_as_configured(name, found)

    async def _request_as_configured(self, name: str, found: Found) -> None:
        async with self._requesting:  # of two at once the later one is the newer configuration's
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
