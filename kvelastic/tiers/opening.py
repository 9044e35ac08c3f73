"""Stores as the settings name them, and the tiers of a pool over these.

tiers = open_tiers(pool, settings, namespace)      # None: KVELASTIC_TIERS names none
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from kvelastic import _vmm
from kvelastic.config import Config
from kvelastic.logs import say_once
from kvelastic.pool import ElasticPool
from kvelastic.tier_list import TierSpec
from kvelastic.tiers.base import Store
from kvelastic.tiers.hash_cache import HashCache, default_folder
from kvelastic.tiers.identification import Identification
from kvelastic.tiers.identified import IdentifiedStore
from kvelastic.tiers.manager import Tiers
from kvelastic.tiers.namespace import Namespace
from kvelastic.tiers.publisher import show
from kvelastic.tiers.settings import TierSettings
from kvelastic.tiers.weights_fingerprint import WeightFiles


def open_tiers(
    pool: ElasticPool,
    settings: Config,
    namespace: Namespace,
    staging: _vmm.Staging | None = None,
    *,
    name: str | None = None,
    weights: WeightFiles | None = None,
) -> Tiers | None:
    """Open what `KVELASTIC_TIERS` names, nearest first; None where it names nothing.

    `namespace` gets the pool's record size. `staging` is made as large as the settings say, unless
    it is given; `name` is that of the instance of a host tier. `weights` are the files whose
    contents are part of the namespace of stores that outlive this process. They are hashed in the
    background, and these stores are not used until that is done. Close the tiers before the pool.
    Blocks as long as stores need to open. Raises what a store raises that cannot be opened; nothing
    is left open then.
    """
    asked = TierSettings.of(settings)
    specs = _useful(asked.tiers, is_on_host=pool.is_on_host)
    if not specs:
        return None
    record_bytes = pool.blocks.record_bytes
    namespace = replace(namespace, record_bytes=record_bytes)
    if staging is None:
        staging = _vmm.Staging(asked.staging_slots(record_bytes), record_bytes)
    stores: list[Store] = []
    try:
        for spec in specs:
            store = _open_store(spec, settings, asked, namespace, name or pool.name)
            outlives = weights is not None and spec.kind != "host"
            stores.append(IdentifiedStore(store) if outlives else store)
        tiers = Tiers(pool.blocks, staging, namespace, stores, asked.rules)
    except BaseException:
        for store in stores:
            store.close()
        raise
    identified = [store for store in stores if isinstance(store, IdentifiedStore)]
    if weights is not None and identified:
        identification = Identification(weights, identified, HashCache(default_folder()))
        tiers.attach(identification)
        identification.begin()
    show(tiers, pool.segment.record.read_header()["uuid"])
    return tiers


def _useful(specs: Sequence[TierSpec], *, is_on_host: bool) -> list[TierSpec]:
    """Without a host tier where the cache lies in host memory itself."""
    if not is_on_host or not any(spec.kind == "host" for spec in specs):
        return list(specs)
    say_once(
        logging.INFO,
        "KVELASTIC_TIERS: the cache lies in host memory, so a host tier would be a second copy of"
        " it in the same memory; blocks are only staged there on their way to the next tier.",
    )
    return [spec for spec in specs if spec.kind != "host"]


def _open_store(
    spec: TierSpec, settings: Config, asked: TierSettings, namespace: Namespace, name: str
) -> Store:
    # Late, each in its branch: what one kind needs is not imported for another.
    record_bytes, limit_bytes = namespace.record_bytes, spec.limit_bytes
    if spec.kind == "host":
        from kvelastic.tiers.host import HostStore

        assert limit_bytes is not None
        own_name = f"{name}_tier"[:64]
        return HostStore(
            record_bytes, limit_bytes, settings=settings, name=own_name, model=namespace.model
        )
    if spec.kind == "disk":
        from kvelastic.tiers.disk import DiskStore

        assert limit_bytes is not None
        return DiskStore(
            spec.folders,
            record_bytes,
            limit_bytes,
            namespace,
            daily_write_bytes=asked.daily_write_bytes,
        )
    if spec.kind == "folder":
        from kvelastic.tiers.folder import FolderStore

        return FolderStore(spec.folders[0], record_bytes, namespace, limit_bytes=limit_bytes)
    from kvelastic.tiers.remote import MooncakeStore

    return MooncakeStore(spec.address, record_bytes, segment_bytes=limit_bytes or 0)
