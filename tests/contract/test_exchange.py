"""Pages of a (simulated) GPU in two processes: the same bytes, and only for the same user."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from test_drivers import simulated

from kvelastic import errors
from kvelastic.page_exchange import PageServer, peer_of, receive_pages

PROGRAM = Path(__file__).parents[1] / "programs" / "exchange.py"


def start(role: str, path: Path, environment: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(PROGRAM), role, str(path)],
        env=os.environ | environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_two_processes_share_pages(tmp_path: Path) -> None:
    environment = simulated(tmp_path, KVSIM_MEMORY="1G")
    path = tmp_path / "pages"
    with start("give", path, environment) as giver:
        assert giver.stdout is not None
        assert giver.stdin is not None
        assert giver.stdout.readline() == "listening\n"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with start("take", path, environment) as taker:
            assert taker.stdout is not None
            assert taker.stdout.readline() == "the same pages\n"
        assert taker.returncode == 0
        assert giver.stdout.readline() == f"{taker.pid}\n"
        giver.stdin.write("look\n")
        giver.stdin.close()
        assert giver.stdout.readline() == "99\n", "what the other process wrote"
    assert giver.returncode == 0
    assert not path.exists()


def test_the_peer_is_who_the_kernel_says(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        assert peer_of(ours) == (os.getpid(), os.geteuid())


def test_nobody_there_and_nobody_coming(tmp_path: Path) -> None:
    no_driver: object = None
    with pytest.raises(errors.ChannelClosedError, match="no page server"):
        receive_pages(tmp_path / "none", no_driver)  # type: ignore[arg-type]
    with PageServer(tmp_path / "alone", timeout_s=0.05) as server:
        with pytest.raises(errors.ChannelTimeoutError):
            server.send(no_driver, [])  # type: ignore[arg-type]
        with pytest.raises(errors.ChannelError, match="cannot listen"):
            PageServer(tmp_path / "alone")


@pytest.mark.parametrize("message", [b"", b"x", b"nope" * 3, b"kvpx" + bytes(8)])
def test_what_is_no_page_server_is_refused(tmp_path: Path, message: bytes) -> None:
    path = tmp_path / "odd"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(str(path))
        listening.listen(1)

        def answer() -> None:
            peer, _ = listening.accept()
            with peer:
                if message:
                    peer.send(message)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(errors.ChannelError):
            receive_pages(path, None)  # type: ignore[arg-type]
        thread.join()
