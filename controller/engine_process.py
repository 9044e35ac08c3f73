"""A launched engine: started in a process group of its own, watched, started again, ended.

process = EngineProcess(model, calls)
process.start()          # a task of the loop from now on
await process.stop()     # SIGTERM, and SIGKILL to what is left of its group

The engine's gate follows: STARTING until the health route answers, then AWAKE, DOWN while it does
not run. Its output is appended to a file, which /admin/models/{model}/logs shows the end of.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import tempfile
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import IO, Final

from kvelastic.controller.engine_calls import EngineCalls
from kvelastic.controller.gate import State
from kvelastic.controller.launch_policy import Restarts
from kvelastic.controller.open_files import OpenFiles
from kvelastic.controller.process_group import end_group
from kvelastic.controller.refusal import Refusal
from kvelastic.controller.served_model import ServedModel
from kvelastic.controller.settings import LaunchSettings

_log = logging.getLogger("kvelastic.controller")

HEALTH_EVERY_S: Final = 0.1
HEALTH_MOST_S: Final = 1.0
"""Between two looks whether a starting engine is ready; they grow apart."""
_SHOWN_BYTES: Final = 256 << 10


class EngineProcess:
    """See the module; owned by the loop."""

    def __init__(self, model: ServedModel, calls: EngineCalls, files: OpenFiles) -> None:
        launch = model.settings.launch
        assert launch is not None
        self.launch: LaunchSettings = launch
        self.log_path = _log_path(model.name, launch)
        self.pid: int | None = None
        self.starts = 0
        self._model = model
        self._calls = calls
        self._files = files
        self._restarts = Restarts(launch.backoff, launch.backoff_max)
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin; it goes on until `stop`."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        """End the engine and everything of its group; returns when it is gone."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        await self._end_group()
        self._set(State.DOWN)

    def last_lines(self, count: int) -> list[str]:
        """The end of its output. Blocking, for a short while."""
        try:
            with self.log_path.open("rb") as file:
                file.seek(0, os.SEEK_END)
                file.seek(max(0, file.tell() - _SHOWN_BYTES))
                text = file.read().decode("utf-8", "replace")
        except OSError:
            return []
        return list(deque(text.splitlines(), maxlen=count))

    async def _run(self) -> None:
        while True:
            self._set(State.STARTING)
            ready_s = None
            try:
                await self._spawn()
                if await self._is_ready():
                    ready_s = time.monotonic()
                    await self._model.find_state()
                    await self._model.wish_as_configured()
                    self._set(State.AWAKE)
                    _log.info("engine is ready", extra={"model": self._model.name})
                    assert self._process is not None
                    await self._process.wait()
            except OSError as error:
                self._model.last_problem = f"launch: {error.strerror}"
                _log.error("cannot start: %s", error, extra={"model": self._model.name})
            code = None if self._process is None else self._process.returncode
            self._set(State.DOWN)
            await self._end_group()
            served_s = 0.0 if ready_s is None else time.monotonic() - ready_s
            wait_s = self._restarts.ended(served_s)
            if code is not None:
                self._model.last_problem = f"launch: the engine ended with {code}"
            _log.warning(
                "engine ended (%s)%s",
                "was not ready in time" if code is None else code,
                f"; starts again in {wait_s:g} s" if self.launch.restart else "",
                extra={"model": self._model.name},
            )
            if not self.launch.restart:
                return
            await asyncio.sleep(wait_s)

    async def _spawn(self) -> None:
        port = str(self.launch.port)
        command = [word.replace("{port}", port) for word in self.launch.command]
        self._process = None
        with _open_log(self.log_path) as log:
            self._process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **self.launch.env},
                cwd=self.launch.cwd,
                start_new_session=True,
            )
        self.pid = self._process.pid
        self._files.give_back(self.pid)
        self.starts += 1

    async def _is_ready(self) -> bool:
        """Wait for the health route; False when the engine ends or takes too long."""
        process, settings = self._process, self._model.settings
        assert process is not None
        end_s = time.monotonic() + self.launch.ready_timeout
        pause_s = HEALTH_EVERY_S
        while process.returncode is None and time.monotonic() < end_s:
            address = settings.addresses[0]
            if await self._calls.is_healthy(address, settings.health, settings.api_key, 2.0):
                # Somebody else's server may have the port: ours must be alive beside it.
                return process.returncode is None
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(process.wait(), pause_s)
            pause_s = min(HEALTH_MOST_S, pause_s * 1.5)
        return False

    async def _end_group(self) -> None:
        """The engine and all its processes, so that no worker of it is left."""
        process, self.pid = self._process, None
        if process is None:
            return
        await end_group(process, self.launch.stop_timeout)
        self._process = None

    def _set(self, state: State) -> None:
        why = Refusal(503, "model_down", "The model's engine has ended.", retry_after_s=5.0)
        gate = self._model.gate
        if gate.state in {State.FALLING_ASLEEP, State.WAKING}:
            # A call to the engine is under way and ends by itself, badly.
            self._model.when_settled(lambda: gate.set_state(state, time.monotonic(), why))
        elif not (state is State.AWAKE and gate.state is State.ASLEEP):
            gate.set_state(state, time.monotonic(), why)


def _log_path(name: str, launch: LaunchSettings) -> Path:
    if launch.log_file is not None:
        return Path(launch.log_file)
    plain = re.sub(r"[^A-Za-z0-9._-]+", "_", name)[:64]
    folder = Path(tempfile.gettempdir()) / f"kvelastic-controller-{os.geteuid()}"
    return folder / f"{plain}-{launch.port}.log"


def _open_log(path: Path) -> IO[bytes]:
    """For appending. In the temporary directory nobody else's file or link is written to."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, 0o600), "ab")
