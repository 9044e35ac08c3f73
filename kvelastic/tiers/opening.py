"""Opens the stores that the settings name, and the tiers of a pool over them.

tiers = open_tiers(pool, settings, namespace)      # None: KVELASTIC_TIERS names none
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final

from kvelastic import _vmm
from kvelastic.config import Config
from kvelastic.logs import log_once
from kvelastic.pool.pool import ElasticPool
from kvelastic.tier_list import TierSpec
from kvelastic.tiers.base import Store
from kvelastic.tiers.hash_cache import HashCache, default_folder
from kvelastic.tiers.manager import Tiers
from kvelastic.tiers.namespace import Namespace
from kvelastic.tiers.policy import Copies, Rules, WritePolicy
from kvelastic.tiers.publisher import show
from kvelastic.tiers.stores.identified import IdentifiedStore
from kvelastic.tiers.stores.peer.store import PeerStore
from kvelastic.tiers.weights_fingerprint import CancelledError, WeightFiles
from kvelastic.units import format_size


def open_tiers(
    pool: ElasticPool,
    settings: Config,
    namespace: Namespace,
    *,
    weights: WeightFiles | None = None,
    peer: PeerStore | None = None,
) -> Tiers | None:
    """Open the tiers that `KVELASTIC_TIERS` names, nearest first. None if it names none.

    `peer`, if any, becomes the farthest tier; it is closed if this raises.

    The record size of `namespace` is replaced by the pool's. The host tier's instance is named
    after the pool, with the suffix `_tier`. The contents of `weights` become part of the namespace
    of stores that outlive this process. They are hashed in the background, and these stores are
    unused until that is done.

    Close the tiers before the pool. Blocks while the stores open. If a store cannot be opened,
    closes the others and raises its error.
    """
    specs = _useful(settings.tiers, is_on_host=pool.is_on_host)
    if not specs and peer is None:
        return None
    record_bytes = pool.blocks.record_bytes
    namespace = replace(namespace, record_bytes=record_bytes)
    staging = _vmm.Staging(staging_slots(settings, record_bytes), record_bytes)
    stores: list[Store] = []
    try:
        for spec in specs:
            store = _open_store(spec, settings, namespace, pool.name)
            outlives = weights is not None and spec.kind != "host"
            stores.append(IdentifiedStore(store) if outlives else store)
        stores += [] if peer is None else [peer]
        tiers = Tiers(pool.blocks, staging, namespace, stores, rules_of(settings))
    except BaseException:
        for store in dict.fromkeys([*stores, *([] if peer is None else [peer])]):
            store.close()
        raise
    identified = [store for store in stores if isinstance(store, (IdentifiedStore, PeerStore))]
    if weights is not None and identified:
        identification = Identification(weights, identified, HashCache(default_folder()))
        tiers.attach(identification.close)
        identification.begin()
    show(tiers, pool.segment.control_block.read_header()["uuid"])
    return tiers


def _useful(specs: Sequence[TierSpec], *, is_on_host: bool) -> list[TierSpec]:
    """Return the tiers without the host tier, if the cache itself is in host memory."""
    if not is_on_host or not any(spec.kind == "host" for spec in specs):
        return list(specs)
    log_once(
        logging.INFO,
        "KVELASTIC_TIERS: the cache lies in host memory, so a host tier would be a second copy of"
        " it in the same memory; blocks are only staged there on their way to the next tier.",
    )
    return [spec for spec in specs if spec.kind != "host"]


def _open_store(spec: TierSpec, settings: Config, namespace: Namespace, name: str) -> Store:
    # Import late, so that one kind of tier does not need the dependencies of another.
    record_bytes = namespace.record_bytes
    limit_bytes = spec.limit_bytes or 0  # a host or disk tier has one
    if spec.kind == "host":
        from kvelastic.tiers.stores.host.store import HostStore

        own_name = f"{name}_tier"[:64]
        return HostStore(
            record_bytes, limit_bytes, settings=settings, name=own_name, model=namespace.model
        )
    if spec.kind == "disk":
        from kvelastic.tiers.stores.disk.store import DiskStore

        return DiskStore(
            spec.folders,
            record_bytes,
            limit_bytes,
            namespace,
            daily_write_bytes=settings.tier_daily_write,
        )
    if spec.kind == "folder":
        from kvelastic.tiers.stores.folder.store import FolderStore

        return FolderStore(spec.folders[0], record_bytes, namespace, limit_bytes=spec.limit_bytes)
    from kvelastic.tiers.stores.mooncake.store import MooncakeStore

    return MooncakeStore(spec.address, record_bytes, segment_bytes=limit_bytes)


def rules_of(settings: Config) -> Rules:
    """Return the rules of a configuration, whose values are already validated."""
    return Rules(
        policy=WritePolicy(settings.tier_policy),
        copies=Copies(settings.tier_copies),
        reclaim_s=settings.tier_reclaim_s,
        limit_s=settings.tier_limit_s,
        sleep_s=settings.tier_sleep_s,
        watermark=settings.tier_watermark / 100,
        idle_after_s=math.inf if settings.tier_idle_s is None else settings.tier_idle_s,
        cache_idle_s=math.inf if settings.cache_idle_s is None else settings.cache_idle_s,
        write_bytes_per_s=settings.tier_write_rate,
    )


def staging_slots(settings: Config, record_bytes: int) -> int:
    """Return the number of staging slots: at least four, so that operations can overlap."""
    return max(4, settings.tier_staging // record_bytes)


_log = logging.getLogger("kvelastic")

_CLOSE_S: Final = 5.0
_LOWEST_PRIORITY: Final = 19


class Identification:
    """Hashes the weights in the background and gives the fingerprint to the stores.

    Attached to the tiers, which close it first.
    """

    def __init__(
        self,
        weights: WeightFiles,
        stores: Sequence[IdentifiedStore | PeerStore],
        cache: HashCache,
    ) -> None:
        self._weights = weights
        self._stores = tuple(stores)
        self._cache = cache
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvelastic-hash", daemon=True)

    def begin(self) -> None:
        """Identify the stores, now if all digests are cached, otherwise in the background."""
        try:
            known = self._weights.known(self._cache)
        except OSError as error:
            self._give_up(error)
            return
        if known is not None:
            self._identify(known)
            return
        _log.info(
            "The weights at %s (%s) are hashed once, which takes about a second for each GiB. Until"
            " then these tiers are not used: %s.",
            self._weights.path,
            format_size(self._weights.size_bytes),
            self._names,
        )
        self._thread.start()

    def close(self) -> None:
        """Stop hashing. Digests of completely read files stay cached. Idempotent.

        Blocks until the thread has ended, for at most 5 s, since a file read may hang.
        """
        self._is_closing.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_S)

    @property
    def _names(self) -> str:
        return ", ".join(store.name for store in self._stores)

    def _run(self) -> None:
        with suppress(OSError):  # lowers the priority of this thread only
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
        began_s = time.monotonic()
        try:
            found = self._weights.fingerprint(self._cache, self._is_closing.is_set)
        except CancelledError:
            return
        except OSError as error:
            self._give_up(error)
            return
        self._identify(found)
        _log.info(
            "The weights at %s are hashed (%.1f s): these tiers are used now: %s.",
            self._weights.path,
            time.monotonic() - began_s,
            self._names,
        )

    def _give_up(self, error: OSError) -> None:
        _log.warning(
            "Which weights this engine has cannot be known: %s. Until it is started again, these"
            " tiers hold blocks of this process alone, and no other finds them: %s.",
            error,
            self._names,
        )
        self._identify(f"unknown {secrets.token_hex(16)}")

    def _identify(self, fingerprint: str) -> None:
        if self._is_closing.is_set():
            return
        for store in self._stores:
            store.identify(fingerprint)
