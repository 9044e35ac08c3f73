"""The example files for other cluster managers, which no test runs: syntax, and names of ours."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from kvelastic.config import VARIABLES
from kvelastic.instance import metric_table

FILES = sorted((Path(__file__).parents[2] / "examples" / "kubernetes").glob("*.yaml"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_example_uses_only_existing_metrics_and_variables(file: Path) -> None:
    text = file.read_text()
    assert text.startswith("# NOT RUN.")
    assert all(isinstance(part, dict) for part in yaml.safe_load_all(text))
    metrics = set(re.findall(r"\bkvelastic_[a-z_]+", text))
    assert metrics <= {one.name for one in metric_table.METRICS}
    variables = set(re.findall(r"\b(?:ENABLE_)?KVELASTIC(?:_[A-Z_]+)?\b", text))
    assert variables <= {variable.name for variable in VARIABLES}


def test_files_are_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "cluster.md").read_text()
    assert FILES
    assert [file.name for file in FILES if f"examples/kubernetes/{file.name}" not in page] == []
