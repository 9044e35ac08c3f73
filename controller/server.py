"""Runs the server: listen, serve, reload on SIGHUP, drain and end on SIGTERM.

run(Path("controller.yaml"))     # blocks; returns the exit code
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import gc
import logging
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvicorn

from kvelastic.controller.app_state import AppState
from kvelastic.controller.application import make_application
from kvelastic.controller.http.http_protocol import BoundedProtocol, ServerConfig
from kvelastic.controller.http.log_writer import LogWriter
from kvelastic.controller.http.open_files import OpenFiles
from kvelastic.controller.http.request_log import RequestLog, set_up_logging
from kvelastic.controller.http.websocket_protocol import (
    MESSAGE_BYTES,
    PING_EVERY_S,
    BoundedWebSocket,
)
from kvelastic.controller.launch.listeners import listeners
from kvelastic.controller.settings.settings import ServerSettings, Settings
from kvelastic.controller.settings.settings_file import load
from kvelastic.controller.settings.settings_warnings import warnings_of
from kvelastic.errors import KvelasticError

_log = logging.getLogger("kvelastic.controller")


class _Server(uvicorn.Server):
    """Logs where it listens, and leaves signals to `_serve`."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none: uvicorn raises them again when it ends, but a clean end must return 0."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to serve, and log the addresses: with port 0 the log is the only source.

        Replaces uvicorn's method, which gives a client 60 s for a TLS handshake.
        """
        config = self.config
        assert isinstance(config, ServerConfig)
        protocol: Any = config.http_protocol_class
        make = functools.partial(
            protocol, config=config, server_state=self.server_state, app_state={}
        )
        loop = asyncio.get_running_loop()
        self.servers = []
        for sock in sockets or ():
            server = await loop.create_server(
                make,
                sock=sock,
                ssl=config.ssl,
                backlog=config.backlog,
                ssl_handshake_timeout=config.header_timeout_s if config.ssl else None,
            )
            self.servers.append(server)
            _log.info("listening on %s port %d", *sock.getsockname()[:2])
        self.started = True


def run(path: Path) -> int:
    """Serve until SIGTERM or SIGINT; return the exit code. Blocks.

    Raises `ControllerConfigError` before it changes anything.
    """
    settings = load(path)
    files = OpenFiles.raised()
    with LogWriter.of_stderr() as writer:
        set_up_logging(writer)
        work = _serve(settings, path, RequestLog(writer), files)
        try:
            import uvloop
        except ImportError:
            return asyncio.run(work)
        return int(uvloop.run(work))


async def _serve(settings: Settings, path: Path, log: RequestLog, files: OpenFiles) -> int:
    for warning in warnings_of(settings):
        _log.warning("%s", warning)
    # First, because `app_state` starts engines and requests memory limits: a controller that cannot
    # listen must not replace those of another one.
    try:
        sockets = await _listen(settings.server, files.backlog)
    except OSError as error:
        await _log_listener(settings.server, error)
        return 1
    app_state = AppState(
        settings, log, files, source=str(path.resolve()), read_settings=lambda: load(path)
    )
    server = _Server(make_config(app_state))
    loop = asyncio.get_running_loop()
    reloads: set[asyncio.Task[None]] = set()

    def stop() -> None:
        if server.should_exit:
            server.force_exit = True  # the second signal ends the wait for running requests
        server.should_exit = True
        drain_s = app_state.settings.server.drain_timeout  # a reload may have changed it
        server.config.timeout_graceful_shutdown = int(max(1, drain_s))
        app_state.refuse_new()

    def reload() -> None:
        task = loop.create_task(_reload(app_state))
        reloads.add(task)
        task.add_done_callback(reloads.discard)

    loop.add_signal_handler(signal.SIGTERM, stop)
    loop.add_signal_handler(signal.SIGINT, stop)
    loop.add_signal_handler(signal.SIGHUP, reload)
    await app_state.start()
    # All current objects live on. Exclude them from collections: scanning them each time would
    # delay every stream by tens of milliseconds.
    gc.collect()
    gc.freeze()
    try:
        await server.serve(sockets)
    finally:
        await app_state.stop()
    return 0


def make_config(app_state: AppState) -> ServerConfig:
    """Return uvicorn's configuration: no headers added to responses, bounds on requests."""
    server = app_state.settings.server
    config = ServerConfig(
        make_application(app_state),
        host=server.host,
        port=server.port,
        http=BoundedProtocol,
        ws=BoundedWebSocket,
        ws_max_size=MESSAGE_BYTES,
        ws_ping_interval=PING_EVERY_S,
        ws_ping_timeout=PING_EVERY_S,
        ws_per_message_deflate=False,
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        backlog=app_state.files.backlog,
        timeout_keep_alive=int(max(1, server.keep_alive)),
        ssl_certfile=server.tls_cert,
        ssl_keyfile=server.tls_key,
    )
    config.connections = app_state.connections
    config.max_header_bytes = server.max_headers
    config.header_timeout_s = server.header_timeout
    config.origins = lambda: app_state.origins
    return config


async def _listen(server: ServerSettings, backlog: int) -> list[socket.socket]:
    """Return a listening socket for each address of the host that this machine has.

    Raises `OSError` if an address is taken, or if the machine has none of them.
    """
    found = await asyncio.get_running_loop().getaddrinfo(
        server.host, server.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    sockets: list[socket.socket] = []
    try:
        for family, address in dict.fromkeys((each[0], each[4]) for each in found):
            sockets += _bound(family, address, backlog)
    except OSError:
        for each in sockets:
            each.close()
        raise
    if not sockets:
        raise OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
    return sockets


def _bound(family: int, address: Any, backlog: int) -> list[socket.socket]:
    """Return a listening socket, or none if this machine does not have the address.

    `localhost` may have an IPv6 address on a machine without IPv6.
    """
    try:
        return [socket.create_server(address, family=family, backlog=backlog)]
    except OSError as error:
        if error.errno not in {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT}:
            raise
        return []


async def _log_listener(server: ServerSettings, error: OSError) -> None:
    found = await asyncio.to_thread(listeners, server.port)
    if error.errno == errno.EADDRINUSE and found:
        why = f"it is taken by {found[0]}; end that program, or choose another server.port"
    else:
        why = f"{error.strerror}; choose another server.host or server.port"
    _log.error("cannot listen on %s port %d: %s", server.host, server.port, why)


async def _reload(app_state: AppState) -> None:
    status, code = 200, ""
    try:
        await app_state.reload()
    except KvelasticError as error:
        status, code = 400, error.code
        _log.error("the configuration is as before: %s", error)
    app_state.log.audit(action="SIGHUP", status=status, error=code)
