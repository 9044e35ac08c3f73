"""What kvctl says where it is misread, and where its output cannot be written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from segment_owner import Owner

from kvelastic.cli.kvctl import _COMMANDS, main

BIN = Path(sys.executable).parent
FULL = Path("/dev/full")
DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def owner():
    with Owner("-") as running:
        yield running


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["C", "C.UTF-8"])
@pytest.mark.parametrize(
    "words",
    [
        "kvctl list",
        "kvctl list --json",
        "kvctl watch --count 1",
        "kvctl stats {name}",
        "kvctl explain {name}",
        "kvctl limit {name} 1G",
        "kvctl devices",
        "kvctl metrics",
        "kvctl version",
        "kvctl --help",
        "kvtop --once",
        "kvelastic-controller --schema",
    ],
)
def test_a_disk_that_is_full_is_one_line_and_exit_code_1(owner, words, encoding):
    program, *arguments = words.format(name=owner.name).split()
    with FULL.open("w") as full:
        done = subprocess.run(
            [str(BIN / program), *arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"LC_ALL": encoding},
        )
    message = "Error: the output cannot be written: No space left on device.\n"
    assert (done.returncode, done.stderr) == (1, message)


def test_the_shell_ends_where_its_output_cannot_be_written():
    with FULL.open("w") as full:
        done = subprocess.run(
            [str(BIN / "kvctl"), "shell"],
            input="version\nversion\n",
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    message = "Error: the output cannot be written: No space left on device.\n"
    assert (done.returncode, done.stderr) == (1, message)


@pytest.mark.parametrize(
    ("word", "meant"), [("lsit", "list"), ("limt", "limit"), ("expalin", "explain"), ("qqq", None)]
)
def test_a_command_that_is_none_is_told_the_nearest(word, meant):
    result = CliRunner().invoke(main, [word])
    assert result.exit_code == 2
    assert f"No such command {word!r}." in result.stderr
    assert ("Did you mean" in result.stderr) == (meant is not None)
    if meant is not None:
        assert result.stderr.count(f"Did you mean {meant!r}?") == 1


def test_every_command_is_documented():
    documented = (DOCS / "kvctl.md").read_text()
    assert [name for name in _COMMANDS if f"    kvctl {name}" not in documented] == []
