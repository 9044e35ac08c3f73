"""Stand-in for vLLM's compiled CUDA kernels: only what a Llama on Triton attention needs.

Carried as `vllm/_C_stable_libtorch.py`.
"""

from __future__ import annotations

from typing import Any

import torch

_lib = torch.library.Library("_C", "FRAGMENT")
_lib.define("get_cuda_view_from_cpu_tensor(Tensor cpu_tensor) -> Tensor")

_TYPES = {
    torch.int8: "|i1",
    torch.uint8: "|u1",
    torch.int16: "<i2",
    torch.int32: "<i4",
    torch.int64: "<i8",
    torch.float16: "<f2",
    torch.float32: "<f4",
    torch.float64: "<f8",
    torch.bool: "|b1",
}


class _Pinned:
    """Pinned memory of the host as a tensor of the device sees it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.kept = tensor
        item = tensor.element_size()
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "typestr": _TYPES[tensor.dtype],
            "version": 3,
            "data": (tensor.data_ptr(), False),
            "strides": tuple(stride * item for stride in tensor.stride()),
        }


def _view(cpu_tensor: torch.Tensor) -> torch.Tensor:
    if cpu_tensor.numel() == 0:
        return torch.empty(cpu_tensor.shape, dtype=cpu_tensor.dtype, device="cuda")
    if not cpu_tensor.is_pinned():
        cpu_tensor = cpu_tensor.contiguous().pin_memory()
    return torch.as_tensor(_Pinned(cpu_tensor), device="cuda")


_lib.impl("get_cuda_view_from_cpu_tensor", _view, "CPU")

for _name in (
    "cutlass_scaled_mm_supports_fp8",
    "cutlass_scaled_mm_supports_block_fp8",
    "cutlass_group_gemm_supported",
    "cutlass_scaled_mm_supports_fp4",
    "cutlass_sparse_scaled_mm_supported",
):
    setattr(torch.ops._C, _name, lambda *_: False)


def _silu_and_mul(out: Any, x: Any) -> None:
    half = x.shape[-1] // 2
    out.copy_(torch.nn.functional.silu(x[..., :half]) * x[..., half:])


torch.ops._C.silu_and_mul = _silu_and_mul
