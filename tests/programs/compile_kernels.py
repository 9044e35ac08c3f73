"""Compiles the Triton kernels of benchmarks/gpu for an H100, on a machine that has none.

Prints as JSON, by kernel, what its assembly has of each memory and matrix instruction.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.append(str(Path(sys.prefix) / "triton"))

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from benchmarks.gpu.kernels import triton_kernels as kernels

H100 = GPUTarget("cuda", 90, 32)
INTERESTING = re.compile(r"(?:cp\.async|ld\.global|st\.global|mma\.sync|wgmma)[.\w:]*")
CACHE = dict.fromkeys(("keys", "values", "query", "new_keys", "new_values", "answer"), "*bf16")
INDICES = dict.fromkeys(("table", "lengths"), "*i32")
REST = {"partial": "*fp32", "partial_lse": "*fp32", "scale": "fp32"}
CONSTANTS: dict[str, dict[str, Any]] = {
    "attend_splits": {
        "GROUP": 4, "ROWS": 16, "TOKENS": 16, "DIM": 128, "TILE": 64, "READ_AHEAD": False,
    },
    "merge_splits": {"DIM": 128, "MOST_SPLITS": 16},
    "store_tokens": {"TOKENS": 16, "DIM": 128},
}  # fmt: skip
SIXTEENS = (*CACHE, "block_step", "token_step", "head_step", "table_columns")
"""Arguments that are multiples of 16, as Triton finds out at a launch."""


def compiled(name: str) -> dict[str, int]:
    kernel = getattr(kernels, name)
    arguments, constants = kernel.arg_names, CONSTANTS[name]
    types = CACHE | INDICES | REST | dict.fromkeys(constants, "constexpr")
    made = triton.compile(
        ASTSource(
            fn=kernel,
            signature={each: types.get(each, "i32") for each in arguments},
            constexprs={(arguments.index(each),): value for each, value in constants.items()},
            attrs={
                (place,): [["tt.divisibility", 16]]
                for place, each in enumerate(arguments)
                if each in SIXTEENS
            },
        ),
        target=H100,
    )
    assert made.asm["cubin"]
    return Counter(INTERESTING.findall(made.asm["ptx"]))


if __name__ == "__main__":
    print(json.dumps({name: compiled(name) for name in CONSTANTS}))
