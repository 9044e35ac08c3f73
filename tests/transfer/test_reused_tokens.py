"""A peer that gives one token to several copies."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import cast

import pytest
from waiting import DEADLINE_S

from kvelastic.errors import ChannelClosedError, TransferError
from kvelastic.messages import Connection
from kvelastic.messages.sockets import connect_socket
from kvelastic.transfer.data_port import DataPort
from kvelastic.transfer.wire import TOKEN_BYTES

TOKEN = b"t" * TOKEN_BYTES
LINK = cast(Connection, object())


@pytest.fixture
def port() -> Iterator[DataPort]:
    opened = DataPort("127.0.0.1", (0, 0))
    yield opened
    opened.door.listener.close()


def test_expected_token_is_rejected_for_another_copy(port: DataPort) -> None:
    """Or the end of the link would not wake the first one."""
    with port.expect(LINK, TOKEN) as first:
        with pytest.raises(TransferError, match="each copy needs a new one"):
            port.expect(LINK, TOKEN)
        port.end_of(LINK)
        with pytest.raises(ChannelClosedError):
            first.wait(time.monotonic() + DEADLINE_S)


def test_end_of_a_copy_keeps_its_successor(port: DataPort) -> None:
    """The successor is expected after the first stream has come, and gets its own."""
    first = port.expect(LINK, TOKEN)
    port.hand_over(TOKEN, connect_socket(port.door.listener.address, DEADLINE_S))
    with port.expect(LINK, TOKEN) as second:
        first.close()
        stream = connect_socket(port.door.listener.address, DEADLINE_S)
        port.hand_over(TOKEN, stream)
        with second.wait(time.monotonic() + DEADLINE_S) as arrived:
            assert arrived is stream
