"""The longest stall under hostile bodies: `python -m benchmarks.router.stalls PORT '{...}'`.

One client asks small requests one after another and notes the longest wait; another one sends a
large body meanwhile, of one kind after the other. What a server's loop does in one piece with such
a body, the small requests wait for. Prints one line of JSON.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time

from benchmarks.router.load import BODY

MAX_BODY_BYTES = 64 << 20
"""`server.max_body` of docs/controller.example.yaml."""
BEFORE_S = 0.2
"""Small requests alone, before and after a body: it may still be worked on when it is answered."""
JSON = "application/json"
FORM = "multipart/form-data; boundary=0123456789abcdef0123456789abcdef"
LINE = b"--0123456789abcdef0123456789abcdef"
FILE = LINE + b'\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
FIELD = b'\r\nContent-Disposition: form-data; name="model"\r\n\r\n%s\r\n'
NAME = b"\r\n" + LINE + FIELD + LINE + b"--"
BODIES = {
    # Each: Content-Type, start, what is repeated, end.
    "a long prompt": (JSON, b'{"model":"m","prompt":"', b"a sea ", b'"}'),
    "a long prompt under an alias": (JSON, b'{"prompt":"', b"a sea ", b'","model":"an-alias"}'),
    "lists": (JSON, b'{"x":[', b"[],", b'1],"model":"an-alias"}'),
    "keys": (JSON, b"{", b'"model":"m",', b'"model":"m"}'),
    "numbers": (JSON, b'{"x":[', b"1,", b'1],"model":"m"}'),
    "a name": (JSON, b'{"model":"', b"\\n", b'"}'),
    "a file": (FORM, FILE, b"RIFF", NAME % b"an-alias"),
    "a file of lines": (FORM, FILE, b"\r\n", NAME % b"m"),
    "dispositions": (FORM, LINE + b"\r\n", b"content-disposition:", b""),
    "boundaries": (FORM, FILE, b"\r\n" + LINE + b"x", NAME % b"m"),
    "fields": ("application/x-www-form-urlencoded", b"model=an-alias&x=", b"%61", b""),
    "separators": ("application/x-www-form-urlencoded", b"model=m", b"&", b""),
}


def request(kind: str, body: bytes) -> bytes:
    return (
        f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: {kind}\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    ).encode() + body


def body_of(start: bytes, repeated: bytes, end: bytes) -> bytes:
    return start + repeated * ((MAX_BODY_BYTES - len(start) - len(end)) // len(repeated)) + end


def ask(sock: socket.socket, data: bytes) -> bytes:
    """The answer, whose body has a length."""
    sock.sendall(data)
    answer = b""
    while (end := answer.find(b"\r\n\r\n")) < 0:
        piece = sock.recv(65536)
        if not piece:
            raise ConnectionError("no answer")
        answer += piece
    length = int(answer[:end].lower().partition(b"content-length: ")[2].split(b"\r\n", 1)[0])
    while len(answer) < end + 4 + length:
        answer += sock.recv(65536)
    return answer


def send_once(port: int, data: bytes) -> None:
    with socket.create_connection(("127.0.0.1", port)) as sock:
        status = ask(sock, data)[9:12]
    if status not in {b"200", b"400"}:
        raise SystemExit(f"an answer that is not 200 or 400: {status!r}")


def longest_ms(port: int, data: bytes) -> float:
    """Of all small requests that are asked before, while and after `data` is served."""
    small = request(JSON, BODY)
    sender = threading.Thread(target=send_once, args=(port, data))
    longest_s = 0.0
    with socket.create_connection(("127.0.0.1", port)) as sock:
        began_s = time.perf_counter()
        end_s: float | None = None
        while end_s is None or time.perf_counter() < end_s:
            asked_s = time.perf_counter()
            ask(sock, small)
            now_s = time.perf_counter()
            longest_s = max(longest_s, now_s - asked_s)
            if sender.ident is None:
                if now_s - began_s > BEFORE_S:
                    sender.start()
            elif end_s is None and not sender.is_alive():
                end_s = now_s + BEFORE_S
            time.sleep(0.001)
    return longest_s * 1e3


def main() -> None:
    port = int(sys.argv[1])
    each = {
        name: longest_ms(port, request(kind, body_of(start, repeated, end)))
        for name, (kind, start, repeated, end) in BODIES.items()
    }
    print(json.dumps({"answers": len(each), "longest_ms": max(each.values()), **each}))


if __name__ == "__main__":
    main()
