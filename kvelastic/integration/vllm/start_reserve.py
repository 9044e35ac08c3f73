"""Reserves GPU memory for a starting engine before vLLM loads its weights.

The instance exists only once vLLM knows the size of its cache, long after the weights were loaded.
By then a neighbour's cache may fill the device. So each worker joins the device's ledger as a
separate member. It reserves the memory of its start until the instance reserves what was measured.

    joined = claim(worker)       # before load_model; others give memory, for up to five seconds
    ...
    joined.close()               # the instance takes over
"""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from kvelastic import config
from kvelastic.integration.vllm import worker_device
from kvelastic.pool.step_reserve import first_step_bytes
from kvelastic.shared import ledger
from kvelastic.units import format_size

_log = logging.getLogger("kvelastic.vllm")

_PATTERNS: Final = ("*.safetensors", "*.bin", "*.pt")
"""Weight files. The first pattern that matches in a folder is used."""


def claim(worker: Any) -> ledger.JoinedLedger | None:
    """Reserve the memory of this worker's start. Returns None on the host or with a reserve of 0.

    Blocks up to five seconds while others give memory. Raises `GuaranteeError` or `ReserveError`
    with the holders if there is no room, instead of running out of memory minutes later.
    """
    facts = worker_device.of_worker(worker).facts
    settings = config.load()
    if not facts.is_gpu or settings.reserve == 0:
        return None
    parallel = worker.vllm_config.parallel_config
    ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
    start_bytes = expected_bytes(
        weights_bytes(str(worker.vllm_config.model_config.model)),
        ranks,
        facts.total_bytes,
        held_elsewhere_bytes(worker),
    )
    if settings.reserve is not None:
        start_bytes = settings.reserve // ranks
    joined = ledger.join(
        facts.name,
        group=settings.ledger,
        capacity_bytes=int(facts.total_bytes * settings.gpu_utilization),
        name=name(),
        uuid=uuid.uuid4().bytes,
        reserve_bytes=start_bytes,
        priority=settings.priority,
    )
    _log.info("Reserved %s of %s for the start.", format_size(start_bytes), facts.name)
    return joined


def name() -> str:
    """Return the name of this process's ledger membership."""
    return f"starting_{os.getpid()}"


def expected_bytes(
    all_weights_bytes: int, ranks: int, total_bytes: int, elsewhere_bytes: int = 0
) -> int:
    """Return the GPU bytes that a worker needs to load its weights and run a first step.

    `elsewhere_bytes` of this worker's weights are in another process, which stays.
    """
    own_weights_bytes = max(0, all_weights_bytes // ranks - elsewhere_bytes)
    return min(own_weights_bytes + first_step_bytes(total_bytes), total_bytes)


def held_elsewhere_bytes(worker: Any) -> int:
    """Return the bytes of weights that this worker will map from vLLM's weight-cache daemon.

    The daemon (`vllm preload`) is no member of the ledger: its memory counts as used by other
    processes. To reserve it again would take as much from the other instances. Blocks for a
    query of the daemon.
    """
    from vllm.model_executor.model_loader import get_model_loader

    loader = get_model_loader(worker.vllm_config.load_config)
    return int(loader.get_external_weight_memory(worker.vllm_config))


def weights_bytes(model: str) -> int:
    """Return the size of a model's weight files, in a folder or the cache; 0 if unknown."""
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
                "The size of the weights of %s is unknown before they load: %s", model, error
            )
            return 0
    for pattern in _PATTERNS:
        found = _sizes(folder.glob(pattern))
        if found:
            return found
    return 0


def _sizes(files: Iterable[Path]) -> int:
    return sum(file.stat().st_size for file in files)
