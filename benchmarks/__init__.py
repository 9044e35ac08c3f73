"""Benchmarks start the same servers and instances as the tests do, from one folder of programs."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests" / "programs"))
