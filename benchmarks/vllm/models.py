"""The models that are served: a tiny random one, or SmolLM2-135M. Both in float32.

The tiny one's steps take a few milliseconds, nearly all of it vLLM's own Python: whatever kvelastic
adds to a step shows there most.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import tiny_model
from vllm_server import BLOCK_TOKENS

ROOT = Path(__file__).parents[2]
NAMES = ("tiny", "smollm2")


@dataclass(frozen=True)
class Model:
    name: str
    folder: Path
    block_bytes: int
    """Of a block in all layers, K and V, float32."""


def prepare(name: str, work_folder: Path) -> Model:
    """Write the model, or find it; raises `subprocess.CalledProcessError`."""
    if name == "tiny":
        folder = work_folder / "tiny_model"
        subprocess.run([sys.executable, tiny_model.__file__, folder], check=True)
        return Model(name, folder, _block_bytes(layers=4, heads=2, head_dim=32))
    made = subprocess.run(
        [ROOT / "scripts" / "model", "--print-folder"],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return Model(name, Path(made.stdout.strip()), _block_bytes(layers=30, heads=3, head_dim=64))


def _block_bytes(layers: int, heads: int, head_dim: int) -> int:
    return BLOCK_TOKENS * layers * 2 * heads * head_dim * 4
