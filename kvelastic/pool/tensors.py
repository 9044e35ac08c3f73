"""Creates tensors over a range. The only module of the core that imports torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvelastic.errors import InvalidArgumentError

_DEFAULT_STREAM: Final = 0

if TYPE_CHECKING:
    import torch

    from kvelastic import _vmm
    from kvelastic.pool.tensor_views import TensorView


def itemsize_of(dtype: torch.dtype) -> int:
    """Return the bytes per element. Raises `InvalidArgumentError` unless it is a torch dtype."""
    import torch

    if not isinstance(dtype, torch.dtype):
        raise InvalidArgumentError(
            f"dtype={dtype!r} is not accepted; it must be a torch dtype such as torch.bfloat16"
        )
    return int(dtype.itemsize)


def whole_range(memory: _vmm.Range) -> torch.Tensor:
    """Return a range as a flat int8 tensor, without a copy; unmapped pages fault (SIGSEGV)."""
    import torch

    return torch.from_dlpack(memory.tensor())


def name_streams(driver: _vmm.Driver) -> None:
    """Set the streams of a GPU's driver to those of PyTorch, unless streams are already set.

    They are this thread's current stream and the default stream. Has no effect on the host.
    """
    import torch

    from kvelastic import _vmm

    if not isinstance(driver, _vmm.CudaDriver) or driver.knows_streams:
        return
    streams = {_DEFAULT_STREAM}
    if torch.cuda.is_available():
        streams.add(int(torch.cuda.current_stream(driver.ordinal).cuda_stream))
    driver.use_streams(sorted(streams))


def view_of(flat: torch.Tensor, view: TensorView, dtype: torch.dtype) -> torch.Tensor:
    """Return one view of a range; it shares the memory and keeps the range reserved."""
    return flat.view(dtype).as_strided(view.shape, view.strides, view.offset_bytes // view.itemsize)
