"""Stores as the settings name them, and the tiers of a pool over these.

tiers = open_tiers(pool, settings, namespace)      # None: KVELASTIC_TIERS names none
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Final

from kvelastic import _vmm
from kvelastic.config import Config
from kvelastic.logs import say_once
from kvelastic.pool import ElasticPool
from kvelastic.tier_list import TierSpec
from kvelastic.tiers.base import Store
from kvelastic.tiers.manager import Tiers
from kvelastic.tiers.namespace import Namespace
from kvelastic.tiers.settings import TierSettings

_STORES: Final = {
    "host": ("kvelastic.tiers.host", "HostStore"),
    "disk": ("kvelastic.tiers.disk", "DiskStore"),
    "folder": ("kvelastic.tiers.folder", "FolderStore"),
    "mooncake": ("kvelastic.tiers.remote", "MooncakeStore"),
}


def open_tiers(
    pool: ElasticPool,
    settings: Config,
    namespace: Namespace,
    staging: _vmm.Staging | None = None,
    *,
    name: str | None = None,
) -> Tiers | None:
    """Open what `KVELASTIC_TIERS` names, nearest first; None where it names nothing.

    `namespace` gets the pool's record size. `staging` is made as large as the settings say, unless
    it is given; `name` is that of the instance of a host tier. Close the tiers before the pool.
    Blocks as long as stores need to open. Raises what a store raises that cannot be opened;
    nothing is left open then.
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
            stores.append(_open_store(spec, settings, asked, namespace, name or pool.name))  # noqa: PERF401
        tiers = Tiers(pool.blocks, staging, namespace, stores, asked.rules)
    except BaseException:
        for store in stores:
            store.close()
        raise
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
    record_bytes = namespace.record_bytes
    module, class_name = _STORES[spec.kind]
    # Late: what one kind needs is not imported for another.
    make: Callable[..., Store] = getattr(import_module(module), class_name)
    if spec.kind == "host":
        own_name = f"{name}_tier"[:64]
        return make(
            record_bytes, spec.limit_bytes, settings=settings, name=own_name, model=namespace.model
        )
    if spec.kind == "disk":
        daily = asked.daily_write_bytes
        return make(
            spec.folders, record_bytes, spec.limit_bytes, namespace, daily_write_bytes=daily
        )
    if spec.kind == "folder":
        return make(spec.folders[0], record_bytes, spec.limit_bytes, namespace)
    return make(spec.address, record_bytes, namespace)
