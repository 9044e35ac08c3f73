"""A protocol: a name, a version, and the messages that two programs exchange.

A body is MessagePack: an array of the message's name and its fields in order. msgspec decodes it in
one pass into the types that the class declares, and rejects all other data.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec

from kvelastic.errors import MessageError

DEFAULT_MOST_BYTES: Final = 1 << 20


class Message(msgspec.Struct, tag=True, array_like=True, forbid_unknown_fields=True):
    """Base class of messages; a subclass is a struct whose fields are validated on receipt.

    Bound every field of variable length: `Annotated[str, Meta(max_length=64)]`, also lists and
    bytes. The class name is the message's name on the wire. If its fields change, increase the
    version of the protocol.
    """


class Protocol:
    """The messages that two programs exchange. Immutable and thread-safe."""

    def __init__(
        self,
        name: str,
        *,
        version: int,
        messages: tuple[type[Message], ...],
        most_bytes: int = DEFAULT_MOST_BYTES,
        pack: Callable[[Any], Any] | None = None,
        unpack: Callable[[Any, Any], Any] | None = None,
    ) -> None:
        """Define a protocol with a name of at most 32 ASCII characters.

        `most_bytes` bounds the encoded size of each message, and so the memory that a peer can make
        this process allocate. `pack` and `unpack` are msgspec's `enc_hook` and `dec_hook`, for
        types that MessagePack does not have; `unpack` raises ValueError for a malformed value.
        """
        self.name: Final = name
        self.version: Final = version
        self.most_bytes: Final = most_bytes
        self._encoder = msgspec.msgpack.Encoder(enc_hook=pack)
        union: Any = messages[0]
        for other in messages[1:]:
            union = union | other
        self._decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(
            union, dec_hook=unpack
        )

    def encode(self, message: Message) -> bytes:
        """Encode a message. Raises `MessageError` if it is larger than `most_bytes`."""
        body = self._encoder.encode(message)
        if len(body) > self.most_bytes:
            raise MessageError(
                f"a {type(message).__name__} of {len(body)} bytes is not sent: {self.name} allows"
                f" {self.most_bytes}; send it in parts"
            )
        return body

    def decode(self, body: bytes | bytearray | memoryview) -> Message:
        """Decode a message. Raises `MessageError` for anything but one of `messages`."""
        try:
            return self._decoder.decode(body)
        except (msgspec.DecodeError, RecursionError) as error:
            raise MessageError(f"not a message of {self.name} {self.version}: {error}") from None
        except UnicodeDecodeError as error:
            raise MessageError(f"text of {self.name} {self.version} that is not UTF-8") from error
