"""`kvctl doctor --probe`: what a child says that loads kvelastic into an engine."""

from __future__ import annotations

import sys
from importlib import metadata

import needs
import pytest
from waiting import DEADLINE_S

from kvelastic import engines
from kvelastic.doctor.children import ask_engine
from kvelastic.doctor.facts import ProbeFact

TRANSFORMERS = engines.find("transformers")


def said(program: str, timeout_s: float = DEADLINE_S) -> ProbeFact:
    command = [sys.executable, "-c", program]
    return ask_engine(TRANSFORMERS, "5.19.0", program=command, timeout_s=timeout_s)


@pytest.fixture(scope="module")
def installed() -> tuple[str, ProbeFact]:
    """The installed version, and what a process that imports it says."""
    version = metadata.version("transformers")
    return version, ask_engine(TRANSFORMERS, version)


@pytest.mark.slow
@needs.transformers
def test_installed_engine_has_all_expected_hooks(
    installed: tuple[str, ProbeFact],
) -> None:
    version, found = installed
    assert (found.broken, found.missed, found.failure) == ((), (), "")
    assert found.hooked == len(TRANSFORMERS.hooks(version)) > 0


def test_probe_without_result_is_reported() -> None:
    assert said("print('hello')").failure == "a child that imports it said nothing"
    assert "died of SIGKILL" in said("import os; os.kill(os.getpid(), 9)").failure
    assert "no answer within 0.2 s" in said("import time; time.sleep(60)", timeout_s=0.2).failure


@pytest.mark.parametrize("engine", [each.name for each in engines.ENGINES])
def test_rooms_match_the_hooks(engine: str) -> None:
    one = engines.find(engine)
    for series in one.tried:
        assert sum(one.rooms(f"{series}.0").values()) == len(one.hooks(f"{series}.0"))
    assert one.rooms("999.0") == one.rooms(f"{one.tried[-1]}.0")
