"""The example of docs/tiers.md runs as it stands, and its table of defaults is the code's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from processes import run_python

from kvelastic.config import VARIABLES
from kvelastic.shared import ledger

PAGE = Path(__file__).parents[2] / "docs" / "tiers.md"


@pytest.mark.slow
def test_documented_example_runs(tmp_path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    folder = tmp_path / "kv"
    folder.mkdir(mode=0o700)
    environment = {"KVELASTIC_TIERS": f"disk:{folder}:64M"}
    # The second run finds what the first one has left on the disk.
    for before in (0, 6):
        done = run_python("-W", "error", "-c", code, environment=environment)
        assert done.stdout.splitlines() == [
            f"{before} blocks were there before",
            "6 blocks were loaded; to be computed: []",
        ]
    ledger.reap()


def test_every_tier_variable_is_documented() -> None:
    text = PAGE.read_text()
    for variable in VARIABLES:
        if variable.name.startswith("KVELASTIC_TIER"):
            short = variable.name.removeprefix("KVELASTIC_TIER")
            assert variable.name in text or f"...{short}" in text, variable.name
