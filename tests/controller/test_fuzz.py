"""Mutated requests, each on a connection of its own, against a controller with keys.

Whatever comes: the answers are HTTP, or the connection is closed, within a deadline; nobody gets
anything without a key; the controller says nothing of a fault and serves the next one as before.
A case is made of its number alone, so one that fails is run again with `case(number)`.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import h11
import pytest
from running import Controller, Engine, config_for
from waiting import DEADLINE_S, wait_until

pytestmark = pytest.mark.slow


API, ADMIN = "fuzz-api-key", "fuzz-admin-key"
AT_ONCE = 400

Dice = random.Random

PATHS = [
    "/v1/completions", "/v1/chat/completions", "/v1/audio/transcriptions", "/tokenize", "/v1/score",
    "/v1/models", "/models", "/health/m", "/traffic/stats?window=60", "/sleep/status", "/memory",
    "/v1/load_lora_adapter?model=m",
    "/devices", "/metrics", "/action/sleep/m", "/action/wakeup/m", "/admin/reload",
    "/admin/models/m/logs?lines=10", "/memory/m", "/memory/m/trim", "/memory/m/tiers/disk",
    "/models/idle?threshold=1",
]  # fmt: skip
METHODS = [
    "GET",
    "POST",
    "POST",
    "POST",
    "PATCH",
    "PUT",
    "DELETE",
    "HEAD",
    "OPTIONS",
    "BREW",
    "G T",
]
PATH_PIECES = [
    "/..", "/.", "//", "%2e%2e/", "%2f", "%00", "%", "%zz", "\\", ";a=b", "?model=m", "?model=",
    "?model=alias", "?model=m&model=m", "?" + "&" * 1500,
    "#x", "\xff", " ", "\t", "/v1/../action/sleep/m", "http://localhost/models", "*", "%c0%af",
    "a" * 3000,
]  # fmt: skip
HEADERS = [
    "Connection: authorization, content-length", "Connection: close", "Connection: upgrade",
    "Upgrade: websocket", "Expect: 100-continue", "Expect: what", "Content-Type: text/plain",
    "Content-Type: multipart/form-data; boundary=b", "Content-Type: multipart/form-data; boundary",
    "Content-Type: application/x-www-form-urlencoded", "Content-Type: application/json; charset=x",
    "Authorization: Bearer", "Authorization: Basic eDp5", "Authorization: Bearer wrong",
    "X-Api-Key:", "X-Request-Id: a b", "X-Request-Id: " + "i" * 500,
    "X-Kvelastic-Priority: 99999999999999", "X-Kvelastic-Priority: -\xb2", "Host: evil.example",
    "Host: [", "Origin: null", "Cookie: a=\xe4", "X-Forwarded-For: 127.0.0.1", "X: " + "y" * 6000,
    "Transfer-Encoding: gzip", "Content-Length: 5", "Content-Length: -1", "Content-Length: 0x10",
    "Content-Length: 99999999999999999999", ": empty", "No colon", " folded: 1", "Bad\x00name: 1",
    "Range: bytes=0-1", "TE: trailers", "Trailer: host", "Transfer-Encoding : chunked",
    "Transfer-Encoding: chunked, identity", "Content-Encoding: gzip",
]  # fmt: skip
TYPES = [*["application/json"] * 5, "multipart/form-data; boundary=b",
         "application/x-www-form-urlencoded"]  # fmt: skip
VALUES = [
    None, True, -1, 0.5, "", "m", "nobody", "m\x00", "\ud800", "a/b", "../m", [], {}, ["m"],
    10**40, {"model": "m"}, "x" * 5000,
]  # fmt: skip
HIDDEN = b"POST /action/sleep/m HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n"


def case(number: int) -> tuple[bytes, Dice]:
    """What is sent, and the dice that say how."""
    dice = Dice(f"fuzz {number}")
    requests = [_request(dice) for _ in range(dice.choice((1, 1, 1, 1, 1, 1, 2, 3)))]  # pipelined
    data = b"".join(requests)
    if dice.random() < 0.1:
        place = dice.randrange(len(data))
        data = data[:place] + HIDDEN + data[place:]
    if dice.random() < 0.2:
        data = _noise(dice, data)
    return data, dice


def _request(dice: Dice) -> bytes:
    path = dice.choice(PATHS[:5] if dice.random() < 0.5 else PATHS)
    method = "POST" if dice.random() < 0.7 else dice.choice(METHODS)
    if dice.random() < 0.15:
        place = dice.randint(0, len(path))
        path = path[:place] + dice.choice(PATH_PIECES) + path[place:]
    version = (
        "HTTP/1.1" if dice.random() < 0.97 else dice.choice(("HTTP/1.0", "HTTP/2.0", "HTP", ""))
    )
    headers = ["Host: localhost"] if dice.random() < 0.98 else []
    if dice.random() < 0.7:
        headers.append("Content-Type: " + dice.choice(TYPES))
    if dice.random() < 0.6:
        headers.append("Connection: close")  # else the case takes as long as a connection is kept
    if dice.random() < 0.5:
        headers.append(f"Authorization: Bearer {API}")
    for _ in range(dice.choice((0, 0, 0, 0, 0, 0, 1, 1, 2, 4))):
        headers.insert(dice.randint(0, len(headers)), dice.choice(HEADERS))
    framing, body = dice.choice(FRAMINGS)(dice, _body(dice))
    end = "\n" if dice.random() < 0.03 else "\r\n"
    head = end.join([f"{method} {path} {version}", *headers, *framing, "", ""])
    return head.encode("latin-1", "replace") + body


def _body(dice: Dice) -> bytes:
    kind = dice.randrange(12)
    if kind == 0:
        return b""
    if kind == 1:
        return dice.randbytes(dice.randint(1, 300))
    if kind == 2:
        return b"[" * dice.choice((10, 50_000))
    name = dice.choice(("m", "alias", "alias", "", "m\r\nX: y", "n" * 2000))
    if kind == 3:
        file = f'--b\r\nContent-Disposition: form-data; name="x"; filename="f"\r\n\r\n{name}\r\n'
        field = f'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\n{name}\r\n'
        return (file * dice.choice((0, 0, 1, 300)) + field + "--b--\r\n").encode()
    if kind == 7:
        return f"a=b&%6dodel={name}{'&' * dice.choice((0, 1, 2000))}".encode()
    value = {"model": "m", "prompt": "x", "stream": dice.random() < 0.3, "max_tokens": 4}
    if kind == 4:
        value["model"] = dice.choice(VALUES)
    raw = json.dumps(value).encode()
    if kind == 5:
        return raw[: dice.randint(1, len(raw))]
    if kind == 6:
        return raw[:-1] + b',"model":"nobody","n":NaN,"n":1e999}' + b" " * dice.choice((0, 70_000))
    return raw


def _plain(_: Dice, body: bytes) -> tuple[list[str], bytes]:
    return [f"Content-Length: {len(body)}"], body


def _wrong_length(dice: Dice, body: bytes) -> tuple[list[str], bytes]:
    return [f"Content-Length: {max(0, len(body) + dice.choice((-7, -1, 1, 90)))}"], body


def _chunked(dice: Dice, body: bytes) -> tuple[list[str], bytes]:
    """Chunks that are right, but for one thing now and then."""
    pieces = []
    while body:
        size = dice.randint(1, 1 + len(body))
        pieces.append(b"%x\r\n%s\r\n" % (len(body[:size]), body[:size]))
        body = body[size:]
    end = b"0\r\n\r\n"
    if dice.random() < 0.5:
        end = dice.choice(
            (b"", b"0\r\n", b"00000\r\n\r\n", b"0\r\nX: y\r\n\r\n", b"-1\r\n\r\n", b"z\r\n")
        )
    if pieces and dice.random() < 0.4:
        place = dice.randrange(len(pieces))
        bad = (
            b";x=y\r\n",
            b"\n",
            b"\r\r\n",
            b"; " + b"e" * 5000 + b"\r\n",
            b" \r\n",
            b"ffffffffff\r\n",
        )
        pieces[place] = pieces[place].replace(b"\r\n", dice.choice(bad), 1)
    return ["Transfer-Encoding: chunked"], b"".join(pieces) + end


def _both(dice: Dice, body: bytes) -> tuple[list[str], bytes]:
    """Length and chunks at once: which one counts is what smuggling lives on."""
    lines, chunks = _chunked(dice, body)
    lines.insert(dice.randrange(2), f"Content-Length: {dice.choice((0, 4, len(chunks)))}")
    return lines, chunks + dice.choice((b"", HIDDEN))


def _twice(_: Dice, body: bytes) -> tuple[list[str], bytes]:
    return [f"Content-Length: {len(body)}", "Content-Length: 0"], body + HIDDEN


def _none(_: Dice, body: bytes) -> tuple[list[str], bytes]:
    return [], body


FRAMINGS: list[Callable[[Dice, bytes], tuple[list[str], bytes]]] = [
    *[_plain] * 10, _chunked, _chunked, _chunked, _wrong_length, _both, _twice, _none
]  # fmt: skip


def _noise(dice: Dice, data: bytes) -> bytes:
    """A few bytes changed, gone, doubled or new."""
    noisy = bytearray(data)
    for _ in range(dice.randint(1, 6)):
        place = dice.randint(0, len(noisy))
        size = dice.randint(1, 9)
        match dice.randrange(4):
            case 0:
                noisy[place : place + 1] = dice.randbytes(1)
            case 1:
                del noisy[place : place + size]
            case 2:
                noisy[place:place] = noisy[place : place + size * 10]
            case _:
                noisy[place:place] = dice.choice(
                    (dice.randbytes(size), b"\r\n", b"\0", b"\r\n\r\n")
                )
    return bytes(noisy)


# ------------------------------------------------------------------------------------- the answers

HEALTH = b'{"status": "healthy"}'
_OPEN = re.compile(  # the dashboard's files, and /health, whose answer to HEAD has a length only
    rb"(?i)content-type: (text/(html|css|javascript)|image/svg)|content-length: %d\r" % len(HEALTH)
)
_HEAD = re.compile(rb"HTTP/1\.1 ([1-5][0-9][0-9]) [^\r\n]*\r\n((?:[^\r\n:]+:[^\r\n]*\r\n)*)\r\n")


def parse_responses(data: bytes) -> Iterator[tuple[int, bytes, bytes]]:
    """Status, headers and body of each answer; fails where it is not HTTP.

    A HEAD's answer has a length and no body: what follows an answer's head is the next head, or is
    searched for it.
    """
    at = 0
    while at < len(data):
        match = _HEAD.match(data, at)
        assert match, f"not HTTP: {data[at : at + 200]!r}"
        end = match.end()
        length = re.search(rb"(?i)content-length: *([0-9]+)", match[2])
        body = b""
        if b"chunked" in match[2].lower():
            found = data.find(b"0\r\n\r\n", end)
            at = len(data) if found < 0 else found + 5
        elif length and not data.startswith(b"HTTP/1.1 ", end):
            at = min(len(data), end + int(length[1]))
            body = data[end:at]
        else:
            at = end
        yield int(match[1]), match[2], body


async def ask(port: int, data: bytes, dice: Dice) -> bytes:
    """Send it, in one piece or several; all that comes back until the other side closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = b""
    try:
        cut = dice.randrange(len(data)) if data and dice.random() < 0.4 else len(data)
        writer.write(data[:cut])
        await writer.drain()
        if cut < len(data):
            await asyncio.sleep(0.002)
            writer.write(data[cut:])
            await writer.drain()
        how = dice.random()
        if how < 0.05:
            return b""  # it goes away at once
        if how < 0.5:
            await asyncio.sleep(0.05)
            writer.write_eof()
        while piece := await reader.read(1 << 16):
            answer += piece
    except OSError:
        pass
    finally:
        writer.transport.abort()
    return answer


def judge(number: int, data: bytes, answer: bytes, seen: Counter[int]) -> None:
    good = 0
    for status, headers, body in parse_responses(answer):
        seen[status] += 1
        assert status != 500 or b"internal_error" not in body, (number, data, answer)
        good += 200 <= status < 300 and not _OPEN.search(headers)
    # Each that is let in has brought the key; a hidden one never has.
    assert good <= data.count(API.encode()), (number, data, answer)


def memory_mib(pid: int) -> float:
    line = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert line
    return int(line[1]) / 1024


@contextmanager
def controller(**server: object) -> Iterator[tuple[Engine, Controller]]:
    """A controller with keys, and the engine behind it."""
    server |= {"max_body": 60_000, "max_headers": 4096, "log_requests": False}
    auth = {"api_keys": [API], "admin_keys": [ADMIN]}
    with Engine() as engine:
        config = config_for(engine, server=server, auth=auth, model={"aliases": ["alias"]})
        with Controller(config) as front:
            front.client.headers["authorization"] = f"Bearer {API}"
            yield engine, front


def is_whole(data: bytes) -> bool:
    """Whether it begins with a request that is valid and complete, so that an answer must come."""
    reader = h11.Connection(h11.SERVER)
    reader.receive_data(data)
    try:
        while (event := reader.next_event()) is not h11.NEED_DATA:
            if isinstance(event, h11.EndOfMessage):
                return True
    except h11.RemoteProtocolError:
        pass
    return False


def status_of(port: int, data: bytes) -> int:
    """0 if no answer came: more data followed that is no HTTP, and the connection was closed.

    What the controller has not read when it closes resets the connection. A plain socket still
    returns the answer that came before; asyncio's reader may not.
    """
    with socket.create_connection(("127.0.0.1", port), DEADLINE_S) as sock:
        with suppress(ConnectionError):
            sock.sendall(data)
        with suppress(ConnectionError), sock.makefile("rb") as answer:
            if line := answer.readline():
                return int(line.split()[1])
    return 0


def test_whole_requests_reach_every_layer() -> None:
    """Those of the next test do, too, but on a slow machine its timeouts may end them before."""
    missing = {200, 400, 401, 404, 405, 413, 431}
    with controller() as (_, front):
        for data in (case(number)[0] for number in range(1000)):
            if not missing:
                break
            if is_whole(data):
                missing.discard(status_of(front.port, data))
    assert not missing


@pytest.mark.parametrize(
    "count", [2000, pytest.param(100_000, marks=pytest.mark.soak)], ids=["some", "hundred_thousand"]
)
@pytest.mark.timeout(1800)
def test_mutated_requests_do_no_harm(count: int) -> None:
    seen: Counter[int] = Counter()
    numbers = iter(range(count))  # shared by all that ask

    async def some_of_them(port: int) -> None:
        for number in numbers:
            data, dice = case(number)
            try:
                answer = await asyncio.wait_for(ask(port, data, dice), DEADLINE_S)
            except asyncio.TimeoutError:
                pytest.fail(f"case {number} hangs: {data!r}")
            judge(number, data, answer, seen)
            if number % 10_000 == 9_999:
                print(f"{number + 1} of {count}", flush=True)

    async def all_of_them(port: int) -> None:
        await asyncio.gather(*(some_of_them(port) for _ in range(AT_ONCE)))

    with controller(header_timeout="1s", body_timeout="1s", keep_alive="1s") as (engine, front):
        asyncio.run(all_of_them(front.port))
        print(f"answers: {dict(sorted(seen.items()))}; {memory_mib(front.process.pid):.0f} MiB")
        assert engine.count("sleep_calls") == 0
        assert not [line for line in front.lines if "raceback" in line or "ERROR" in line]
        assert memory_mib(front.process.pid) < 200
        assert front.complete().status_code == 200
        wait_until(lambda: "kvelastic_buffered_bytes 0.0" in front.get("/metrics").text)
        assert front.end() == 0
