"""Benchmarks start the same servers, instances and hosts as the tests do."""

import sys
from pathlib import Path

TESTS = Path(__file__).parents[1] / "tests"
sys.path += [str(TESTS / folder) for folder in ("programs", "cluster")]
