"""Small messages between processes, on one host or several: bounded, versioned, never pickled.

    class Ask(Message):                              # msgspec structs, checked when they arrive
        name: Annotated[str, Meta(max_length=64)]

    class Answer(Message):
        size_bytes: int

    PROTOCOL = Protocol("sizes", version=1, messages=(Ask, Answer))

    def handle(request: Request) -> None:            # in the endpoint's thread: must not block
        request.answer(Answer(size_bytes=42))

    server = Endpoint(PROTOCOL, handle, listen=[parse_address("unix:///run/user/1000/sizes")])
    client = Endpoint(PROTOCOL, refuse)              # in another process
    client.connect(parse_address("unix:///run/user/1000/sizes")).call(Ask(name="kv"), timeout_s=1.0)

Peers are authenticated before the first message. On a Unix socket, the kernel reports the peer's
user, and only processes of the same user are accepted. On TCP, both ends prove that they know a
secret (`SecretFile`), and each message carries an authentication code. Messages are not encrypted,
so they are readable on the network. Peers of another version get an error that both versions can
decode.

Parsing received data takes linear time and bounded memory: `Protocol.most_bytes` for a message, and
a few hundred bytes before the peer is authenticated. Does not import torch.
"""

from msgspec import Meta

from kvelastic.address import MOST_PATH_BYTES, Address, parse_address
from kvelastic.messages.connection import Connection, Reply, Request
from kvelastic.messages.endpoint import Endpoint
from kvelastic.messages.peers import Peer
from kvelastic.messages.protocol import Message, Protocol
from kvelastic.messages.runtime_folder import runtime_folder
from kvelastic.messages.secret import SecretFile

__all__ = [
    "MOST_PATH_BYTES", "Address", "Connection", "Endpoint", "Message", "Meta", "Peer", "Protocol",
    "Reply", "Request", "SecretFile", "parse_address", "runtime_folder",
]  # fmt: skip
