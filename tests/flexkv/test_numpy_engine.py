"""An engine without a plugin: a hundred lines of NumPy that serve prompts by get and put."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).parents[1] / "programs" / "numpy_engine.py"


def serve(folder: Path) -> tuple[int, str]:
    """Tokens whose KV it computed, and its answers."""
    ended = subprocess.run(
        [sys.executable, str(PROGRAM), str(folder / "kv"), f"ipc://{folder}/ranks"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    computed, _, answers = ended.stdout.strip().partition(" ")
    return int(computed), answers


def test_prompts_come_back_after_a_restart_with_the_same_answers(tmp_path: Path) -> None:
    cold, expected = serve(tmp_path)
    warm, answers = serve(tmp_path)
    assert answers == expected
    # What a prompt still costs: the tail that is no whole block, and its answer.
    assert warm < cold / 2


def test_it_is_the_hundred_lines_that_the_documentation_promises() -> None:
    code = PROGRAM.read_text().splitlines()
    assert len([line for line in code if line.strip()]) <= 130
