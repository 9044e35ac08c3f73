"""Writes a random LoRA adapter for the tiny model: `tiny_adapter.py FOLDER SEED [LAYERS]`.

Of the query and value projections of every layer, large enough that each adapter gives answers of
its own. Run as a program, as `tiny_model.py` is.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

HIDDEN = 128
RANK = 8
OUTPUTS = {"q_proj": 128, "v_proj": 64}
"""Rows of each projection, by the defaults of `tiny_model.write`."""


def write(folder: str, seed: int, layers: int = 4) -> None:
    import torch
    from safetensors.torch import save_file

    numbers = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(layers):
        for name, rows in OUTPUTS.items():
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{at}.lora_A.weight"] = torch.randn(RANK, HIDDEN, generator=numbers)
            weights[f"{at}.lora_B.weight"] = torch.randn(rows, RANK, generator=numbers)
    path = Path(folder)
    path.mkdir(exist_ok=True)
    save_file(weights, path / "adapter_model.safetensors")
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": list(OUTPUTS),
        "bias": "none",
    }
    (path / "adapter_config.json").write_text(json.dumps(described))


if __name__ == "__main__":
    write(sys.argv[1], *map(int, sys.argv[2:]))
