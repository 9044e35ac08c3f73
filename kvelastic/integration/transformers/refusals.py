"""What the transformers integration does not cover yet, refused before a cache is made."""

from __future__ import annotations

from typing import Any, Final

from kvelastic.errors import UnsupportedEngineError

_DEVICES: Final = ("cpu", "cuda")


def refuse_configuration(cb_config: Any, device: Any, distributed_helper: Any) -> None:
    """Raise `UnsupportedEngineError` naming every setting that is not covered.

    `cb_config` is the resolved `ContinuousBatchingConfig`, `device` a torch device.
    """
    found: list[str] = []
    if device.type not in _DEVICES:
        found.append(f"the device {device.type!r}: {' and '.join(_DEVICES)} are covered")
    if distributed_helper.tp_size > 1:
        found.append(
            f"tensor parallelism over {distributed_helper.tp_size} processes: each of them"
            " schedules for itself, and a limit would reach them at different steps"
        )
    if cb_config.use_async_batching:
        found.append(
            "use_async_batching=True: a batch is prepared while the one before it still computes."
            " Leave it unset, or set it to False"
        )
    if not found:
        return
    raise UnsupportedEngineError(
        "kvelastic does not cover what this continuous batching was set up with:\n"
        + "\n".join(f"  - {line}" for line in found)
        + "\nUnset ENABLE_KVELASTIC to run this without kvelastic."
    )
