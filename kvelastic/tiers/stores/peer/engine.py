"""The peer tier of one engine: its node, what it holds for others, and what it reads from them.

peers = Peers(settings, pool, staging_slots=16, identified=True)
open_tiers(pool, settings, namespace, peer=peers.store)          # owns the store
tiers.attach(peers.close)                                        # closes the rest
"""

from __future__ import annotations

import logging
import secrets
from pathlib import Path
from typing import Any, Final

from kvelastic import _vmm
from kvelastic.config import Config
from kvelastic.errors import ConfigError, KvelasticError
from kvelastic.messages import Address, SecretFile, parse_address, runtime_folder
from kvelastic.pool.pool import ElasticPool
from kvelastic.tiers.stores.peer.held import HeldRequests
from kvelastic.tiers.stores.peer.serving import Serving
from kvelastic.tiers.stores.peer.split import Split
from kvelastic.tiers.stores.peer.store import PeerStore, Ticket
from kvelastic.transfer import Node

_log = logging.getLogger("kvelastic")

PREFILLS: Final = frozenset({"prefill", "both"})
DECODES: Final = frozenset({"decode", "both"})
_TICKET: Final = "kvelastic_ticket"
_NODE: Final = "kvelastic_node"
_ADDRESS: Final = "kvelastic_address"


class Peers:
    """What one engine exchanges with others. Thread-safe."""

    def __init__(
        self,
        settings: Config,
        pool: ElasticPool,
        *,
        staging_slots: int,
        identified: bool,
        split: Split | None = None,
    ) -> None:
        """Listen if the role includes prefill. With `split`, peers may have other ranks.

        Raises `ConfigError`, `OutOfMemoryError` and the errors of `Node`.
        """
        role = settings.role
        self.prefills = role in PREFILLS
        self.decodes = role in DECODES
        record_bytes = pool.blocks.record_bytes
        self.held = HeldRequests(
            pool.blocks, hold_s=settings.prefill_hold_s, block_bytes=record_bytes
        )
        staging = _vmm.Staging(staging_slots if self.prefills else 1, record_bytes)
        if self.prefills:
            staging.populate()  # pulls from huge pages take 0.6 of the time
        self._staging = staging
        self._serving = Serving(self.held, pool.blocks, staging, lambda: self.store.identity, split)
        secret = None if settings.link_secret is None else SecretFile(Path(settings.link_secret))
        listen = [_listening_at(settings, pool)] if self.prefills else []
        self._node = Node(
            secrets.randbits(63),
            answer=self._serving.answer,
            claim=self._serving.claim,
            listen=listen,
            secret=secret,
            allowed=settings.link_allow,
            data_ports=settings.link_data_ports,
            role=f"{role} {pool.name}",
            on_end=self._serving.ended,
            held=self.held,
        )
        self.store = PeerStore(record_bytes, self._node, identified=identified, split=split)
        if self.prefills:
            first, last = staging.address(0), staging.address(staging.slots - 1)
            self._node.register(first, last + record_bytes - first)
            _log.info(
                "Decode engines read from %s; finished prompts are held for them for %g s.",
                self._node.addresses[0],
                settings.prefill_hold_s,
            )

    # --- prefill --------------------------------------------------------------------------------

    def hold(self, request: str, ids: list[int], keys: bytes) -> dict[str, Any]:
        """Hold a finished request's blocks; return what its decode engine needs to read them."""
        ticket = self.held.hold(request, ids, keys)
        return {
            _TICKET: ticket.hex(),
            _NODE: str(self._node.node_id),
            _ADDRESS: str(self._node.addresses[0]),
        }

    # --- decode ---------------------------------------------------------------------------------

    def ticket_in(self, parameters: dict[str, Any]) -> Ticket | None:
        """Return the ticket among a request's parameters; None without a usable one, logged."""
        if _TICKET not in parameters:
            return None
        try:
            ticket = bytes.fromhex(parameters[_TICKET])
            node_id = int(parameters[_NODE])
            if len(ticket) != 16 or not 0 <= node_id < 1 << 64:
                raise ValueError("the ticket has 16 bytes and a node's id 64 bits")
            return Ticket(ticket, node_id, parse_address(parameters[_ADDRESS]))
        except (
            *(KvelasticError, KeyError, TypeError, ValueError, AttributeError),
            OverflowError,  # a node id of 1e999
        ) as error:
            _log.warning("a request's ticket is not usable, its prompt is computed: %s", error)
            return None

    def close(self) -> None:
        """End all holds and links. Idempotent. Call it before the pool is closed."""
        self._node.close()
        self.held.close()


def _listening_at(settings: Config, pool: ElasticPool) -> Address:
    """Return the address of a prefill engine; decode engines get the same one.

    Raises `ConfigError` if they could not use it.
    """
    if settings.prefill_address is not None:
        address = parse_address(settings.prefill_address)
        if address.host in ("0.0.0.0", "::"):
            raise ConfigError(
                f"KVELASTIC_PREFILL_ADDRESS={settings.prefill_address!r} is no address to which a"
                " decode engine can connect; name one of this host's addresses"
            )
        if not address.is_unix and settings.link_secret is None:
            raise ConfigError(
                f"KVELASTIC_PREFILL_ADDRESS={settings.prefill_address!r} needs"
                " KVELASTIC_LINK_SECRET, the same file on both hosts"
            )
        return address
    folder = runtime_folder("kvelastic-prefill", settings.ledger)
    return parse_address(f"unix://{folder / pool.name}")
