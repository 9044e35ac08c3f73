"""A start of SGLang that cannot work is refused in its first process, before anything is loaded."""

from __future__ import annotations

import multiprocessing
import os

import pytest
from segment_owner import Owner

from kvelastic.integration.sglang import in_arguments

NAME = f"kvtest_sglang_start_{os.getpid()}"


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVELASTIC_LEDGER", f"kvsglangstart-{os.getpid()}")
    monkeypatch.setenv("KVELASTIC_IPC_NAME", NAME)
    monkeypatch.setenv("KVELASTIC_HOST_MEMORY", "1G")
    monkeypatch.setattr(in_arguments, "_is_start_checked", False)


def test_taken_name_is_rejected_at_the_first_check() -> None:
    with Owner(NAME) as owner:
        with pytest.raises(SystemExit, match=f"is taken by process {owner.pid}, which is alive"):
            in_arguments._check_start()
        # Once it has started, the name is taken by its own scheduler.
        in_arguments._check_start()


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("KVELASTIC_DEVICE", "cuda:7", "does not fit a model of SGLang on cpu"),
        ("KVELASTIC_MIN", "2G", r"no room for 2\.00 GiB guaranteed"),
    ],
)
def test_settings_the_scheduler_would_reject_are_rejected(
    name: str, value: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_arguments._check_start()
    monkeypatch.setattr(in_arguments, "_is_start_checked", False)
    monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match=why):
        in_arguments._check_start()


def test_child_processes_skip_the_start_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiprocessing, "parent_process", object)
    with Owner(NAME):
        in_arguments._check_start()
