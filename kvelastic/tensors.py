"""From a range to an engine's tensors: the only place of the core that imports torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvelastic.errors import InvalidArgumentError

if TYPE_CHECKING:
    import torch

    from kvelastic import _vmm
    from kvelastic.views import TensorView


def itemsize_of(dtype: torch.dtype) -> int:
    """Bytes an element. Raises `InvalidArgumentError` unless it is a torch dtype."""
    import torch

    if not isinstance(dtype, torch.dtype):
        raise InvalidArgumentError(
            f"dtype={dtype!r} is not accepted; it must be a torch dtype such as torch.bfloat16"
        )
    return int(dtype.itemsize)


def whole_range(memory: _vmm.Range) -> torch.Tensor:
    """All of a range as flat int8, no copy; touching what is not mapped faults (SIGSEGV)."""
    import torch

    return torch.from_dlpack(memory.tensor())


def view_of(flat: torch.Tensor, view: TensorView, dtype: torch.dtype) -> torch.Tensor:
    """One view of a range; shares its memory and keeps it reserved."""
    return flat.view(dtype).as_strided(view.shape, view.strides, view.offset_bytes // view.itemsize)
