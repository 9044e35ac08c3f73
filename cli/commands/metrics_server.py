"""The HTTP server of `kvctl metrics --listen`: metrics at /metrics, 404 elsewhere.

server = metrics_server(collector, "127.0.0.1", 9464)
server.serve_forever()
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app

if TYPE_CHECKING:
    from kvelastic.instance.metrics import KvelasticCollector

_PATH: Final = "/metrics"
_NOT_FOUND: Final = b"Not found. The metrics are at /metrics.\n"


class _Silent(WSGIRequestHandler):
    """A handler without a log line per request."""

    def log_message(self, format: str, *args: object) -> None:
        """Discard the message."""


def metrics_server(collector: KvelasticCollector, host: str, port: int) -> WSGIServer:
    """Return a server that listens on the address, with one thread per request.

    `port` 0 picks a free port. Raises `OSError` for an unavailable address or an unknown host name.
    """
    registry = CollectorRegistry()
    registry.register(collector)
    family, *_, found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]

    class Server(ThreadingMixIn, WSGIServer):
        daemon_threads = True
        address_family = family

    return make_server(
        str(found[0]), port, _only_metrics(make_wsgi_app(registry)), Server, handler_class=_Silent
    )


def _only_metrics(app: Callable[..., Any]) -> Callable[..., Iterable[bytes]]:
    """Serve /metrics only: prometheus-client would serve every path."""

    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if environ["PATH_INFO"] == _PATH:
            found: Iterable[bytes] = app(environ, start_response)
            return found
        start_response("404 Not Found", [("Content-Type", "text/plain; charset=utf-8")])
        return [_NOT_FOUND]

    return answer
