"""Wrappers for the process that started the engine core (the API server)."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any

from kvelastic.integration.vllm import end_with_starter
from kvelastic.integration.vllm.end_with_starter import CLOSE_S

_KILLED_WAIT_S = 5.0
"""How long to wait for a killed process to disappear."""
_LOOK_S = 0.01
_LOOK_AT_CORE_S = 0.2
"""Interval at which a call checks that its engine core still runs."""


def start_engine_cores(
    original: Callable[..., Any], manager: Any, *args: Any, **kwargs: Any
) -> None:
    """Refuse invalid starts early, and tie engine cores to the life of this process."""
    from kvelastic.integration.vllm.start_checks import check_start

    given = inspect.signature(original).bind(manager, *args, **kwargs).arguments
    first = given["start_index"]
    check_start(given["vllm_config"], range(first, first + given["local_engine_count"]))
    end_with_starter.start_engine_cores(original, manager, *args, **kwargs)


def shutdown_engine_cores(
    original: Callable[..., Any], procs: list[Any], *args: Any, **kwargs: Any
) -> None:
    """Let an engine core with tiers demote its cache; clean up after a killed one.

    By default vLLM kills its engine core without delay (--shutdown-timeout 0). An engine core whose
    worker hangs also gets time, so that it can kill that worker.
    """
    from kvelastic import config
    from kvelastic.shared import segment

    try:
        settings = config.load()
        if settings.tiers or _lost_a_worker({process.pid for process in procs}):
            _let_end(procs, settings.tier_exit_s + CLOSE_S)
        original(procs, *args, **kwargs)
    finally:
        for process in procs:
            process.join(_KILLED_WAIT_S)
        segment.reap()
        _leave_ledgers({process.pid for process in procs})


async def call_engine_core(
    original: Callable[..., Awaitable[Any]], client: Any, *args: Any, **kwargs: Any
) -> Any:
    """Call the engine core; raise `EngineDeadError` if it ends before it returns a result.

    Stock vLLM waits for the result for ever, and a server that is shutting down waits for the call.
    """
    from vllm.v1.engine.exceptions import EngineDeadError

    call = asyncio.ensure_future(original(client, *args, **kwargs))
    try:
        while not (await asyncio.wait({call}, timeout=_LOOK_AT_CORE_S))[0]:
            if client.resources.engine_dead:
                raise EngineDeadError
        return call.result()
    finally:
        call.cancel()


def _lost_a_worker(engine_cores: set[int]) -> bool:
    from kvelastic.shared import segment

    return any(
        info.header.get("pid") in engine_cores and info.ack.get("state") == "failed"
        for info in segment.list_segments()
    )


def _let_end(procs: list[Any], most_s: float) -> None:
    for process in procs:
        if process.is_alive():
            process.terminate()
    end_s = time.monotonic() + most_s
    for process in procs:
        process.join(max(0.0, end_s - time.monotonic()))


def _leave_ledgers(engine_cores: set[int]) -> None:
    """Wait for ledger members to leave: workers of a killed engine core end a moment after it."""
    from kvelastic.shared import ledger

    end_s = time.monotonic() + _KILLED_WAIT_S
    while True:
        ledger.reap()
        members = {member.pid for info in ledger.list_ledgers() for member in info.members}
        if not members & engine_cores or time.monotonic() >= end_s:
            return
        time.sleep(_LOOK_S)
