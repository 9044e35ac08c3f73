"""Access control: users, secrets, networks, versions; and unauthenticated connections."""

from __future__ import annotations

import os
import resource
import socket
import struct
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from channel import Channel, connect
from spoken import PROTOCOL, SECRET, Ask, answer
from waiting import DEADLINE_S, wait_until

from kvelastic.errors import (
    AccessDeniedError,
    ChannelClosedError,
    ChannelError,
    ConfigError,
    InvalidArgumentError,
    MessageVersionError,
    SecretError,
)
from kvelastic.messages import Address, Endpoint, Protocol, SecretFile, parse_address
from kvelastic.messages import endpoint as endpoint_module
from kvelastic.messages.frames import (
    HEADER,
    MAGIC,
    WIRE_VERSION,
    FrameReader,
    FrameWriter,
    Kind,
    error_of,
)
from kvelastic.messages.handshake import Handshake
from kvelastic.messages.newcomers import Newcomer
from kvelastic.messages.sockets import ListeningSocket

LOOPBACK = parse_address("tcp://127.0.0.1:0")


@pytest.fixture
def on_tcp(secret_path: Path) -> Iterator[Endpoint]:
    with Endpoint(PROTOCOL, answer, listen=[LOOPBACK], secret=SecretFile(secret_path)) as server:
        yield server


def other_secret(tmp_path: Path, *lines: str) -> SecretFile:
    path = tmp_path / f"other{len(list(tmp_path.iterdir()))}"
    path.write_text("\n".join(lines))
    path.chmod(0o600)
    return SecretFile(path)


def test_wrong_secret_is_rejected(on_tcp: Endpoint, tmp_path: Path) -> None:
    with pytest.raises(AccessDeniedError, match="secret is not ours"):
        connect(on_tcp.addresses[0], PROTOCOL, secret=other_secret(tmp_path, "f" * 64))
    wait_until(lambda: on_tcp.refused == 1, "it is counted after the answer was sent")
    assert not on_tcp.connections


def test_client_rejects_a_server_with_another_secret(secret_path: Path, tmp_path: Path) -> None:
    """A server that lets everybody in, and so has the client's proof but not the secret."""

    def lie(listening: socket.socket) -> None:
        accepted, _ = listening.accept()
        with accepted:
            reader, writer = FrameReader(), FrameWriter()
            other = other_secret(tmp_path, "f" * 64)
            handshake = Handshake(PROTOCOL, other, reader, writer, is_client=False)
            reader.feed(accepted.recv(4096))
            hello = reader.next()
            assert hello is not None
            accepted.sendall(handshake.receive(hello))
            accepted.recv(4096)
            accepted.sendall(writer.write(Kind.PROOF, 0, b"\0" * 32))

    with socket.create_server(("127.0.0.1", 0)) as listening:
        liar = threading.Thread(target=lie, args=(listening,))
        liar.start()
        address = Address(host="127.0.0.1", port=listening.getsockname()[1])
        with pytest.raises(AccessDeniedError, match="secret is not ours"):
            connect(address, PROTOCOL, secret=SecretFile(secret_path))
        liar.join()


def test_secret_is_replaced_without_a_restart(
    on_tcp: Endpoint, secret_path: Path, tmp_path: Path
) -> None:
    address = on_tcp.addresses[0]
    new = "e" * 64
    old_client = SecretFile(secret_path)
    new_client = other_secret(tmp_path, new, SECRET)
    with connect(address, PROTOCOL, secret=other_secret(tmp_path, SECRET)) as standing:
        with pytest.raises(AccessDeniedError):
            connect(address, PROTOCOL, secret=new_client)
        secret_path.write_text(f"{SECRET}\n{new}\n")
        for client in (old_client, new_client):
            connect(address, PROTOCOL, secret=client).close()
        kept = other_secret(tmp_path, SECRET)
        secret_path.write_text(f"{new}\n")
        connect(address, PROTOCOL, secret=new_client).close()
        with pytest.raises(AccessDeniedError):
            connect(address, PROTOCOL, secret=kept)
        assert standing.call(Ask("kv"), timeout_s=DEADLINE_S)


@pytest.mark.parametrize(
    ("content", "mode", "match"),
    [
        (SECRET, 0o640, "others can use"),
        (SECRET, 0o604, "chmod 600"),
        ("short", 0o600, "shorter than 32"),
        ("", 0o600, "has 0 secrets"),
        ("\n".join([SECRET] * 9), 0o600, "has 9 secrets"),
        ("x" * 5000, 0o600, "larger than 4096"),
    ],
)
def test_invalid_secret_content_or_mode_is_rejected(
    tmp_path: Path, content: str, mode: int, match: str
) -> None:
    path = tmp_path / "bad"
    path.write_text(content)
    path.chmod(mode)
    with pytest.raises(SecretError, match=match):
        SecretFile(path)


def test_secret_must_be_a_regular_file(tmp_path: Path) -> None:
    with pytest.raises(SecretError, match="cannot read"):
        SecretFile(tmp_path / "none")
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(SecretError, match="no file"):
        SecretFile(tmp_path / "pipe")


def test_secret_readable_by_others_rejects_all_clients(
    on_tcp: Endpoint, secret_path: Path, tmp_path: Path
) -> None:
    client = other_secret(tmp_path, SECRET)
    secret_path.chmod(0o644)
    with pytest.raises(AccessDeniedError) as caught:
        connect(on_tcp.addresses[0], PROTOCOL, secret=client)
    assert str(secret_path) not in str(caught.value)
    secret_path.chmod(0o600)
    connect(on_tcp.addresses[0], PROTOCOL, secret=client).close()


def test_tcp_requires_a_secret_and_networks(secret_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs a secret"):
        Endpoint(PROTOCOL, answer, listen=[LOOPBACK])
    with pytest.raises(ConfigError, match="needs a secret"):
        connect(LOOPBACK, PROTOCOL)
    everywhere = parse_address("tcp://0.0.0.0:0")
    with pytest.raises(ConfigError, match="name the networks"):
        Endpoint(PROTOCOL, answer, listen=[everywhere], secret=SecretFile(secret_path))
    with pytest.raises(InvalidArgumentError, match="is no network"):
        Endpoint(PROTOCOL, answer, listen=[LOOPBACK], secret=SecretFile(secret_path), allowed=["x"])


def test_address_outside_allowed_networks_is_rejected(
    secret_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint_module, "LOOPBACK", ())
    secret = SecretFile(secret_path)
    with (
        Endpoint(
            PROTOCOL, answer, listen=[LOOPBACK], secret=secret, allowed=["10.0.0.0/8"]
        ) as server,
        pytest.raises(AccessDeniedError, match="in none of the allowed networks"),
    ):
        connect(server.addresses[0], PROTOCOL, secret=secret)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be two users")
def test_another_user_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "s"
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.geteuid() and str(folder).startswith("/tmp/"):
            folder.chmod(0o755)
    with Endpoint(PROTOCOL, answer, listen=[Address(path=str(path))]) as server:
        assert path.stat().st_mode & 0o777 == 0o600
        path.chmod(0o666)
        child = os.fork()
        if child == 0:
            outcome = 1
            try:
                os.setuid(65534)
                connect(Address(path=str(path)), PROTOCOL)
            except AccessDeniedError:
                outcome = 0
            finally:
                os._exit(outcome)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert not server.connections


def test_other_protocol_version_is_reported(server: Endpoint, secret_path: Path) -> None:
    secret = SecretFile(secret_path)
    newer = Protocol("spoken", version=4, messages=(Ask,))
    with pytest.raises(MessageVersionError, match="version 4 of spoken, the other 3"):
        connect(server.addresses[0], newer, secret=secret)
    other = Protocol("unspoken", version=3, messages=(Ask,))
    with pytest.raises(MessageVersionError, match="one side speaks 'unspoken'"):
        connect(server.addresses[0], other, secret=secret)
    connect(server.addresses[0], PROTOCOL, secret=secret).close()


def test_other_wire_version_is_reported(server: Endpoint) -> None:
    address = server.addresses[0]
    family = socket.AF_UNIX if address.is_unix else socket.AF_INET
    with socket.socket(family) as raw:
        raw.settimeout(DEADLINE_S)
        raw.connect(address.path if address.is_unix else (address.host, address.port))
        raw.sendall(HEADER.pack(MAGIC, WIRE_VERSION + 1, Kind.HELLO, 0, 0, 72, 0) + b"?" * 72)
        reader = FrameReader()
        while (frame := reader.next()) is None:
            reader.feed(raw.recv(4096))
        assert frame.kind == Kind.ERROR
        error = error_of(frame.body)
        assert isinstance(error, MessageVersionError)
        assert f"version {WIRE_VERSION + 1} of the wire" in str(error)


def test_client_reads_errors_of_another_wire_version(tmp_path: Path) -> None:
    path = tmp_path / "s"

    def answer_in_version_9(listening: socket.socket) -> None:
        accepted, _ = listening.accept()
        with accepted:
            accepted.recv(4096)
            body = struct.pack("<B", 15) + b"MESSAGE_VERSION" + b"version 9 is spoken here"
            accepted.sendall(HEADER.pack(MAGIC, 9, Kind.ERROR, 0, 0, len(body), 0) + body)

    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        thread = threading.Thread(target=answer_in_version_9, args=(listening,))
        thread.start()
        with pytest.raises(MessageVersionError, match="version 9 is spoken here"):
            connect(Address(path=str(path)), PROTOCOL)
        thread.join()


def ended(channel: Channel) -> bool:
    return not channel.connection.is_open


def test_tampered_message_closes_the_connection(on_tcp: Endpoint, secret_path: Path) -> None:
    """Somebody on the way who has seen all of it cannot add, change or repeat a message."""
    for tamper in (
        lambda frame: frame + frame,
        lambda frame: frame[:-20] + bytes([frame[-20] ^ 1]) + frame[-19:],
        lambda frame: frame[:-1] + bytes([frame[-1] ^ 1]),
    ):
        channel: Channel = connect(on_tcp.addresses[0], PROTOCOL, secret=SecretFile(secret_path))
        with channel:
            frame = channel.writer.write(Kind.REQUEST, 1, PROTOCOL.encode(Ask("kv")))
            channel.socket.sendall(tamper(frame))
            wait_until(partial(ended, channel), "the server accepts it")
            assert "changed on its way" in str(channel.connection.ended)


def expire_all_deadlines(server: Endpoint) -> None:
    """In the endpoint's thread: end the time of all pending connections."""
    for newcomer in server._newcomers.doors:
        newcomer.deadline_s = 0


def test_bytes_sent_before_the_deadline_count(server: Endpoint, secret_path: Path) -> None:
    """If the endpoint's thread is late, a peer that was in time is accepted all the same."""
    address = server.addresses[0]
    receive = server._newcomers.receive

    def receive_late(newcomer: Newcomer) -> None:
        # The thread has seen that bytes are there, and has not read them when their time is over.
        if newcomer.deadline_s:
            newcomer.deadline_s = 0
        else:
            receive(newcomer)

    server._newcomers.receive = receive_late  # type: ignore[method-assign]
    secret = SecretFile(secret_path)
    with connect(address, PROTOCOL, secret=secret, timeout_s=DEADLINE_S) as channel:
        assert channel.call(Ask("kv"), timeout_s=DEADLINE_S)
    assert server.refused == 0


def test_idle_unauthenticated_connections_do_not_block_others(
    server: Endpoint, secret_path: Path
) -> None:
    address = server.addresses[0]
    family = socket.AF_UNIX if address.is_unix else socket.AF_INET
    raw_sockets = []
    for _ in range(2 * endpoint_module._MOST_UNAUTHENTICATED):
        raw = socket.socket(family)
        raw.connect(address.path if address.is_unix else (address.host, address.port))
        raw_sockets.append(raw)
    secret = SecretFile(secret_path)
    with connect(address, PROTOCOL, secret=secret, timeout_s=DEADLINE_S) as channel:
        assert channel.call(Ask("kv"), timeout_s=DEADLINE_S)
        assert server.refused >= endpoint_module._MOST_UNAUTHENTICATED
        server.run_soon(lambda: expire_all_deadlines(server))
        for raw in raw_sockets:  # all of them are out
            raw.settimeout(DEADLINE_S)
            assert b"kvms" in raw.recv(4096)
            raw.close()
        assert channel.call(Ask("kv"), timeout_s=DEADLINE_S)


def test_connection_count_is_bounded(tmp_path: Path) -> None:
    address = parse_address(f"unix://{tmp_path}/s")
    with (
        Endpoint(PROTOCOL, answer, listen=[address], most_connections=2),
        connect(address, PROTOCOL),
        connect(address, PROTOCOL),
        pytest.raises(ChannelError, match="2 connections stand already"),
    ):
        connect(address, PROTOCOL)


def test_listener_recovers_after_running_out_of_descriptors(tmp_path: Path) -> None:
    address = parse_address(f"unix://{tmp_path}/s")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with Endpoint(PROTOCOL, answer, listen=[address]), connect(address, PROTOCOL) as standing:
        waiting = socket.socket(socket.AF_UNIX)
        waiting.setblocking(False)
        try:
            lowest_free = os.dup(0)
            os.close(lowest_free)
            resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
            waiting.connect(address.path)
            assert standing.call(Ask("kv"), timeout_s=DEADLINE_S)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            waiting.close()
        with connect(address, PROTOCOL, timeout_s=DEADLINE_S) as channel:
            assert channel.call(Ask("kv"), timeout_s=DEADLINE_S)


def test_socket_of_a_running_server_is_not_taken(tmp_path: Path) -> None:
    address = parse_address(f"unix://{tmp_path}/s")
    with Endpoint(PROTOCOL, answer, listen=[address]):
        with pytest.raises(ChannelError, match="choose another address"):
            ListeningSocket(address)
        connect(address, PROTOCOL).close()
    assert not Path(address.path).exists()
    Path(address.path).write_text("a file of somebody")
    with pytest.raises(ChannelError, match="choose another address"):
        ListeningSocket(address)
    assert Path(address.path).read_text() == "a file of somebody"


def test_server_removes_only_its_own_socket(tmp_path: Path) -> None:
    address = parse_address(f"unix://{tmp_path}/s")
    first = ListeningSocket(address)
    Path(address.path).unlink()
    with Endpoint(PROTOCOL, answer, listen=[address]):
        first.close()
        connect(address, PROTOCOL).close()


@pytest.mark.parametrize(
    "text",
    [
        "/run/s",
        "unix://run/s",
        f"unix:///{'x' * 108}",
        "unix:///run/\0s",
        "unix:///run/\ud83d",
        "tcp://127.0.0.1",
        "tcp://:5",
        "tcp://127.0.0.1:65536",
        "tcp://example.org:5",
        "tcp://127.0.0.1:-1",
        "",
    ],
)
def test_invalid_address_is_rejected(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="is no address"):
        parse_address(text)


def test_addresses_parse_and_format() -> None:
    for text in ("unix:///run/s", "tcp://10.0.0.1:5000", "tcp://[::1]:5000"):
        assert str(parse_address(text)) == text
    assert str(parse_address("tcp://localhost:1")) == "tcp://127.0.0.1:1"
    with pytest.raises(ChannelClosedError, match="no process listens"):
        connect(parse_address("unix:///nowhere/s"), PROTOCOL)
