"""Our spec of vLLM's OffloadingConnector: it finds blocks in the tiers and stores none.

Cached blocks are demoted below vLLM, where limits act (`kvelastic.tiers`), so this spec never
stores. It uses the connector for lookups, waiting requests, groups, windows and metrics. The
tiers' threads in the engine core and native threads in the workers move the bytes (`in_tiers`), so
the spec's worker part is empty.

Imports vLLM. vLLM imports it by the name in the connector's configuration (`connector_settings`).
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
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
from kvelastic.integration.vllm.tier_lookups import Chains, Lookups
from kvelastic.tiers.load import Load


class RecordsInTiers(LoadStoreSpec):  # type: ignore[misc]  # vLLM has no type information here
    """The records of one load, held. None: no records, as for every store."""

    def __init__(self, load: Load | None = None, count: int = 0) -> None:
        self.load = load
        self.count = count
        """How many blocks vLLM has found."""


class TierLookups(OffloadingManager):  # type: ignore[misc]
    """Looks up vLLM's blocks in the tiers."""

    def __init__(self, lookups: Lookups) -> None:
        self.lookups = lookups
        self._chains: dict[str, Chains] = {}

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        """Look up a block. A hit is held until the step or its load ends."""
        positions = req_context._offload_key_positions
        chains = self._chains.get(req_context.req_id)
        if chains is None or chains.positions is not positions:
            chains = self._chains[req_context.req_id] = Chains(positions)
        found = self.lookups.find(req_context.req_id, key, partial(chains.of, key))
        return LookupResult.HIT if found else LookupResult.MISS

    def prepare_load(self, keys: Collection[bytes], req_context: Any) -> RecordsInTiers:
        """Transfer the records that the request has found to its load."""
        wanted = list(keys)
        return RecordsInTiers(self.lookups.take(req_context.req_id, wanted), len(wanted))

    def prepare_store(self, keys: Collection[bytes], req_context: Any) -> PrepareStoreOutput:
        """Store no block. None would mean "not now", and vLLM would ask again in every step."""
        return PrepareStoreOutput([], RecordsInTiers(), [])

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        """Return an empty context: a request without lookups has no state."""
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        """Drop the request's lookups."""
        self._chains.pop(req_context.req_id, None)
        self.lookups.forget(req_context.req_id)

    def on_schedule_end(self, context: Any) -> None:
        """Release records that were found but not loaded."""
        self.lookups.end_step()

    def reset_cache(self) -> None:
        """Release this step's records; the scheduler's reset handles the tiers (`in_tiers`)."""
        self.lookups.end_step()


class NoCopies(OffloadingWorker):  # type: ignore[misc]
    """The worker's part: empty, because native threads copy and the scheduler reports to vLLM."""

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Raise: this spec stores nothing."""
        raise EngineError(_NOT_HERE)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Raise: load jobs are removed from the step before the workers see it."""
        raise EngineError(_NOT_HERE)

    def get_finished(self) -> list[Any]:
        """Return no jobs."""
        return []

    def wait(self, job_ids: set[int]) -> None:
        """Return at once: no job runs here."""


_NOT_HERE = "a worker received a KV load or store job of the scheduler; please report this"


class TierSpec(OffloadingSpec):  # type: ignore[misc]
    """The spec that `kv_connector_extra_config` names as spec_name."""

    def __init__(self, config: Any) -> None:
        """Called in the engine core and in every worker."""
        super().__init__(config)
        self._manager: TierLookups | None = None

    def get_manager(self) -> TierLookups:
        """Return the lookups; called in the engine core. Raises `EngineError` without tiers."""
        if self._manager is None:
            self._manager = TierLookups(in_tiers.lookups_of_this_engine())
        return self._manager

    def get_worker(self, kv_caches: Any) -> NoCopies:
        """Return the empty worker part."""
        return NoCopies()
