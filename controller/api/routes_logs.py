"""Logs of launched engines: the last lines, and following new output."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, Final

from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from kvelastic.controller.http.refusal import Refusal
from kvelastic.controller.launch.engine_log import LogReader
from kvelastic.controller.launch.engine_process import EngineProcess
from kvelastic.controller.models.served_model import ServedModel

if TYPE_CHECKING:
    from kvelastic.controller.app_state import AppState

MOST_LINES: Final = 5000
MOST_FOLLOWERS: Final = 32
LOOK_S: Final = 0.2
"""Poll interval of a log that has not grown."""


async def engine_logs(app_state: AppState, request: Request) -> Any:
    """The last `lines` (default 200, at most 5000) of a launched engine's output."""
    model, process = _launched(app_state, request)
    lines = _lines_of(request)
    return {
        "model": model.name,
        "state": model.reported_state.value,
        "pid": process.pid,
        "starts": process.starts,
        "file": str(process.log_path),
        "lines": await asyncio.to_thread(process.last_lines, lines),
    }


async def follow_log(app_state: AppState, request: Request) -> Any:
    """The last `lines` as text; with `follow=true` also new output, until the client disconnects.

    Following continues while the engine is stopped and restarted.
    """
    model, process = _launched(app_state, request)
    lines = _lines_of(request)
    text = request.query_params.get("follow", "false")
    if text not in {"true", "false"}:
        raise Refusal(400, "invalid_value", "follow is true or false.", param="follow")
    follows = text == "true" and request.method != "HEAD"
    if app_state.log_followers >= MOST_FOLLOWERS:
        raise Refusal(
            503,
            "too_many_followers",
            f"{MOST_FOLLOWERS} clients follow logs already; try again later.",
            retry_after_s=5.0,
        )
    reader = LogReader(process.log_path)
    app_state.log_followers += 1  # before the first await, so that concurrent requests are counted
    try:
        end = await asyncio.to_thread(reader.begin, lines)
    except BaseException:
        app_state.log_followers -= 1
        reader.close()
        raise
    return _Followed(app_state, reader, _written(model, reader, end, follows=follows))


class _Followed(StreamingResponse):
    """A response that is already counted. It releases its count and its file when it ends."""

    def __init__(
        self, app_state: AppState, reader: LogReader, written: AsyncIterator[bytes]
    ) -> None:
        headers = {"cache-control": "no-store", "x-content-type-options": "nosniff"}
        super().__init__(written, media_type="text/plain", headers=headers)
        self._app_state = app_state
        self._reader = reader

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response, then release the count and the file, also after an error."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._app_state.log_followers -= 1
            self._reader.close()


async def _written(
    model: ServedModel, reader: LogReader, end: bytes, *, follows: bool
) -> AsyncIterator[bytes]:
    """Yield the log in pieces. A slow client reads the file later and delays no other."""
    data = end
    while True:
        if data:
            yield data
        if not follows or model.gate.closing is not None:
            return
        if not data:
            await asyncio.sleep(LOOK_S)
        data = await asyncio.to_thread(reader.more)


def _launched(app_state: AppState, request: Request) -> tuple[ServedModel, EngineProcess]:
    model = app_state.fleet.need(request.path_params["model"])
    process = app_state.processes.get(model)
    if process is None:
        raise Refusal(404, "not_launched", "This model's engine is not launched here.")
    return model, process


def _lines_of(request: Request) -> int:
    text = request.query_params.get("lines", "200")
    # `int` refuses very long texts.
    lines = int(text) if text.isascii() and text.isdigit() and len(text) <= 6 else 0
    if not 1 <= lines <= MOST_LINES:
        raise Refusal(400, "invalid_value", f"lines is 1 to {MOST_LINES}.", param="lines")
    return lines
