"""What stock vLLM 0.32 lacks to run DeepSeek-V4 on a CPU: the same for both sides of a comparison.

Its kernels compute on a CPU, but `KeyError: 'c1a'` ends the first request, and it counts on a
Triton for CPUs. Call `interpreted_triton.interpret_triton` first.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import count
from typing import Any

LARGEST = 0.3
"""Weight. vLLM's own random weights are so small, and so alike, that answers hardly differ."""


def mend() -> None:
    from vllm.model_executor.model_loader import dummy_loader, weight_utils
    from vllm.models.deepseek_v4.cpu import cpu_mla

    def no_plans(builder: Any, num_decode_tokens: int) -> dict[str, None]:
        return defaultdict(lambda: None)  # the CPU's has keys for three of five kinds of layers

    seeds = count()

    def make_weight(weight: Any) -> None:
        bounds = (-LARGEST, LARGEST) if weight.dim() > 1 else (0.5, 1.5)
        weight_utils.initialize_single_dummy_weight(weight, *bounds, next(seeds))

    cpu_mla.DeepseekV4CPUSparseSWAMetadataBuilder.build_tile_scheduler = no_plans
    dummy_loader.initialize_single_dummy_weight = make_weight
