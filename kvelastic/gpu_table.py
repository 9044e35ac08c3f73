"""Which GPUs have run kvelastic: plain data that the log, `kvctl doctor` and docs/gpu.md show.

A row is added by who has seen it, with what `scripts/test` and a served load said there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, NamedTuple


class Row(NamedTuple):
    """One GPU with one driver and one way to compute attention."""

    gpu: str
    """As its driver calls it."""
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
"""What no GPU has run on kvelastic yet."""


def has_run(gpu: str, rows: Sequence[Row] = ROWS) -> bool:
    """Whether a GPU of that name is in the table as seen."""
    return any(_is_seen(row, gpu) for row in rows)


def experience(gpu: str, rows: Sequence[Row] = ROWS) -> str:
    """What a GPU of that name has run, and what none has, as sentences of a log."""
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
    """The table for docs/gpu.md."""
    lines = ["| GPU | driver | attention | |", "|---|---|---|---|"]
    lines += [f"| {row.gpu} | {row.driver} | {row.attention} | {row.how} |" for row in ROWS]
    return "\n".join(lines) + "\n"
