"""Messages changed at random: no crash, nobody let in, nothing allocated without a bound."""

from __future__ import annotations

import random
import resource
import socket
import struct
from pathlib import Path

import msgspec
import pytest
from channel import connect
from spoken import PROTOCOL, Answer, Ask, Numbers, answer
from waiting import DEADLINE_S

from kvelastic._vmm import pack_pieces
from kvelastic.errors import KvelasticError
from kvelastic.messages import Endpoint, SecretFile, parse_address
from kvelastic.messages.frames import HEADER, MAGIC, WIRE_VERSION, FrameReader, Kind
from kvelastic.transfer.wire import PROTOCOL as TRANSFER
from kvelastic.transfer.wire import Ask as AskNode
from kvelastic.transfer.wire import Begin, Hello, Push, Send, Settle

FEW, MANY = 4_000, 100_000
INTERESTING = (0, 1, 0x7F, 0x80, 0xC0, 0xDC, 0xDD, 0xDF, 0xC6, 0xDB, 0xFF)
BODIES = [
    PROTOCOL.encode(Ask("kv")),
    PROTOCOL.encode(Numbers([1, 2, 3] * 100)),
    PROTOCOL.encode(Answer(1, "x" * 100)),
    TRANSFER.encode(Hello(1, bytes(16), 5)),
    TRANSFER.encode(AskNode(b"y" * 50)),
    TRANSFER.encode(Begin(pack_pieces([(4096, 10)] * 20), b"claim", 1000)),
    TRANSFER.encode(Push(1, pack_pieces([(4096, 10)]), pack_pieces([(8192, 10)]), b"", 1000)),
    TRANSFER.encode(Send(1, bytes(32), 1000)),
    TRANSFER.encode(Settle(1)),
]
# What claims to be far more than it is: arrays, maps, text and bytes of 4 GiB, depth without end.
BODIES += [bytes([kind]) + b"\xff\xff\xff\xff" for kind in (0xDD, 0xDF, 0xDB, 0xC6)]
BODIES += [b"\x92\xa7Numbers" + b"\xdd\xff\xff\xff\xff", b"\x91" * 60_000, b"\x81" * 60_000]


def mutated(rng: random.Random, raw: bytes) -> bytes:
    data = bytearray(raw)
    for _ in range(rng.randrange(1, 6)):
        at = rng.randrange(len(data) + 1)
        what = rng.randrange(5)
        if what == 0 and at < len(data):
            data[at] = rng.choice(INTERESTING)
        elif what == 1 and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif what == 2:
            del data[at : at + rng.randrange(8)]
        elif what == 3:
            data[at:at] = rng.randbytes(rng.randrange(8))
        else:
            data[at : at + 4] = struct.pack("<I", rng.choice([0, 1, 1 << 31, (1 << 32) - 1]))
    return bytes(data)


def grown_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def bodies_are_messages_or_errors(count: int) -> None:
    rng = random.Random(19)
    before = grown_bytes()
    for number in range(count):
        raw = BODIES[number % len(BODIES)]
        body = raw if number < len(BODIES) else mutated(rng, raw)
        for protocol in (PROTOCOL, TRANSFER):
            try:
                message = protocol.decode(body)
            except KvelasticError:
                continue
            assert msgspec.msgpack.encode(message)
    assert grown_bytes() - before < 64 << 20


def frames_are_frames_or_errors(count: int) -> None:
    """Changed frames, in portions of any size, before and after the peer is let in."""
    rng = random.Random(20)
    before = grown_bytes()
    for number in range(count):
        frames = b"".join(
            HEADER.pack(MAGIC, WIRE_VERSION, rng.choice(list(Kind)), 0, 0, len(body), number) + body
            for body in rng.choices(BODIES[:9], k=2)
        )
        stream = mutated(rng, frames)
        reader = FrameReader()
        if number % 2:
            reader.allow(PROTOCOL.most_bytes)
        if number % 3 == 0:
            reader.use_key(b"k" * 32)
        try:
            while stream:
                size = rng.randrange(1, 200)
                reader.feed(stream[:size])
                stream = stream[size:]
                while reader.next() is not None:
                    pass
        except KvelasticError:
            continue
    assert grown_bytes() - before < 64 << 20


def test_mutated_bodies_decode_or_raise() -> None:
    bodies_are_messages_or_errors(FEW)


def test_mutated_frames_decode_or_raise() -> None:
    frames_are_frames_or_errors(FEW)


@pytest.mark.soak
def test_hundred_thousand_mutated_messages_decode_or_raise() -> None:
    bodies_are_messages_or_errors(MANY)
    frames_are_frames_or_errors(MANY)


@pytest.mark.slow
def test_random_unauthenticated_bytes_are_rejected(secret_path: Path) -> None:
    """A server that is told nonsense lets nobody in, and goes on answering who knows the secret."""
    rng = random.Random(21)
    secret = SecretFile(secret_path)
    hello = HEADER.pack(MAGIC, WIRE_VERSION, Kind.HELLO, 0, 0, 72, 0) + struct.pack(
        "<32sII32s", b"spoken", 3, 1, bytes(32)
    )
    proof = HEADER.pack(MAGIC, WIRE_VERSION, Kind.PROOF, 0, 0, 32, 0) + bytes(32)
    request = HEADER.pack(MAGIC, WIRE_VERSION, Kind.REQUEST, 0, 0, 5, 1) + BODIES[0][:5]
    heard: list[object] = []

    def hear(request: object) -> None:
        heard.append(request)
        answer(request)  # type: ignore[arg-type]

    listen = [parse_address("tcp://127.0.0.1:0")]
    with Endpoint(PROTOCOL, hear, listen=listen, secret=secret) as server:
        address = server.addresses[0]
        for number in range(300):
            said = rng.choice([hello + proof + request, hello + request, request, proof])
            said = said if number % 5 == 0 else mutated(rng, said)
            with socket.create_connection((address.host, address.port)) as foreign:
                foreign.sendall(said)
        with connect(address, PROTOCOL, secret=secret, timeout_s=DEADLINE_S) as channel:
            assert channel.call(Ask("kv"), timeout_s=DEADLINE_S) == Answer(2, "kv")
        assert len(heard) == 1
