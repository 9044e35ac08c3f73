"""Our spec of vLLM's OffloadingConnector: blocks are found in the tiers, and stored by none of it.

What is cached is demoted below vLLM, where limits act (`kvelastic.tiers`), so this spec never
stores. What vLLM keeps of its connector are lookups, the request's waiting for its load, groups,
windows and metrics. The bytes are moved by the tiers' threads in the engine core and by the native
threads of the workers (`in_tiers`), so the part in the workers has nothing to do.

Imports vLLM: named by the connector's configuration (`tier_connector`), imported by vLLM.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    LookupResult,
    OffloadingManager,
    OffloadingSpec,
    OffloadingWorker,
    PrepareStoreOutput,
    RequestOffloadingContext,
)

from kvelastic.errors import EngineError
from kvelastic.integration.vllm import in_tiers
from kvelastic.integration.vllm.tier_lookups import Chain, Found, Lookups

_GROUP_BYTES = 4


class RecordsInTiers(LoadStoreSpec):  # type: ignore[misc]  # vLLM has no type information here
    """What one load reads, held. None: nothing, which is what every store is given."""

    def __init__(self, match: Found | None = None, count: int = 0) -> None:
        self.match = match
        self.count = count
        """How many blocks vLLM has found."""


class TierLookups(OffloadingManager):  # type: ignore[misc]
    """vLLM's questions about blocks, answered from the tiers."""

    def __init__(self, lookups: Lookups) -> None:
        self.lookups = lookups

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        """A hit is held until the step ends, or its load does."""

        def chain() -> Chain:
            return _chain(key, req_context._offload_key_positions)

        found = self.lookups.find(req_context.req_id, key, chain)
        return LookupResult.HIT if found else LookupResult.MISS

    def prepare_load(self, keys: Collection[bytes], req_context: Any) -> RecordsInTiers:
        """What the request has found is its load's from here on."""
        wanted = list(keys)
        return RecordsInTiers(self.lookups.take(req_context.req_id, wanted), len(wanted))

    def prepare_store(self, keys: Collection[bytes], req_context: Any) -> PrepareStoreOutput:
        """Nothing is to be stored. None would mean "not now", and be asked again every step."""
        return PrepareStoreOutput([], RecordsInTiers(), [])

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        """Nothing is kept for a request that has asked nothing."""
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        """Forget what it had asked for."""
        self.lookups.forget(req_context.req_id)

    def on_schedule_end(self, context: Any) -> None:
        """What was found and is not loaded is let go."""
        self.lookups.end_step()

    def reset_cache(self) -> None:
        """What a reset means for the tiers, the scheduler's own reset says (`in_tiers`)."""
        self.lookups.end_step()


def _chain(key: bytes, positions: Mapping[bytes, int]) -> Chain:
    """The blocks of `key`'s group from it on, and the one before; positions are where each ends."""
    first = positions.get(key)
    if first is None:
        return Chain(None, [key])
    group = key[-_GROUP_BYTES:]
    before: bytes | None = None
    following = [key]
    for each, position in positions.items():
        if each[-_GROUP_BYTES:] != group:
            continue
        if position > first:
            following.append(each)
        elif position < first:
            before = each
    return Chain(before, following)


class NoCopies(OffloadingWorker):  # type: ignore[misc]
    """The part in a worker: native threads copy there, and vLLM is told by the scheduler."""

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Never asked: nothing is stored."""
        raise EngineError(_NOT_HERE)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Never asked: jobs are taken out of the step before the workers see it."""
        raise EngineError(_NOT_HERE)

    def get_finished(self) -> list[Any]:
        """Nothing ends here."""
        return []

    def wait(self, job_ids: set[int]) -> None:
        """Nothing is on its way here."""


_NOT_HERE = "a worker was asked to move KV that the scheduler moves; please report this"


class TierSpec(OffloadingSpec):  # type: ignore[misc]
    """Named by `kv_connector_extra_config` as spec_name."""

    def __init__(self, config: Any) -> None:
        """In the engine core and in every worker."""
        super().__init__(config)
        self._manager: TierLookups | None = None

    def get_manager(self) -> TierLookups:
        """In the engine core. Raises `EngineError` where it has no tiers."""
        if self._manager is None:
            self._manager = TierLookups(in_tiers.lookups_of_this_engine())
        return self._manager

    def get_worker(self, kv_caches: Any) -> NoCopies:
        """In a worker."""
        return NoCopies()
