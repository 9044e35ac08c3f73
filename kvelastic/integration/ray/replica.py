"""One engine behind one replica: the controller of a single model, without its HTTP server.

    replica = EngineReplica(settings, "chat", "abc12")
    await replica.start()                          # returns when the engine is ready
    async for part in replica.serve(request): ...  # a Head and bytes, and a Cut if it breaks off
    replica.problem                                # None: the engine works
    await replica.stop()

`serve` yields one `Unserved` instead if another replica can serve the request. The controller's
`AppState` and `EngineProcess` queue requests, put the model to sleep, wake it and launch it. This
module adds two rules that the controller leaves to its clients: a response counts as started when
the first bytes of its body arrive, and an engine that reports the death of its engine core has
failed even if its server still runs.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import re
import socket
from collections.abc import AsyncIterator
from contextlib import ExitStack
from typing import Any, Final

from kvelastic.controller.app_state import AppState
from kvelastic.controller.application import make_application
from kvelastic.controller.http.log_writer import LogWriter
from kvelastic.controller.http.open_files import OpenFiles
from kvelastic.controller.http.refusal import Refusal
from kvelastic.controller.http.request_log import RequestLog
from kvelastic.controller.models.gate import State
from kvelastic.controller.models.served_model import ServedModel
from kvelastic.errors import ClusterError
from kvelastic.integration.ray import engine_logs
from kvelastic.integration.ray.asgi_exchange import AsgiExchange
from kvelastic.integration.ray.messages import (
    ASLEEP,
    MODEL,
    Control,
    Cut,
    EngineRequest,
    Head,
    Unserved,
)
from kvelastic.integration.ray.node_room import ledger_report
from kvelastic.integration.ray.settings import ClusterSettings
from kvelastic.shared import ledger

_log = logging.getLogger("kvelastic.ray")

LOOK_EVERY_S: Final = 0.5
_ANSWER_S: Final = 2.0
FAILURES: Final = 2
"""Consecutive failed health checks after which the engine has failed."""
SILENCES: Final = 10
"""Consecutive timeouts of health checks after which the engine has failed. A busy engine may miss
some."""
_LOG_LINES: Final = 15
_RETRIED: Final = frozenset(
    (
        "engine_failed", "engine_unreachable", "model_asleep", "model_down", "model_removed",
        "queue_full", "queue_timeout", "shutting_down", "wake_failed",
    )
)  # fmt: skip
"""Codes of the controller's refusals after which another replica may serve the request."""
_LARGEST_REFUSAL: Final = 4096
_NAME: Final = re.compile(r"[^A-Za-z0-9._-]+")


class EngineReplica:
    """One engine with its controller. Create and use it in one event loop.

    Any thread may call `report` and `device_capacity_bytes`.
    """

    def __init__(self, settings: ClusterSettings, name: str, replica: str) -> None:
        """Take the settings, the model's name, and Ray's replica id, unique in the cluster."""
        self.name = name
        self.replica = replica
        self.instance = instance_name(name, replica)
        self.problem: str | None = None
        """Why the engine has failed, or None. Once set it does not change."""
        self._settings = settings
        self._closing = ExitStack()
        self._front: AppState | None = None
        self._model: ServedModel | None = None
        self._watcher: asyncio.Task[None] | None = None

    @property
    def model(self) -> ServedModel:
        """The controller's model. Valid after `start`."""
        assert self._model is not None, "start() comes first"
        return self._model

    async def start(self) -> None:
        """Start the engine and wait until it is ready.

        Raises `ClusterError` if it does not start; everything is stopped then.
        """
        await asyncio.to_thread(engine_logs.remove_oldest)
        writer = self._closing.enter_context(LogWriter(None))
        settings = self._settings.of_replica(self.name, self.instance, free_port())
        front = self._front = AppState(
            settings,
            RequestLog(writer),
            OpenFiles.raised(),
            source=engine_logs.SOURCE + self.instance,
        )
        self._app = make_application(front)
        await front.start()
        self._model = front.fleet.need(self.name)
        while self._model.state is State.STARTING:
            await asyncio.sleep(LOOK_EVERY_S / 5)
        if self._model.state is State.DOWN:
            why = self._why_not_ready()
            await self.stop()
            raise ClusterError(why)
        self._watcher = asyncio.get_running_loop().create_task(self._watch())

    async def stop(self) -> None:
        """Stop the engine and all its processes. Idempotent.

        Removes the engine's log if there was no problem.
        """
        if self._watcher is not None:
            self._watcher.cancel()
        front, self._front = self._front, None
        if front is not None:
            await front.stop()
            if self._model is not None and self._model.last_problem is None is self.problem:
                engine_logs.path_of(self.instance).unlink(missing_ok=True)
        self._closing.close()

    async def serve(self, request: EngineRequest) -> AsyncIterator[Head | bytes | Unserved | Cut]:
        """Forward the request to the engine and yield the response; see `messages`.

        A sleeping model is woken if `request.sleepers` names this replica, else the request is
        refused. Closing the iterator ends the request at the engine.
        """
        is_asleep = self.model.state in {State.FALLING_ASLEEP, State.ASLEEP}
        if is_asleep and self.replica not in request.sleepers:
            yield self._refused(503, ASLEEP, "The replica sleeps.")
            return
        exchange = AsgiExchange(self._app, request)
        try:
            first = await exchange.next_piece()
            unserved = await self._unserved(exchange, first)
            if unserved is not None:
                yield unserved
                return
            yield Head(exchange.status, exchange.headers, self.replica, first)
            while first:
                first = await exchange.next_piece()
                if first:
                    yield first
            if not exchange.is_whole:
                yield Cut(f"the engine broke the answer off: {self.problem or 'no reason given'}")
        finally:
            await exchange.end()

    async def _unserved(self, exchange: AsgiExchange, first: bytes) -> Unserved | None:
        """Return the `Unserved` of a response that another replica should retry, else None."""
        if not exchange.status or (not first and not exchange.is_whole):
            return self._refused(502, "engine_failed", "The engine broke off before its answer.")
        if exchange.status >= 429 and len(first) <= _LARGEST_REFUSAL:
            refusal = _refusal_in(first)
            if refusal is not None:
                return self._refused(exchange.status, *refusal)
        # An engine whose core has died sends such responses to all waiting requests.
        is_failure = exchange.status >= 500 or first.startswith(b'data: {"error"')
        if is_failure and await self._health() not in {200, None}:
            return self._refused(502, "engine_failed", "The engine has failed.")
        return None

    def _refused(self, status: int, code: str, message: str) -> Unserved:
        return Unserved(status, code, message, self.replica)

    async def control(self, request: EngineRequest) -> Control:
        """Call a route of this replica's controller for an operator (docs/controller.md).

        `MODEL` in the path stands for the model's name. Takes as long as the route.
        """
        path = request.path.replace(MODEL, self.name)
        exchange = AsgiExchange(self._app, dataclasses.replace(request, path=path))
        body = b""
        try:
            while piece := await exchange.next_piece():
                body += piece
        finally:
            await exchange.end()
        return Control(self.replica, self.instance, exchange.status, exchange.headers, body)

    def report(self) -> dict[str, Any]:
        """Return the state for routers and operators, as plain values. Blocks for milliseconds."""
        model = self.model
        state = State.DOWN if self.problem else model.state
        return {
            **ledger_report(self.instance, is_awake=state is State.AWAKE),
            "replica": self.replica,
            "model": self.name,
            "instance": self.instance,
            "state": state.value,
            "queue": model.gate.in_flight + model.gate.queued,
            "wakes": model.wakes,
            "sleeps": model.sleeps,
            "problem": self.problem or model.problems,
        }

    def device_capacity_bytes(self) -> int:
        """Return the sum of the capacities of the instance's ledgers. Blocks for milliseconds."""
        return sum(
            info.capacity_bytes
            for info in ledger.list_ledgers()
            if any(member.name == self.instance for member in info.members)
        )

    # -------------------------------------------------------------------------------- health

    async def _watch(self) -> None:
        failures = silences = 0
        while self.problem is None:
            await asyncio.sleep(LOOK_EVERY_S)
            if self.model.state is State.DOWN:
                self._fail(self.model.last_problem or "the engine has ended")
                return
            status = await self._health()
            failures = 0 if status in {200, None} else failures + 1
            silences = silences + 1 if status is None else 0
            if failures >= FAILURES:
                self._fail(f"the engine answers {status} when it is asked for its health")
            elif silences >= SILENCES:
                self._fail(f"the engine has not answered for {silences * _ANSWER_S:g} s")

    def _fail(self, problem: str) -> None:
        """Mark the engine as failed and refuse all waiting requests, so others can serve them."""
        self.problem = problem
        _log.error("replica %s of %s: %s", self.replica, self.name, problem)
        why = Refusal(503, "model_down", f"The engine has failed: {problem}.", retry_after_s=1.0)
        self.model.gate.closing = why
        self.model.gate.refuse_all(why)

    async def _health(self) -> int | None:
        """Return the status of the engine's health route; None: timeout; 0: no connection."""
        front, model = self._front, self.model
        if front is None:
            return 0
        return await front.calls.health_status(
            model.replicas[0].address, model.settings.health, model.api_key, _ANSWER_S
        )

    def _why_not_ready(self) -> str:
        assert self._front is not None
        process = self._front.processes.get(self.model)
        lines = [] if process is None else process.last_lines(_LOG_LINES)
        said = "".join(f"\n    {line}" for line in lines)
        return f"the engine of {self.name!r} did not start: {self.model.last_problem}{said}"


def instance_name(model: str, replica: str) -> str:
    """Return the instance name of a replica's engine, at most 64 characters valid in a segment."""
    return f"ray-{_NAME.sub('_', model)[:32]}-{_NAME.sub('_', replica)[-24:]}"


def free_port() -> int:
    """Return a port of the loopback interface that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _refusal_in(body: bytes) -> tuple[str, str] | None:
    """Return code and message of a refusal after which another replica may serve the request."""
    try:
        error = json.loads(body)["error"]
        code, message = error["code"], error["message"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return (code, str(message)) if isinstance(code, str) and code in _RETRIED else None
