"""What is refused of a start of vLLM before a worker is started or weights are loaded.

Asked by the front end, before it starts the engine core; and by the engine core, which may have no
front end. Imports no vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvelastic import config
from kvelastic.device import AUTO
from kvelastic.errors import ConfigError
from kvelastic.integration.vllm import tier_refusals
from kvelastic.integration.vllm.refusals import refuse_configuration
from kvelastic.integration.vllm.with_starter import grace_s
from kvelastic.start_checks import check_guarantee, check_names

_NOTICED_S = 5.0
"""How long an engine core may take, beside its grace, until it is gone."""


def check_start(vllm_config: Any, ranks: Sequence[int]) -> None:
    """Raise what the engine cores of these data parallel ranks would raise, some only much later.

    `UnsupportedEngineError` for settings of vLLM that are not covered, `ConfigError` for another
    device than vLLM's, `SegmentExistsError` for a name that is taken, `GuaranteeError` for a
    guarantee that does not fit, and what `ledger.join` raises. May block for some seconds, while an
    engine core whose front end was killed ends.
    """
    settings = config.load()
    refuse_configuration(vllm_config)
    if settings.tiers:
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
    """Raise `ConfigError` if `KVELASTIC_DEVICE` is not what vLLM computes on."""
    if settings.device != AUTO and settings.device.startswith("cuda") != on_gpu:
        raise ConfigError(
            f"KVELASTIC_DEVICE={settings.device!r} does not fit vLLM on "
            f"{'GPUs' if on_gpu else 'the CPU'}: set it to auto, or leave it unset."
        )


def instance_name(settings: config.Config, rank: int) -> str | None:
    """What the instance is called; None: made up.

    The ranks of a dense model's data parallel are engines of their own, told apart by number.
    """
    return f"{settings.ipc_name}_dp{rank}" if settings.ipc_name and rank else settings.ipc_name
