"""`kvctl metrics`: prints or serves the metrics of instances and ledgers, for Prometheus."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click

from kvelastic.address import is_loopback
from kvelastic.cli.rendering.exit_codes import fail
from kvelastic.cli.rendering.printing import print_lines

if TYPE_CHECKING:
    from kvelastic.instance.metrics import KvelasticCollector
    from kvelastic.shared.ledger_facts import LedgerInfo
    from kvelastic.shared.segment import SegmentInfo

_LOOPBACK = "127.0.0.1"


class Address(NamedTuple):
    """The address to listen on."""

    host: str
    port: int
    """0: any free port."""

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class AddressType(click.ParamType):  # type: ignore[type-arg]
    """ADDRESS:PORT, [IPv6]:PORT or PORT. The default address is 127.0.0.1."""

    name = "address"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> Address:
        """Return the address; anything else is a usage error (exit code 2)."""
        host, _, port = str(value).rpartition(":")
        is_bare_ipv6 = ":" in host and not (host.startswith("[") and host.endswith("]"))
        if not (port.isascii() and port.isdigit() and int(port) < 1 << 16) or is_bare_ipv6:
            self.fail(
                f"{value!r} is not understood; write 127.0.0.1:9464 or [::1]:9464", param, ctx
            )
        return Address(host.strip("[]") or _LOOPBACK, int(port))


@click.command("metrics", short_help="Print or serve metrics for Prometheus.")
@click.option(
    "--listen",
    "address",
    type=AddressType(),
    metavar="ADDRESS:PORT",
    help="Serve them on http://ADDRESS:PORT/metrics until Ctrl-C.",
)
@click.option("--public", is_flag=True, help="Also on an address that other machines can reach.")
def metrics_command(address: Address | None, public: bool) -> None:
    """Print the metrics of instances and ledgers in Prometheus' text format.

    --listen serves them over HTTP, with fresh values for each request. Addresses that other
    machines can reach need --public, because names of models are private.
    """
    try:
        from kvelastic.instance.metrics import KvelasticCollector
    except ImportError as error:
        fail(f"metrics need prometheus-client ({error}): pip install 'kvelastic[metrics]'.")
    collector = KvelasticCollector(_segments, _ledgers)
    if address is None:
        from prometheus_client import generate_latest

        print_lines(*generate_latest(collector).decode().removesuffix("\n").split("\n"))
        return
    if not (is_loopback(address.host) or public):
        raise click.UsageError(
            f"other machines could reach {address}; listen on {_LOOPBACK}, or add --public."
        )
    _serve(collector, address)


def _serve(collector: KvelasticCollector, address: Address) -> None:
    from prometheus_client import CollectorRegistry, make_wsgi_app, start_http_server

    registry = CollectorRegistry()
    registry.register(collector)
    endings = {signal.SIGINT, signal.SIGTERM}
    # Block the signals before threads start and inherit the mask. The main thread waits for them.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, endings)
    try:
        try:
            server, thread = start_http_server(address.port, address.host, registry)
        except OSError as error:
            fail(f"cannot listen on {address}: {error.strerror or error}.")
        server.set_app(_only_metrics(make_wsgi_app(registry)))
        listening = Address(address.host, server.server_port)
        print_lines(f"Serving http://{listening}/metrics until Ctrl-C.")
        signal.sigwait(endings)
        server.shutdown()
        server.server_close()
        thread.join()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)  # `kvctl shell` runs more commands


def _segments() -> list[SegmentInfo]:
    from kvelastic.cli.segment_lookup import sweep
    from kvelastic.shared.segment import list_segments

    sweep(quiet=True)
    return list_segments()


def _ledgers() -> list[LedgerInfo]:
    from kvelastic.shared.ledger import list_ledgers

    return list_ledgers()


_PATH: Final = "/metrics"
_NOT_FOUND: Final = b"Not found. The metrics are at /metrics.\n"


def _only_metrics(app: Callable[..., Any]) -> Callable[..., Iterable[bytes]]:
    """Serve /metrics only: prometheus-client would serve every path."""

    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if environ["PATH_INFO"] == _PATH:
            found: Iterable[bytes] = app(environ, start_response)
            return found
        start_response("404 Not Found", [("Content-Type", "text/plain; charset=utf-8")])
        return [_NOT_FOUND]

    return answer
