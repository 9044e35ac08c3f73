"""vLLM servers in processes of their own (`vllm_server.py`), and what all of them are started with.

server = Server("stock", {"engine": {...}, "vocabulary": 32000}, environment(folder), folder)
server.answer(150.0)
server.tell("burst", ...); told = server.answer(150.0)
server.send_end(); server.end(15.0)
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.gpu import line_child
from benchmarks.gpu.line_child import LineChild

SERVER = Path(__file__).with_name("vllm_server.py")


class Server(LineChild):
    """A process with one vLLM."""

    def __init__(self, name: str, options: dict[str, Any], environ: dict[str, str], folder: Path):
        command = [sys.executable, str(SERVER), json.dumps(options)]
        super().__init__(name, command, environ, folder / f"{name}.log")


def llama(dtype: str, **shape: int) -> dict[str, Any]:
    """A model's config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **shape,
    }


def how_on_gpu(*, graphs: bool) -> dict[str, Any]:
    """Arguments of an engine without vLLM's compiled kernels."""
    plain: dict[str, Any] = {"custom_ops": ["none"], "mode": 0}
    attention = {"attention_backend": "TRITON_ATTN"}
    if not graphs:
        return {"compilation_config": plain, "enforce_eager": True, **attention}
    captured = {
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 24, 32, 48, 64],
    }
    return {"compilation_config": plain | captured, **attention}


def environment(folder: Path, **elastic: str) -> dict[str, str]:
    """Of a server whose caches are in `folder`. With `elastic` it runs on kvelastic, so named."""
    environ = line_child.environment() | {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": str(folder / "cache"),
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        # Sums in float32 as they are written: stock and kvelastic are compared to the last token.
        "TRITON_F32_DEFAULT": "ieee",
        "TRITON_CACHE_DIR": str(folder / "triton"),
    }
    return environ | ({"ENABLE_KVELASTIC": "true"} | elastic if elastic else {})
