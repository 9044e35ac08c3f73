"""The application's state: everything that routes use, created in the event loop and owned by it.

app_state = AppState(settings, RequestLog(writer), OpenFiles.raised())
await app_state.start()  # finds the engines' states, starts those to be launched
...                      # app_state.app is the ASGI application
await app_state.stop()   # drains, then ends the processes it has started
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any

import aiohttp

from kvelastic.address import is_loopback
from kvelastic.controller.http.connections import Connections
from kvelastic.controller.http.keys import Keys
from kvelastic.controller.http.open_files import OpenFiles
from kvelastic.controller.http.origins import Origins
from kvelastic.controller.http.refusal import Refusal
from kvelastic.controller.http.request_log import RequestLog
from kvelastic.controller.launch import launch_record
from kvelastic.controller.launch.engine_process import EngineProcess, end_orphan
from kvelastic.controller.models.engine_calls import EngineCalls
from kvelastic.controller.models.fleet import NOT_SERVED, SHUTTING_DOWN, Fleet
from kvelastic.controller.models.maintenance import MaintenanceLoop
from kvelastic.controller.models.memory_history import MemoryHistory
from kvelastic.controller.models.served_model import ServedModel
from kvelastic.controller.models.swap import Swapper
from kvelastic.controller.routing.engine_request import BoundedResponse
from kvelastic.controller.routing.forward import Forwarder
from kvelastic.controller.settings.settings import LaunchSettings, ModelSettings, Settings
from kvelastic.controller.settings.settings_warnings import warnings_of
from kvelastic.errors import ControllerConfigError, ControllerError

_log = logging.getLogger("kvelastic.controller")

ENGINE_KEEP_ALIVE_S = 3.0
"""Below uvicorn's 5 s, which vLLM and SGLang use; otherwise a request could meet a connection that
the engine is just closing."""


class AppState:
    """The application's state and its life cycle. A reload replaces settings, models and keys."""

    def __init__(
        self,
        settings: Settings,
        log: RequestLog,
        files: OpenFiles,
        *,
        source: str = "",
        read_settings: Callable[[], Settings] | None = None,
    ) -> None:
        """`source` names the configuration, in the marks of engines that are launched."""
        self.settings = settings
        self.bound = settings.server
        """The settings that the server listens with. A reload does not change them."""
        self.origins = Origins(settings.server)
        self.keys = Keys(settings.auth, self.origins)
        self.fleet = Fleet()
        self.files = files
        self.log = log
        self.memory_history = MemoryHistory()
        self.started_at = time.time()
        self.unrouted = 0
        """Number of requests without a served model."""
        self.swapper = Swapper(self)
        self.connections = Connections(files, lambda: self.settings.server.send_timeout)
        self.reloads = 0
        self.log_followers = 0
        """The number of clients that follow an engine's log."""
        self.processes: dict[ServedModel, EngineProcess] = {}
        """Engines launched by this controller, by model."""
        self._leaving: dict[ServedModel, asyncio.Task[None]] = {}
        """Models that are being removed, with the task of their removal."""
        self._source = source
        self._read_settings = read_settings
        self._reloading = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Start serving. Returns once each engine's state was checked (up to 2 s)."""
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=ENGINE_KEEP_ALIVE_S)
        self.session = aiohttp.ClientSession(
            connector=connector,
            auto_decompress=False,
            response_class=BoundedResponse,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None),
        )
        self.calls = EngineCalls(self.session)
        self.forwarder = Forwarder(self)
        self.maintenance = MaintenanceLoop(self)
        models = [self._make(model) for model in self.settings.models]
        self.fleet.put(models)
        await asyncio.gather(
            *(model.look_at_first() for model in models if model.settings.launch is None)
        )
        self._launch([model for model in models if model.settings.launch is not None])
        self.maintenance.start()
        self.connections.start()
        self._start(self._end_left_behind())

    def refuse_new(self) -> None:
        """Refuse new and waiting requests before shutdown."""
        for model in self.fleet:
            model.gate.closing = SHUTTING_DOWN
            model.gate.refuse_all(SHUTTING_DOWN)

    async def stop(self) -> None:
        """End everything that was started. Running requests lose their engines' connections."""
        await self.maintenance.stop()
        for model in self.fleet:
            self._remove(model, SHUTTING_DOWN, drain_s=0.0)
        if self._tasks:
            await asyncio.wait(set(self._tasks))
        await self.swapper.stop()
        self.connections.stop()
        await self.session.close()
        self.forwarder.stop()

    # -------------------------------------------------------------------------------- reload

    async def reload(self) -> dict[str, list[str]]:
        """Read the configuration again and apply changes. Raises `ControllerConfigError`.

        An invalid file changes nothing. Running requests keep their settings; removed models are
        drained. Returns the names added, changed and removed, and the keys that need a restart.
        """
        if self._read_settings is None:
            raise ControllerError("there is no configuration file to read again")
        async with self._reloading:
            new = await asyncio.to_thread(self._read_settings)
            return self._take(new)

    def _take(self, new: Settings) -> dict[str, list[str]]:
        old = self.settings
        # The new host may be loopback, but the server listens on the old one until a restart.
        if not is_loopback(self.bound.host) and not new.auth.api_keys:
            raise ControllerConfigError(
                f"the server listens on {self.bound.host}, which can be reached from outside, and"
                " there would be no key: keep auth.api_keys until a restart"
            )
        changes: dict[str, list[str]] = {"added": [], "changed": [], "removed": []}
        models: list[ServedModel] = []
        fresh: list[ServedModel] = []
        for settings in new.models:
            model = self.fleet.find(settings.name)
            if model is not None and model.name == settings.name and not _anew(model, settings):
                if (model.settings, model.sleep_settings) != (settings, new.sleep):
                    is_request_new = model.settings.memory != settings.memory
                    model.change(settings, new.sleep)
                    changes["changed"].append(settings.name)
                    if is_request_new:
                        self._start(model.memory.request_as_configured())
            else:
                changes["added" if model is None else "changed"].append(settings.name)
                model = self._make(settings, new)
                fresh.append(model)
            models.append(model)
        gone = self.fleet.put(models)
        for model in gone:
            self._remove(model, NOT_SERVED, new.server.drain_timeout)
            # The same name may be another model's alias by now.
            successor = self.fleet.find(model.name)
            if successor is not None:
                successor.take_over(model)
        changes["removed"] = [model.name for model in gone if self.fleet.find(model.name) is None]
        if (new.auth, new.server) != (old.auth, old.server):
            self.origins = Origins(new.server)
            self.keys = Keys(new.auth, self.origins)
        bound = ("host", "port", "tls_cert", "tls_key", "max_headers", "header_timeout")
        changes["needs_restart"] = [
            f"server.{key}"
            for key in (*bound, "keep_alive")
            if getattr(new.server, key) != getattr(self.bound, key)
        ]
        known = set(warnings_of(old))
        for warning in warnings_of(new):
            if warning not in known:
                _log.warning("%s", warning)
        self.settings = new
        self.swapper.poke()
        self.forwarder.budget.limit_bytes = new.server.max_buffered
        self.reloads += 1
        self._start(self._begin(fresh))
        _log.info("configuration read again: %s", changes)
        return changes

    # -------------------------------------------------------------------------------- inside

    async def _begin(self, fresh: list[ServedModel]) -> None:
        """Begin to serve new models, launched ones when no removed model has their port."""
        ports = {m.settings.launch.port for m in fresh if m.settings.launch is not None}
        awaited = [
            task
            for model, task in self._leaving.items()
            if model.settings.launch is not None and model.settings.launch.port in ports
        ]
        awaited += [self._start(self._greet(m)) for m in fresh if m.settings.launch is None]
        if awaited:
            await asyncio.wait(awaited)
        # By now another reload may have removed a model, or the controller may be ending.
        self._launch([m for m in fresh if m.settings.launch is not None and not m.gate.closing])

    def _make(self, settings: ModelSettings, whole: Settings | None = None) -> ServedModel:
        return ServedModel(settings, (whole or self.settings).sleep, self.calls, self.swapper)

    async def _greet(self, model: ServedModel) -> None:
        """Check engine states only when no sleep or wake of an old model is in progress."""
        await asyncio.gather(*(old.settled() for old in self._leaving if _share(old, model)))
        await model.look_at_first()

    def _launch(self, models: list[ServedModel]) -> None:
        """Start the models' engines, in this order if they cannot start together."""
        made = []
        for model in models:
            process = self.processes[model] = EngineProcess(
                model, self.calls, self.files, lambda: self.settings, self._source, self.swapper
            )
            made.append(process)

        async def begin() -> None:
            await asyncio.gather(*(process.prepare() for process in made))
            for process in made:
                if process in self.processes.values():  # not removed in between
                    process.start()

        if made:
            self._start(begin())

    async def _end_left_behind(self) -> None:
        """End engines of a killed controller whose models are no longer configured.

        Other left-behind engines are handled by the launch that needs their port.
        """
        try:
            engines = await asyncio.to_thread(launch_record.find_engines)
        except OSError as error:  # e.g. no file descriptor is left
            _log.warning("engines of a killed controller may be left: %s", error)
            return
        for engine in engines:
            ports = {m.settings.launch.port for m in self.fleet if m.settings.launch is not None}
            mark = engine.mark
            if mark.source == self._source and mark.port not in ports and engine.is_orphan:
                await end_orphan(engine, LaunchSettings.model_fields["stop_timeout"].default)

    def _remove(self, model: ServedModel, why: Refusal, drain_s: float) -> None:
        """Remove a model: refuse waiting requests with `why`, give running ones `drain_s`."""
        model.gate.closing = why  # at once: other tasks may still hold the model
        task = self._leaving[model] = self._start(self._part(model, why, drain_s))
        task.add_done_callback(lambda _: self._leaving.pop(model))

    async def _part(self, model: ServedModel, why: Refusal, drain_s: float) -> None:
        await model.close(why)
        end_s = time.monotonic() + drain_s
        while model.gate.in_flight and time.monotonic() < end_s:
            await asyncio.sleep(0.05)
        if why is not SHUTTING_DOWN:  # at shutdown the server has ended them
            model.cut_off()
        process = self.processes.pop(model, None)
        if process is not None:
            await process.stop()

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _share(one: ServedModel, other: ServedModel) -> bool:
    """Return True if two models share an engine or an instance."""
    instance = one.settings.instance
    return not set(one.settings.addresses).isdisjoint(other.settings.addresses) or (
        instance is not None and instance == other.settings.instance
    )


def _anew(model: ServedModel, settings: ModelSettings) -> bool:
    """Return True if the change needs a new model: another engine behind the name."""
    old = model.settings
    return (old.engine, old.launch, old.instance, old.addresses) != (
        settings.engine,
        settings.launch,
        settings.instance,
        settings.addresses,
    )
