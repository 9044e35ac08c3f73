"""Triton and torch take a tensor whose base is not mapped, as a layer's view of a range may be."""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl

from benchmarks.gpu.findings import Findings
from benchmarks.vmm import own_pages
from benchmarks.vmm.models import LLAMA_3_8B
from kvelastic import _vmm
from kvelastic.pool import tensors

COUNT = 1024


@triton.jit
def _copy_at(source, target, offset, count: tl.constexpr):
    index = tl.arange(0, count)
    tl.store(target + index, tl.load(source + offset + index))


def main() -> None:
    with Findings.of_command(__doc__) as found:
        driver = _vmm.CudaDriver("cuda")
        tensors.name_streams(driver)
        memory = own_pages.reserve(driver, LLAMA_3_8B.paged(), 4)
        memory.map([1])
        flat = tensors.whole_range(memory)
        page_bytes = memory.geometry.page_bytes
        flat[page_bytes : page_bytes + COUNT].fill_(5)
        target = torch.zeros(COUNT, dtype=torch.int8, device=flat.device)
        found.check("torch writes behind an unmapped base", True)
        for name, view, offset in (
            ("a base that is mapped", flat[page_bytes:], 0),
            ("a base that is not mapped", flat, page_bytes),
            ("an unmapped base within the range", flat[page_bytes // 2 :], page_bytes // 2),
        ):
            target.zero_()
            try:
                _copy_at[(1,)](view, target, offset, COUNT)
                torch.cuda.synchronize()
                right = bool((target == 5).all())
                said = "" if right else "it read something else"
            except Exception as error:
                right, said = False, f"{type(error).__name__}: {error}"
            found.figure(name, said or "taken")
            if view.data_ptr() == memory.address + page_bytes:
                found.check(f"Triton takes {name}", right, said)
            else:
                found.line(f"Triton and {name}: {said or 'taken'}.")
    # Not by the way of destructors: the context may be lost.
    os._exit(0)


if __name__ == "__main__":
    main()
