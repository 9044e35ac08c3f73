"""Checks a start of vLLM before a worker starts or weights load.

The front end runs them before it starts the engine core. The engine core runs them too, because it
may have no front end. Imports no vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvelastic import config
from kvelastic.device.selection import AUTO
from kvelastic.errors import ConfigError
from kvelastic.integration.start_checks import check_guarantee, check_names
from kvelastic.integration.vllm import tier_refusals
from kvelastic.integration.vllm.end_with_starter import grace_s
from kvelastic.integration.vllm.refusals import refuse_configuration

_NOTICED_S = 5.0
"""How long an engine core may take to end, in addition to its grace period."""


def check_start(vllm_config: Any, ranks: Sequence[int]) -> None:
    """Raise early what the engine cores of data parallel `ranks` would raise later.

    Raises `UnsupportedEngineError` for unsupported settings, `ConfigError` if the device differs
    from vLLM's, `SegmentExistsError` for a name in use, `GuaranteeError` for a guarantee that does
    not fit, and what `ledger.join` raises. May block for seconds while an engine core whose front
    end was killed ends.
    """
    settings = config.load()
    refuse_configuration(vllm_config)
    if settings.has_tiers:
        tier_refusals.refuse_for_tiers(vllm_config)
    else:
        tier_refusals.refuse_without_tiers(vllm_config)
    on_gpu = vllm_config.device_config.device_type != "cpu"
    check_device(settings, on_gpu=on_gpu)
    check_names(
        [instance_name(settings, rank) for rank in ranks], ending_s=grace_s(settings) + _NOTICED_S
    )
    if not on_gpu:
        check_guarantee(settings, instances=len(ranks))


def check_device(settings: config.Config, *, on_gpu: bool) -> None:
    """Raise `ConfigError` if `KVELASTIC_DEVICE` is not the device that vLLM uses."""
    if settings.device != AUTO and settings.device.startswith("cuda") != on_gpu:
        raise ConfigError(
            f"KVELASTIC_DEVICE={settings.device!r} does not fit vLLM on "
            f"{'GPUs' if on_gpu else 'the CPU'}: set it to auto, or leave it unset."
        )


def instance_name(settings: config.Config, rank: int) -> str | None:
    """Return the instance's name, or None: then one is generated.

    With data parallelism, the ranks of a dense model are separate engines, numbered by rank.
    """
    return f"{settings.ipc_name}_dp{rank}" if settings.ipc_name and rank else settings.ipc_name
