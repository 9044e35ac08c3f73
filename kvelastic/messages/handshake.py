"""The handshake: both ends exchange protocol and version; on TCP, both prove the secret.

    client                                    server
    HELLO protocol, version, nonce_c   ---->
                                       <----  HELLO protocol, version, nonce_s       or ERROR
    PROOF of the client                ---->                                         TCP only
                                       <----  PROOF of the server                    or ERROR

A proof is HMAC-SHA256, keyed with the secret, over the prover's role and both HELLOs. So it cannot
be replayed on another connection or in the other direction. The keys of later frames' codes are
derived in the same way. This module does no I/O: `receive` takes a frame and returns the bytes to
send.
"""

from __future__ import annotations

import hmac
import secrets
import struct
from typing import Final

from kvelastic.errors import AccessDeniedError, MessageError, MessageVersionError
from kvelastic.messages.frames import Frame, FrameReader, FrameWriter, Kind, error_of
from kvelastic.messages.protocol import Protocol
from kvelastic.messages.secret import SecretFile

_HELLO: Final = struct.Struct("<32sII32s")  # protocol, its version, whether to prove, nonce


class Handshake:
    """One end of the handshake. `secret` is None on Unix sockets: the kernel names the peer."""

    def __init__(
        self,
        protocol: Protocol,
        secret: SecretFile | None,
        reader: FrameReader,
        writer: FrameWriter,
        *,
        is_client: bool,
    ) -> None:
        self._protocol = protocol
        self._secrets = [] if secret is None else secret.secrets()
        self._reader, self._writer = reader, writer
        self._is_client = is_client
        self._hello = _HELLO.pack(
            protocol.name.encode(), protocol.version, bool(self._secrets), secrets.token_bytes(32)
        )
        self._peers_hello = b""
        self.is_done = False
        """Once True, later frames are messages."""

    def begin(self) -> bytes:
        """Return the client's first bytes to send; empty for a server."""
        return self._writer.write(Kind.HELLO, 0, self._hello) if self._is_client else b""

    def receive(self, frame: Frame) -> bytes:
        """Process a frame and return the bytes to send; then check `is_done`.

        Raises `MessageVersionError`, `AccessDeniedError`, `MessageError`, or the error that the
        peer sent. A server sends these to its peer and closes the connection.
        """
        if frame.kind == Kind.ERROR:
            raise error_of(frame.body)
        if frame.kind == Kind.HELLO and not self._peers_hello:
            return self._receive_hello(frame.body)
        if frame.kind == Kind.PROOF and self._peers_hello and self._secrets:
            return self._receive_proof(frame.body)
        raise MessageError(f"a {frame.kind.name} came where none is due")

    def _receive_hello(self, body: bytes) -> bytes:
        if len(body) != _HELLO.size:
            raise MessageError("a HELLO of the wrong size")
        raw_name, version, proves, _ = _HELLO.unpack(body)
        name = raw_name.rstrip(b"\0").decode("ascii", "replace")
        if name != self._protocol.name:
            raise MessageVersionError(
                f"one side speaks {name!r}, the other {self._protocol.name!r}; check the address"
            )
        if version != self._protocol.version:
            raise MessageVersionError(
                f"one side speaks version {version} of {name}, the other"
                f" {self._protocol.version}; run the same kvelastic on both sides"
            )
        if bool(proves) != bool(self._secrets):
            raise AccessDeniedError("one side has a secret and the other has none")
        self._peers_hello = body
        answer = b"" if self._is_client else self._writer.write(Kind.HELLO, 0, self._hello)
        if not self._secrets:
            self._done()
        elif self._is_client:
            answer += self._writer.write(Kind.PROOF, 0, self._mac(self._secrets[0], b"client"))
        return answer

    def _receive_proof(self, body: bytes) -> bytes:
        role = b"server" if self._is_client else b"client"
        # A client has proved the first secret, so the server must prove the same one.
        candidates = self._secrets[:1] if self._is_client else self._secrets
        for secret in candidates:
            if hmac.compare_digest(self._mac(secret, role), body):
                break
        else:
            raise AccessDeniedError("the peer's secret is not ours; give both the same file")
        answer = b""
        if not self._is_client:
            answer = self._writer.write(Kind.PROOF, 0, self._mac(secret, b"server"))
        to_server, to_client = self._mac(secret, b"to server"), self._mac(secret, b"to client")
        self._writer.use_key(to_server if self._is_client else to_client)
        self._reader.use_key(to_client if self._is_client else to_server)
        self._done()
        return answer

    def _done(self) -> None:
        self._reader.allow(self._protocol.most_bytes)
        self._secrets = []
        self.is_done = True

    def _mac(self, secret: bytes, purpose: bytes) -> bytes:
        ours, theirs = self._hello, self._peers_hello
        both = ours + theirs if self._is_client else theirs + ours
        return hmac.digest(secret, b"kvelastic messages 1\0" + purpose + b"\0" + both, "sha256")
