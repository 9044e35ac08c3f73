"""`import flexkv`: on by name only, one object under both names, and never in FlexKV's way."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import DEADLINE_S

ROOT = Path(__file__).parents[2]


def run(program: str, *paths: Path, **environment: str) -> str:
    """In a Python of its own, for imports are for good; the last line that it prints."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KVELASTIC_")}
    search = os.pathsep.join([*map(str, paths), str(ROOT)])
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env={**kept, "PYTHONPATH": search, **environment},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    return (ended.stdout or ended.stderr).strip().splitlines()[-1]


ON = "from kvelastic.flexkv import alias; alias.switch_on(); "


def test_flexkv_is_absent_without_the_alias() -> None:
    assert "No module named 'flexkv'" in run("import kvelastic.flexkv, flexkv")


def test_module_is_one_object_under_both_names() -> None:
    program = ON + (
        "import flexkv.common.config as a, kvelastic.flexkv.common.config as b, sys, flexkv;"
        "from flexkv.common.config import CacheConfig;"
        "assert a is b and flexkv is sys.modules['kvelastic.flexkv'];"
        "assert CacheConfig is b.CacheConfig;"
        "assert b.__spec__.name == b.__name__ == 'kvelastic.flexkv.common.config', b.__spec__;"
        "import importlib; importlib.reload(b); import pickle; pickle.dumps(b.CacheConfig());"
        "print('one')"
    )
    assert run(program) == "one"


def test_import_by_alias_first_gives_same_module() -> None:
    program = ON + (
        "from flexkv.integration.utils import cdiv; import kvelastic.flexkv.integration.utils as u;"
        "assert u.cdiv is cdiv; print('one')"
    )
    assert run(program) == "one"


def test_missing_dependency_of_a_module_is_named() -> None:
    hidden = "import sys; sys.modules['numpy'] = None; "
    assert "numpy" in run(hidden + ON + "import flexkv.cache.mempool")


def test_unknown_flexkv_modules_are_absent() -> None:
    assert "No module named 'flexkv.nothing'" in run(ON + "import flexkv.nothing")
    assert "No module named 'flexkv.common.x'" in run(ON + "import flexkv.common.x.y")


def test_installed_flexkv_takes_precedence(tmp_path: Path) -> None:
    package = tmp_path / "flexkv"
    (package / "common").mkdir(parents=True)
    (package / "__init__.py").write_text("NAME = 'the real one'\n")
    (package / "common" / "__init__.py").write_text("")
    program = ON + "import flexkv, flexkv.common; print(flexkv.NAME, flexkv.common.__file__)"
    assert run(program, tmp_path) == f"the real one {package / 'common' / '__init__.py'}"
    assert "flexkv.integration" in run(ON + "import flexkv.integration.utils", tmp_path)


def test_switching_alias_on_twice_and_off() -> None:
    program = ON + (
        "import sys; n = len(sys.meta_path); alias.switch_on(); assert len(sys.meta_path) == n;"
        "alias.switch_off(); import flexkv"
    )
    assert "No module named 'flexkv'" in run(program)


def test_switched_off_alias_imports_nothing() -> None:
    program = ON + "import flexkv, flexkv.common; alias.switch_off(); "
    for further in ("flexkv", "flexkv.common", "flexkv.common.block"):
        assert "No module named 'flexkv'" in run(program + f"import {further}")
    again = program + "alias.switch_on(); import flexkv as f, kvelastic.flexkv as k; print(f is k)"
    assert run(again) == "True"


@pytest.mark.parametrize(
    ("value", "expected"), [("true", "here"), ("false", "absent"), ("", "absent")]
)
def test_variable_switches_alias_on_at_python_start(value: str, expected: str) -> None:
    program = (
        "import importlib.util; print('here' if importlib.util.find_spec('flexkv') else 'absent')"
    )
    assert run(program, KVELASTIC_FLEXKV_ALIAS=value) == expected


def test_alias_variable_alone_imports_no_modules() -> None:
    program = "import sys; print(sorted(m for m in sys.modules if 'numpy' in m or 'msgspec' in m))"
    assert run(program, KVELASTIC_FLEXKV_ALIAS="true") == "[]"
