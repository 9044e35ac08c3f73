"""`import llm_datadist`: off by itself, the same classes where it is on, and theirs goes first."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from waiting import DEADLINE_S


def python(program: str, **environment: str) -> str:
    kept = {name: value for name, value in os.environ.items() if "ALIAS" not in name}
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env=kept | environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    return (ended.stdout or ended.stderr).strip().splitlines()[-1]


def test_alias_is_off_by_default():
    assert "No module named 'llm_datadist'" in python("import kvelastic.datadist, llm_datadist")


@pytest.mark.slow
def test_the_alias_has_the_same_classes():
    switched = "from kvelastic import datadist_alias as alias; alias.switch_on(); "
    program = "import llm_datadist as a, kvelastic.datadist as b; print(a.Cache is b.Cache)"
    assert python(switched + program) == "True"
    assert python(program, KVELASTIC_LLM_DATADIST_ALIAS="true") == "True"
    assert "No module named" in python(f"{switched} alias.switch_off(); import llm_datadist")


@pytest.mark.slow
def test_programs_import_from_alias_submodules():
    """As hixl's own samples and the connectors of vLLM and omni-infer do."""
    program = (
        "from kvelastic import datadist_alias as alias; alias.switch_on()\n"
        "from llm_datadist import *\n"
        "import kvelastic.datadist as ours\n"
        "assert LlmConfig is LLMConfig is ours.LLMConfig\n"
        "from llm_datadist.v2.llm_types import Cache, CacheDesc, BlocksCacheKey, Placement\n"
        "from llm_datadist.v2.llm_datadist import LLMDataDist\n"
        "from llm_datadist.v2.cache_manager import CacheManager\n"
        "from llm_datadist.configs import LLMClusterInfo, LLMRole, LlmConfig as LLMConfig\n"
        "from llm_datadist.data_type import DataType\n"
        "from llm_datadist.status import LLMStatusCode, LLMException, Status\n"
        "import llm_datadist.v2.llm_types as types\n"
        "assert types.CacheDesc is ours.CacheDesc and CacheManager is ours.CacheManager\n"
        "assert Status(LLMStatusCode.LLM_SUCCESS).is_ok()\n"
        "assert not Status(LLMStatusCode.LLM_TIMEOUT).is_ok()\n"
        "try: import llm_datadist.v2.nothing\n"
        "except ModuleNotFoundError: print('as it is there')\n"
    )
    assert python(program) == "as it is there"


def test_installed_llm_datadist_is_not_mixed_with_alias(tmp_path):
    (tmp_path / "llm_datadist").mkdir()
    (tmp_path / "llm_datadist/__init__.py").write_text("WHO = 'theirs'\n")
    program = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from kvelastic import datadist_alias as alias; alias.switch_on()\n"
        "import llm_datadist; assert llm_datadist.WHO == 'theirs'; import llm_datadist.status"
    )
    assert "No module named 'llm_datadist.status'" in python(program)


def test_installed_llm_datadist_takes_precedence(tmp_path):
    (tmp_path / "llm_datadist.py").write_text("WHO = 'theirs'\n")
    program = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r});"
        "from kvelastic import datadist_alias as alias; alias.switch_on();"
        "import llm_datadist; print(llm_datadist.WHO)"
    )
    assert python(program) == "theirs"


def test_alias_variable_alone_imports_no_datadist():
    program = "import sys; print('kvelastic.datadist' in sys.modules)"
    assert python(program, KVELASTIC_LLM_DATADIST_ALIAS="true") == "False"


def test_datadist_import_does_not_load_torch():
    assert python("import kvelastic.datadist, sys; print('torch' in sys.modules)") == "False"
