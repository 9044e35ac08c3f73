"""A launched engine: started in its own process group, monitored, restarted, stopped.

process = EngineProcess(model, calls, files, settings, source, swapper)
await process.prepare()  # deals with the remains of a killed controller on its port
process.start()          # a task of the loop from now on
await process.stop()     # SIGTERM, then SIGKILL to the rest of its group

The engine's gate follows: STARTING until the health route succeeds, then AWAKE, DOWN while it does
not run. Its output is appended to a file; /admin/models/{model}/logs shows the end.

An engine that starts on demand is ASLEEP while it does not run: `start_now` and `stop_now` are its
model's wake and sleep. Both kinds start when it is the model's turn (`swap`).

Before each start it checks the port:

    an engine whose controller is gone  ->  ended, or adopted (`launch.orphan`)
    another process listens there       ->  an error that names the process; tried again later

An engine whose health route succeeds is ready once it is known to own the port.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from kvelastic.config import ENGINE_KEY
from kvelastic.controller.http.open_files import OpenFiles
from kvelastic.controller.http.refusal import Refusal
from kvelastic.controller.launch import launch_record
from kvelastic.controller.launch.engine_log import last_lines
from kvelastic.controller.launch.launch_environment import engine_environment, new_engine_key
from kvelastic.controller.launch.launch_record import LaunchedEngine, Mark, Record
from kvelastic.controller.launch.listeners import listeners
from kvelastic.controller.launch.process_group import (
    ForeignProcess,
    Leader,
    end_group,
    end_processes,
)
from kvelastic.controller.models import instance_memory
from kvelastic.controller.models.engine_calls import LOOK_AT_PORT_S, PORT_CLOSED, EngineCalls
from kvelastic.controller.models.gate import State
from kvelastic.controller.models.served_model import ServedModel, WithdrawnError
from kvelastic.controller.models.swap import Swapper
from kvelastic.controller.settings.named_files import fault_of_log, is_log
from kvelastic.controller.settings.settings import LaunchSettings, Settings
from kvelastic.controller.timeout import timeout
from kvelastic.errors import ControllerError, PortTakenError
from kvelastic.shared.liveness import ProcessIdentity

_log = logging.getLogger("kvelastic.controller")

HEALTH_EVERY_S: Final = 0.1
HEALTH_MOST_S: Final = 1.0
"""Shortest and longest interval between two checks of a starting engine; it grows."""
STEADY_S: Final = 60.0
"""After an engine has served this long, its failures no longer count as consecutive."""


@dataclass
class Restarts:
    """Counts an engine's consecutive failures and computes the restart delay."""

    first_s: float
    most_s: float
    in_a_row: int = 0

    def ended(self, served_s: float) -> float:
        """Record an end after `served_s`; return the seconds to wait before the next start."""
        if served_s >= STEADY_S:
            self.in_a_row = 0
        wait_s = min(self.most_s, self.first_s * 2.0 ** min(self.in_a_row, 30))
        self.in_a_row += 1
        return wait_s


class EngineProcess:
    """The process of one model's engine; owned by the event loop."""

    def __init__(
        self,
        model: ServedModel,
        calls: EngineCalls,
        files: OpenFiles,
        settings: Callable[[], Settings],
        source: str,
        swapper: Swapper,
    ) -> None:
        """`settings` returns the current settings; `source` is their file."""
        launch = model.settings.launch
        assert launch is not None
        self.launch: LaunchSettings = launch
        self.log_path = _log_path(model.name, launch)
        self.mark = Mark(
            source=source,
            model=model.name,
            port=launch.port,
            launch_digest=launch_record.launch_digest(model.settings),
            controller=ProcessIdentity.of_this_process(),
        )
        self.pid: int | None = None
        self.starts = 0
        self._model = model
        self._calls = calls
        self._files = files
        self._settings = settings
        self._swapper = swapper
        self._restarts = Restarts(launch.backoff, launch.backoff_max)
        self._process: Leader | None = None
        self._record: Record | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_prepared = False
        """Its port was checked; `_process` is an adopted engine, or None."""
        self._is_ending = False
        model.has_turn = False
        if launch.on_demand:
            model.on_demand = self

    async def prepare(self) -> None:
        """End or adopt an engine left behind on its port, before any engine starts."""
        with suppress(OSError, ControllerError):  # the start meets and reports the same error
            await self._adopt()
            self._is_prepared = True
            self._model.has_turn = self._process is not None

    def start(self) -> None:
        """Start, and keep the engine running until `stop`."""
        run = self._begin_on_demand if self.launch.on_demand else self._run
        self._task = asyncio.get_running_loop().create_task(run())

    async def stop(self) -> None:
        """End the engine and its process group; return when it has ended."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        await self._end_group()
        self._set(State.DOWN)
        self._has_gone()

    # ------------------------------------------------------------------------------- on demand

    @property
    def is_running(self) -> bool:
        """True if the engine's process runs."""
        return self._process is not None and self._process.returncode is None

    async def start_now(self) -> str | None:
        """Start the engine and wait until it is ready. On a problem clean up and return it."""
        try:
            await self._adopt_or_spawn()
            if await self._is_ready():
                await self._model.memory.request_as_configured()
                self._task = asyncio.get_running_loop().create_task(self._watch())
                return None
            problem = self._how_it_ended()
        except Exception as error:
            problem = self._why_not("start", error)
        await self._end_group()
        return problem

    async def stop_now(self) -> None:
        """Stop the engine and wait until it has ended."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        await self._end_group()

    def give_up(self) -> None:
        """Abort a start in progress: the model is no longer served."""
        self._is_ending = True

    async def _begin_on_demand(self) -> None:
        """Continue with an adopted engine; otherwise stay stopped, or preload if configured."""
        if self._is_prepared and self._process is not None:
            self._is_prepared = False
            if await self._goes_on():
                await self._watch()
                return
            await self._end_group()
        self._has_gone()
        self._model.gate.set_state(State.ASLEEP, time.monotonic())
        if self.launch.preload:
            self._model.preload()

    async def _goes_on(self) -> bool:
        """Return True if an adopted engine is ready and serves its model."""
        try:
            is_ready = await self._is_ready()
            problem = "" if is_ready else self._how_it_ended()
        except Exception as error:
            is_ready, problem = False, self._why_not("be adopted", error)
        if not is_ready:
            self._model.last_problem = f"launch: {problem}"
            _log.warning("%s; a request starts it again", problem, extra=self._extra)
            return False
        await self._model.find_state()
        await self._model.look_at_engines()
        await self._model.memory.request_as_configured()
        self._set(State.AWAKE)
        return True

    async def _watch(self) -> None:
        """Wait until the engine ends on its own; later requests then start it again."""
        began_s = time.monotonic()
        await self._until_it_serves_no_more()
        problem = self._how_it_ended(was_ready=True)
        now_s = time.monotonic()
        gate = self._model.gate
        hold_off_s = self._restarts.ended(now_s - began_s)
        self._model.last_problem = f"launch: {problem}"
        _log.warning("%s; a request starts it again", problem, extra=self._extra)
        if gate.state is State.FALLING_ASLEEP:
            return  # `stop_now` follows
        self._swapper.withdraw(self._model)  # a wake that waits for its turn
        gate.set_state(State.STARTING, now_s)  # new requests wait
        await self._end_group()
        self._has_gone()
        while gate.in_flight:
            await asyncio.sleep(0.02)
        now_s = time.monotonic()
        gate.hold_off_until_s = now_s + hold_off_s
        gate.set_state(State.ASLEEP, now_s)

    # ---------------------------------------------------------------------------------- output

    def last_lines(self, count: int) -> list[str]:
        """Return the end of its output. Blocks briefly."""
        return last_lines(self.log_path, count)

    async def _run(self) -> None:
        while self._model.gate.closing is None:  # a removed model's engine is not restarted
            self._set(State.STARTING)
            ready_s = None
            why = _ended()
            try:
                if not self._model.has_turn:
                    refusal = await self._swapper.take(self._model, is_start=True)
                    if refusal is not None:
                        raise refusal
                await self._adopt_or_spawn()
                if await self._is_ready():
                    ready_s = time.monotonic()
                    await self._model.find_state()
                    await self._model.look_at_engines()
                    await self._model.memory.request_as_configured()
                    self._model.last_problem = None
                    self._model.awake_since_s = ready_s
                    self._set(State.AWAKE)
                    self._swapper.poke()
                    _log.info("engine is ready", extra=self._extra)
                    await self._until_it_serves_no_more()
            except WithdrawnError:
                return
            except Refusal as refusal:
                why, problem = refusal, f"cannot start: {refusal.message}"
            except Exception as error:
                problem = self._why_not("start", error)
            else:
                problem = self._how_it_ended(was_ready=ready_s is not None)
            self._model.last_problem = f"launch: {problem}"
            served_s = 0.0 if ready_s is None else time.monotonic() - ready_s
            wait_s = self._restarts.ended(served_s)
            restarts = self.launch.restart and self._model.gate.closing is None
            again = f"; starts again in {wait_s:g} s" if restarts else ""
            _log.warning("%s%s", problem, again, extra=self._extra)
            self._set(State.DOWN, why)
            await self._end_group()
            self._has_gone()
            if not restarts:
                return
            await asyncio.sleep(wait_s)

    def _why_not(self, verb: str, error: Exception) -> str:
        """Return a failed start's error as text; any error fails only this start."""
        if not isinstance(error, OSError | ControllerError):
            _log.error("an engine cannot %s", verb, exc_info=error, extra=self._extra)
        return f"cannot {verb}: {error}"

    async def _until_it_serves_no_more(self) -> None:
        """Wait until the engine has ended, or has closed its port and has no call in progress.

        A server of vLLM whose engine core was killed during a call closes its port and stays.
        """
        process, gate = self._process, self._model.gate
        assert process is not None
        while process.returncode is None:
            with suppress(asyncio.TimeoutError):
                async with timeout(LOOK_AT_PORT_S):
                    await process.wait()
            if gate.in_flight or gate.state in {State.FALLING_ASLEEP, State.WAKING}:
                continue
            if not await self._calls.accepts_connections(self._model.settings.addresses[0]):
                return

    def _how_it_ended(self, *, was_ready: bool = False) -> str:
        code = None if self._process is None else self._process.returncode
        if code is None:
            return PORT_CLOSED if was_ready else "the engine was not ready in time"
        if isinstance(self._process, ForeignProcess):
            return "the engine, which was adopted, ended; its exit code is not known"
        return f"the engine ended with {code}"

    def _has_gone(self) -> None:
        """The engine holds no memory now."""
        self._model.has_turn = False
        self._swapper.poke()

    async def _adopt_or_spawn(self) -> None:
        is_prepared, self._is_prepared = self._is_prepared, False
        is_adopted = self._process is not None if is_prepared else await self._adopt()
        if not is_adopted:
            await self._spawn()

    async def _adopt(self) -> bool:
        """Handle engines on its port. Returns True if it adopted one.

        Raises `PortTakenError`.
        """
        self._process = self._record = None
        for engine in await asyncio.to_thread(launch_record.find_engines):
            if engine.mark.port != self.launch.port or not engine.is_orphan:
                continue
            if self.launch.orphan == "adopt" and self._take(engine):
                _log.warning(
                    "adopts process %d, an engine that a controller has left behind",
                    self.pid,
                    extra=self._extra,
                )
                return True
            await end_orphan(engine, self.launch.stop_timeout)
        for listener in await asyncio.to_thread(listeners, self.launch.port):
            raise PortTakenError(f"port {self.launch.port} is taken by {listener}")
        return False

    def _take(self, engine: LaunchedEngine) -> bool:
        """Return True if this controller would start the same engine and has its key."""
        key = engine.variable(ENGINE_KEY)
        same = (engine.mark.model, engine.mark.launch_digest) == (
            self.mark.model,
            self.mark.launch_digest,
        )
        if engine.leader is None or key is None or not same:
            return False
        try:
            self._process = ForeignProcess(engine.leader)
        except ProcessLookupError:
            return False
        self._begin(engine.leader.pid, key, Record(self.mark, engine.leader))
        return True

    async def _spawn(self) -> None:
        port = str(self.launch.port)
        command = [word.replace("{port}", port) for word in self.launch.command]
        key = new_engine_key(self._model.settings)
        if self.launch.log_file is None:
            launch_record.make_folder()
        with _open_log(self.log_path) as log:
            try:
                process = await asyncio.create_subprocess_exec(
                    *command,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=engine_environment(
                        os.environ, self._settings(), self._model.settings, key, self.mark.to_text()
                    ),
                    cwd=self.launch.cwd,
                    start_new_session=True,
                )
            except OSError as error:  # the loop's error does not name the file
                raise ControllerError(_why_not_run(command[0], self.launch.cwd, error)) from error
        self._files.give_back(process.pid)
        self._process = process
        self._begin(process.pid, key, Record.of(self.mark, process.pid))
        self.starts += 1

    def _begin(self, pid: int, key: str, record: Record) -> None:
        self.pid = self._model.engine_pid = pid
        self._model.engine_key = key
        self._record = record
        try:
            launch_record.write(record)
        except (OSError, ControllerError) as error:
            # The engine's mark has the same information.
            _log.warning("no record of the engine: %s", error, extra=self._extra)

    async def _is_ready(self) -> bool:
        """Wait for the health route; return False if the engine ends or takes too long.

        Raises `PortTakenError` if another process responds.
        """
        process, model = self._process, self._model
        assert process is not None
        end_s = time.monotonic() + self.launch.ready_timeout
        pause_s = HEALTH_EVERY_S
        while process.returncode is None and time.monotonic() < end_s and not self._is_ending:
            address = model.settings.addresses[0]
            if (
                await self._calls.is_healthy(address, model.settings.health, model.api_key, 2.0)
                and await self._owns_port(process.pid)
                and process.returncode is None
            ):
                return True
            with suppress(asyncio.TimeoutError):
                async with timeout(pause_s):
                    await process.wait()
            pause_s = min(HEALTH_MOST_S, pause_s * 1.5)
        return False

    async def _owns_port(self, leader: int) -> bool:
        """Return True if only the process or its children listen on the port."""
        port = self.launch.port

        def look() -> bool:
            found = listeners(port)
            for listener in found:
                if not listener.belongs_to(leader):
                    raise PortTakenError(
                        f"port {port} is taken by {listener}, which is not of the launched engine"
                    )
            if any(listener.is_public for listener in found):
                _log.warning(
                    "the engine listens on all interfaces (--host 127.0.0.1 is missing)",
                    extra=self._extra,
                )
            return bool(found)

        return await asyncio.to_thread(look)

    async def _end_group(self) -> None:
        """End the engine and all its processes, so that no worker remains."""
        process, record = self._process, self._record
        self.pid = self._process = self._record = None
        self._model.engine_key = self._model.engine_pid = None
        if process is not None and not isinstance(process, ForeignProcess):
            await end_group(process, self.launch.stop_timeout)
        # Processes that have left the group, and those of an adopted engine.
        leader = None if record is None else record.leader
        for engine in await self._engines_left():
            if engine.mark == self.mark or (leader is not None and engine.leader == leader):
                await end_processes(engine.leader, engine.processes, self.launch.stop_timeout)
        if record is not None:
            await asyncio.to_thread(launch_record.remove, record)
        if process is not None:
            # An engine that was killed or ended during start had no time to do this itself.
            await asyncio.to_thread(instance_memory.remove_left_behind)

    async def _engines_left(self) -> list[LaunchedEngine]:
        try:
            return await asyncio.to_thread(launch_record.find_engines)
        except OSError as error:  # e.g. no file descriptor is left; the next start reports it
            _log.warning("processes of the engine may be left: %s", error, extra=self._extra)
            return []

    @property
    def _extra(self) -> dict[str, str]:
        return {"model": self._model.name}

    def _set(self, state: State, why: Refusal | None = None) -> None:
        why = why or _ended()
        gate = self._model.gate
        is_withdrawn = state is State.DOWN and self._swapper.withdraw(self._model)
        if gate.state in {State.FALLING_ASLEEP, State.WAKING} and not is_withdrawn:
            # A call to the engine is in progress and will fail.
            self._model.when_settled(lambda: gate.set_state(state, time.monotonic(), why))
        elif not (state is State.AWAKE and gate.state is State.ASLEEP):
            gate.set_state(state, time.monotonic(), why)


def _ended() -> Refusal:
    return Refusal(503, "model_down", "The model's engine has ended.", retry_after_s=5.0)


async def end_orphan(engine: LaunchedEngine, stop_timeout_s: float) -> None:
    """End an engine whose controller is gone, with all its processes; log it."""
    pids = ", ".join(str(each.pid) for each in engine.processes[:10])
    _log.warning(
        "ends an engine that a controller has left behind on port %d (process %s)",
        engine.mark.port,
        pids,
        extra={"model": engine.mark.model},
    )
    await end_processes(engine.leader, engine.processes, stop_timeout_s)


def _log_path(name: str, launch: LaunchSettings) -> Path:
    if launch.log_file is not None:
        return Path(launch.log_file)
    plain = re.sub(r"[^A-Za-z0-9._-]+", "_", name)[:64]
    return launch_record.folder() / f"{plain}-{launch.port}.log"


def _why_not_run(program: str, folder: str | None, error: OSError) -> str:
    if folder is not None and not os.path.isdir(folder):  # noqa: PTH112
        return f"launch.cwd {folder} is not a folder"
    return f"launch.command: {program!r} cannot be run: {error.strerror}"


def _open_log(path: Path) -> IO[bytes]:
    """Open for appending. Never writes to another user's file or link in the temporary directory.

    Never waits for a reader of a FIFO. Raises `OSError`, `ControllerError`.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    for fault in fault_of_log(str(path)):
        raise ControllerError(f"log_file: {fault}")
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    fd = os.open(path, flags, 0o600)
    if not is_log(os.fstat(fd)):  # the file was replaced in between
        os.close(fd)
        raise ControllerError(f"log_file: {path} is no regular file")
    return os.fdopen(fd, "ab")
