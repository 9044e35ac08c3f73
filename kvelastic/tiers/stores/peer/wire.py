"""What a decode engine asks a prefill engine, in the body of a question between nodes."""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta

from kvelastic.messages import Message, Protocol
from kvelastic.tiers.base import KEY_BYTES
from kvelastic.tiers.stores.peer.split import MOST_RANKS

MOST_KEYS: Final = 8192
_Ticket = Annotated[bytes, Meta(min_length=16, max_length=16)]
_Identity = Annotated[bytes, Meta(min_length=16, max_length=16)]
_Ranks = Annotated[int, Meta(ge=0, le=MOST_RANKS)]
"""Over how many ranks records are divided (`split`). 0: unknown, they are read as they are."""


class Read(Message):
    """Requests the records of some blocks that are held under a ticket."""

    ticket: _Ticket
    identity: _Identity
    """Identifies the reader's model, weights and layout. The owner must have the same."""
    keys: Annotated[bytes, Meta(max_length=MOST_KEYS * KEY_BYTES)]
    ranks: _Ranks
    """Those of the reader, which may differ from the owner's."""


class Reading(Message):
    """The reply: records that the reader can pull now, of the first keys at least."""

    claim: Annotated[bytes, Meta(max_length=64)]
    """Belongs to the pull. It ends with the pull, or when the reader is late."""
    addresses: Annotated[list[int], Meta(max_length=MOST_KEYS)]
    """The address of each record, in the order of the keys."""
    ranks: _Ranks
    """Those of the owner: with them the records have the owner's size."""


class Release(Message):
    """The reader is done with the ticket. The reply is empty."""

    ticket: _Ticket


PROTOCOL: Final = Protocol("held", version=1, messages=(Read, Reading, Release))
