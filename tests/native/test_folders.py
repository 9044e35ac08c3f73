"""The folders of vmm_csrc are layers: a file includes files of its own folder and of lower ones."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "vmm_csrc"


def layers() -> list[str]:
    """The folders of the library as CMakeLists.txt orders them, and the bindings on top."""
    listed = re.search(r"set\(VMM_FOLDERS ([\w ]+)\)", (ROOT / "CMakeLists.txt").read_text())
    assert listed is not None
    return [*listed[1].split(), "bind"]


def test_every_folder_is_a_layer() -> None:
    folders = {path.name for path in SOURCES.iterdir() if path.is_dir()}
    assert folders == {*layers(), "tests"}
    assert not [path.name for path in SOURCES.iterdir() if path.is_file()]


def test_includes_name_their_folder_and_point_down() -> None:
    order = {folder: height for height, folder in enumerate(layers())}
    upward = [
        f"{file.relative_to(SOURCES)} includes {name}"
        for folder, height in order.items()
        for file in sorted((SOURCES / folder).iterdir())
        for name in re.findall(r'^#include "([^"]+)"', file.read_text(), re.MULTILINE)
        if order.get(Path(name).parent.name, len(order)) > height
    ]
    assert not upward
