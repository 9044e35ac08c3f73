"""docs/flexkv.md: what it names is there, and what it promises is so."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from kvelastic.flexkv.common.known_settings import BY_NAME, SETTINGS
from kvelastic.flexkv.common.user_config import load_user_config_from_env

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "flexkv.md").read_text()


def test_native_files_of_the_table_exist() -> None:
    table = PAGE.split("## Where FlexKV's native files are found")[1].split("\n## ")[0]
    rows = [line.split("|") for line in table.splitlines() if line.startswith("| `")]
    assert [row[1].strip(" `") for row in rows] == [
        "bindings.cpp",
        "hash.cpp",
        "radix_tree.cpp",
        "transfer.cu",
        "transfer_ssd.cpp",
        "tp_transfer_thread_group.cpp",
    ]
    for row in rows:
        paths = re.findall(r"`([\w/]+[\w*./]*)`", row[3])
        assert paths
        folder = "vmm_csrc"
        for path in paths:
            if "/" in path:
                folder = str(Path(path).parent)
            found = list(ROOT.glob(path if "/" in path else f"{folder}/{path}"))
            assert found, f"{path} of the row {row[1]} is not there"


def test_documented_settings_exist() -> None:
    for name in re.findall(r"(?<![A-Z_])FLEXKV_[A-Z0-9_]+", PAGE):
        assert name == "FLEXKV_" or name.removeprefix("FLEXKV_").lower() in BY_NAME, name


def test_refused_settings_are_documented() -> None:
    table = PAGE.split("## What is refused")[1].split("\n## ")[0]
    for setting in SETTINGS:
        if setting.instead and setting.name != "swa_multi_group":
            assert f"`{setting.name}`" in table, setting.name
    load_user_config_from_env({})


def test_first_documented_example_runs(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names: dict[str, Any] = {}
    code = code.replace("/mnt/kv", str(tmp_path))
    code = code.replace("    tokens =", "    kv[:, :, :3] = 7\n    tokens =")
    exec(compile(code, "docs/flexkv.md", "exec"), names)
    assert (names["kv"][:, :, 10:12] == 7).all()
    assert (names["kv"][:, :, 12:] == 0).all()
