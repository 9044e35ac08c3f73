"""The HTTP protocol overrides undocumented parts of uvicorn: which, and in what versions."""

from __future__ import annotations

import inspect
import re
from importlib import metadata

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

METHODS = (
    "connection_made",
    "connection_lost",
    "data_received",
    "on_message_begin",
    "on_url",
    "on_header",
    "on_headers_complete",
    "on_body",
    "on_message_complete",
    "send_400_response",
    "timeout_keep_alive_handler",
    "_unsupported_upgrade_warning",
    "_get_upgrade",
    "_should_upgrade",
    "handle_websocket_upgrade",
)
ATTRIBUTES = (
    "app",
    "cycle",
    "headers",
    "loop",
    "parser",
    "pipeline",
    "timeout_keep_alive",
    "timeout_keep_alive_task",
    "transport",
)
WEBSOCKET = ("connection_made", "connection_lost", "handle_cont", "handle_ping")
CYCLE = ("disconnected", "keep_alive", "message_event", "more_body", "response_complete", "scope")


def test_uvicorn_has_the_overridden_members() -> None:
    assert [name for name in METHODS if not callable(getattr(HttpToolsProtocol, name, None))] == []
    missing = [n for n in WEBSOCKET if not callable(getattr(WebSocketsSansIOProtocol, n, None))]
    assert missing == []
    websocket = inspect.getsource(WebSocketsSansIOProtocol.__init__)
    assert [n for n in ("frames", "close_timeout") if f"self.{n}" not in websocket] == []
    made = inspect.getsource(HttpToolsProtocol.__init__)
    assert [name for name in ATTRIBUTES if f"self.{name}" not in made] == []
    cycle = inspect.getsource(RequestResponseCycle)
    assert [name for name in (*CYCLE, "response_started") if f"self.{name}" not in cycle] == []


def test_uvicorn_version_is_within_the_declared_bounds() -> None:
    (wanted,) = {
        line.partition(";")[0].strip()
        for line in metadata.requires("kvelastic") or ()
        if line.startswith("uvicorn")
    }
    bounds = re.fullmatch(r"uvicorn<([\d.]+),>=([\d.]+)", wanted.replace(" ", ""))
    assert bounds, wanted
    below, least = (tuple(map(int, bound.split("."))) for bound in bounds.groups())
    assert least <= tuple(map(int, metadata.version("uvicorn").split(".")[:2])) < below
