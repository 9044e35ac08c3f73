"""The memory of one model's instance, as the loop asks for it: put to sleep, woken, looked at.

    problem = await model.memory.wake()      # None: it may hold memory again

A model whose settings name no instance has none: everything succeeds, and nothing is known. So it
is while its instance has not started, or has ended. What blocks runs in a thread.
"""

from __future__ import annotations

import asyncio
import logging

from kvelastic.controller import instance_memory
from kvelastic.controller.settings import ModelSettings, SleepSettings
from kvelastic.errors import KvelasticError, SegmentNotFoundError

_log = logging.getLogger("kvelastic.controller")

_WAKE_WAIT_S = 6.0
"""An instance that wakes waits up to five seconds for others to give what it has reserved."""


class ModelMemory:
    """See the module. Used in the loop only."""

    def __init__(self, settings: ModelSettings, sleep: SleepSettings) -> None:
        self._settings = settings
        self._sleep = sleep
        self._requesting = asyncio.Lock()

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
            answer = await instance_memory.request(name, asleep=asleep, wait_s=wait_s)
        except SegmentNotFoundError:
            return None  # nothing is held
        except KvelasticError as error:
            return f"{error.code}: {error}"
        if answer["state"] == "refused":
            return f"its instance refuses to {'sleep' if asleep else 'wake'}: {answer['reason']}"
        return None

    async def is_asleep(self) -> bool | None:
        """Whether it sleeps."""
        name = self._settings.instance
        if name is None:
            return None
        try:
            return await asyncio.to_thread(instance_memory.is_asleep, name)
        except KvelasticError:
            return None

    async def is_missing(self) -> bool:
        """Whether the settings name an instance that is not there."""
        name = self._settings.instance
        if name is None:
            return False
        try:
            await asyncio.to_thread(instance_memory.is_asleep, name)
        except SegmentNotFoundError:
            return True
        except KvelasticError:
            pass  # it is there, and something else is wrong with it
        return False

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
        async with self._requesting:  # of two at once the later one is the newer configuration's
            request, name = self._settings.memory, self._settings.instance
            if name is None or (request.min, request.limit, request.priority) == (None, None, None):
                return
            try:
                await instance_memory.request(
                    name,
                    limit_bytes=request.limit,
                    min_bytes=request.min,
                    priority=request.priority,
                )
            except KvelasticError as error:
                _log.warning(
                    "no request was taken: %s", error, extra={"model": self._settings.name}
                )
