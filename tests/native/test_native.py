"""The native tests (vmm_csrc/tests), each in a process of its own.

They are linked with the library of the installed module, in the folder where scripts/setup has
built it: only the tests themselves are compiled, and only where their sources have changed.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import needs
import pytest

pytestmark = [pytest.mark.slow, needs.native_build]

SOURCES = Path(__file__).parents[2] / "vmm_csrc" / "tests"
NAMES = sorted(
    name
    for file in SOURCES.glob("*.cpp")
    for name in re.findall(r"^TEST\((\w+)\)", file.read_text(), re.MULTILINE)
)


@pytest.fixture(scope="module")
def program() -> Path:
    folder = needs.find_native_build()
    assert folder is not None
    ninja = Path(sys.executable).with_name("ninja")
    built = subprocess.run(
        [ninja, "-C", folder, "vmm_tests"], capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stdout + built.stderr
    return folder / "vmm_tests"


@pytest.mark.parametrize("name", NAMES)
def test_native(program: Path, name: str) -> None:
    done = subprocess.run([program, name], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(f"ok   {name}\n1 tests, ")
