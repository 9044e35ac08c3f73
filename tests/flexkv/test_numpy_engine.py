"""An engine without a plugin: a hundred lines of NumPy that serve prompts by get and put."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import PROGRAMS, run_python

PROGRAM = PROGRAMS / "numpy_engine.py"


def serve(folder: Path) -> tuple[int, str]:
    """Tokens whose KV it computed, and its answers."""
    said = run_python(PROGRAM, folder / "kv", f"ipc://{folder}/ranks").stdout
    computed, _, answers = said.strip().partition(" ")
    return int(computed), answers


@pytest.mark.slow
def test_restart_reuses_kv_with_the_same_results(tmp_path: Path) -> None:
    cold, expected = serve(tmp_path)
    warm, answers = serve(tmp_path)
    assert answers == expected
    # What a prompt still costs: the tail that is no whole block, and its answer.
    assert warm < cold / 2


def test_numpy_engine_has_the_documented_length() -> None:
    code = PROGRAM.read_text().splitlines()
    assert len([line for line in code if line.strip()]) <= 130
