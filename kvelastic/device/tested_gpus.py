"""GPUs that have run kvelastic; shown by the log, `kvctl doctor` and docs/gpu.md.

Add a row for a GPU on which `scripts/test` and a served load have run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, NamedTuple


class Row(NamedTuple):
    """One GPU with one driver and one attention implementation."""

    gpu: str
    """The driver's name of the GPU."""
    driver: str
    attention: str
    how: Literal["seen", "simulated"]


ROWS: Final = (
    Row("NVIDIA H100 80GB HBM3", "580.159.04", "vLLM's Triton kernels, V2 runner", "seen"),
    Row("NVIDIA H100 80GB HBM3", "580.159.04", "transformers 5.17, sdpa", "seen"),
    Row("the simulated driver", "CUDA 13.0", "vLLM's CPU kernels, V1 runner", "simulated"),
    Row("the simulated driver", "CUDA 13.0", "vLLM's CPU kernels, V2 runner", "simulated"),
)


NOT_RUN: Final = "FlashAttention, tensor parallel, SGLang"
"""Features that have not run on any GPU yet."""


def has_run(gpu: str, rows: Sequence[Row] = ROWS) -> bool:
    """Return whether a GPU of that name has run kvelastic."""
    return any(_is_seen(row, gpu) for row in rows)


def experience(gpu: str, rows: Sequence[Row] = ROWS) -> str:
    """Describe for the log what a GPU of that name has run, and what no GPU has run."""
    seen = [f"{row.attention} (driver {row.driver})" for row in rows if _is_seen(row, gpu)]
    if not seen:
        return "No GPU of this model is in the table of docs/gpu.md yet: please report how it went."
    return (
        f"GPUs of this model have run kvelastic with {'; '.join(seen)}. Not run on any GPU yet:"
        f" {NOT_RUN}."
    )


def _is_seen(row: Row, gpu: str) -> bool:
    return row.how == "seen" and row.gpu == gpu


def markdown() -> str:
    """Return the table for docs/gpu.md."""
    lines = ["| GPU | driver | attention | |", "|---|---|---|---|"]
    lines += [f"| {row.gpu} | {row.driver} | {row.attention} | {row.how} |" for row in ROWS]
    return "\n".join(lines) + "\n"
