"""Room on a GPU for an engine that starts: asked for before vLLM loads its weights.

The instance exists only when vLLM knows how large its cache is, long after the weights were loaded.
By then a neighbour's cache may have the whole device. So each worker reserves what its start takes,
as a member of the device's ledger of its own, until the instance reserves what was measured.

    place = claim(worker)       # before load_model; others give, five seconds at most
    ...
    place.close()               # the instance takes over
"""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from kvelastic import config, ledger
from kvelastic.integration.vllm import worker_device
from kvelastic.sizes import format_size
from kvelastic.step_reserve import first_step_bytes

_log = logging.getLogger("kvelastic.vllm")

_PATTERNS: Final = ("*.safetensors", "*.bin", "*.pt")
"""Files of weights; of the first kind that a folder has."""


def claim(worker: Any) -> ledger.JoinedLedger | None:
    """Reserve what this worker's start takes; None on the host, or where a reserve of 0 is set.

    Blocks while others give, five seconds at most. Raises `GuaranteeError` and `ReserveError`,
    which name who holds what, if there is no room: better now than out of memory minutes later.
    """
    facts = worker_device.of_worker(worker).facts
    settings = config.load()
    if not facts.is_gpu or settings.reserve == 0:
        return None
    parallel = worker.vllm_config.parallel_config
    ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
    start_bytes = expected_bytes(
        weights_bytes(str(worker.vllm_config.model_config.model)), ranks, facts.total_bytes
    )
    if settings.reserve is not None:
        start_bytes = settings.reserve // ranks
    place = ledger.join(
        facts.name,
        group=settings.ledger,
        capacity_bytes=int(facts.total_bytes * settings.gpu_utilization),
        name=name(),
        uuid=uuid.uuid4().bytes,
        reserve_bytes=start_bytes,
        priority=settings.priority,
    )
    _log.info("%s of %s are reserved for the start.", format_size(start_bytes), facts.name)
    return place


def name() -> str:
    """What the ledger calls this process's place."""
    return f"starting_{os.getpid()}"


def expected_bytes(all_weights_bytes: int, ranks: int, total_bytes: int) -> int:
    """What a worker takes of its GPU to load its part of the weights and run a first step."""
    return min(all_weights_bytes // ranks + first_step_bytes(total_bytes), total_bytes)


def weights_bytes(model: str) -> int:
    """The size of a model's files of weights: a folder's, or the cache's; 0: not known here."""
    folder = Path(model)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import (
            HfHubHTTPError,
            HFValidationError,
            LocalEntryNotFoundError,
        )

        try:
            folder = Path(snapshot_download(model, local_files_only=True))
        except (LocalEntryNotFoundError, HFValidationError, HfHubHTTPError, OSError) as error:
            _log.debug(
                "How large the weights of %s are is not known before they load: %s", model, error
            )
            return 0
    for pattern in _PATTERNS:
        found = _sizes(folder.glob(pattern))
        if found:
            return found
    return 0


def _sizes(files: Iterable[Path]) -> int:
    return sum(file.stat().st_size for file in files)
