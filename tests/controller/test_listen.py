"""The addresses that the controller listens on, where its host has several."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from kvelastic.controller.server import _listen
from kvelastic.controller.settings.settings import ServerSettings

ABSENT = "192.0.2.1"  # an address of documentation: no machine has it


def listen_on(addresses: list[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Listen on a host with these addresses; return those that were listened on."""

    async def resolved(*_: Any, **__: Any) -> list[tuple[Any, ...]]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, 0)) for each in addresses]

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", resolved)
    sockets = asyncio.run(_listen(ServerSettings(host="localhost", port=0), 16))
    heard = [each.getsockname()[0] for each in sockets]
    for each in sockets:
        each.close()
    return heard


def test_unavailable_address_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    assert listen_on([ABSENT, "127.0.0.1"], monkeypatch) == ["127.0.0.1"]


def test_host_without_available_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OSError, match="assign requested address"):
        listen_on([ABSENT], monkeypatch)
