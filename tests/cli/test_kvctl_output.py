"""What kvctl says where it is misread, and where its output cannot be written."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from segment_owner import Owner

from kvelastic import cli
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
def test_full_output_device_exits_1_with_one_error(owner, words, encoding):
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


HOSTILE = "\x1b]0;owned\x07\x9b2J\nkvctl: \udcff"
"""A name that sets a terminal's title, clears its screen and adds a line."""


@pytest.fixture(params=["apply", "refuse", "shrink"])
def hostile(request):
    """The name of an instance whose user has renamed its segment."""
    with Owner("-", request.param) as running:
        path = running.path.rename(running.path.with_name(running.name + HOSTILE))
        yield path.name
        path.unlink(missing_ok=True)


@pytest.mark.parametrize(
    "words",
    [
        "limit {name} 1G",
        "limit-percent {name} 50",
        "set {name} --priority 3",
        "trim {name}",
        "trim {name} --wait 0",
        "sleep {name}",
        "sleep {name} --wait 0",
        "wake {name}",
        "wake {name} --wait 0",
        "list",
        "list {name}",
        "watch --count 1",
        "stats {name}",
        "explain {name}",
        "tiers",
        "tiers {name}",
        "tiers clear {name} --yes",
        "delete {name}",
        "delete {name} --force",
        "gc",
        "devices",
        "metrics",
        "kvtop --once",
        "limit nothing 1G",
    ],
)
def test_hostile_segment_name_is_escaped_in_all_commands(hostile, words):
    result = CliRunner().invoke(main, [word.format(name=hostile) for word in words.split()])
    assert isinstance(result.exception, SystemExit | None)
    assert result.output.replace("\n", "").isprintable()
    assert "\nkvctl: " not in result.output


def test_hostile_refusal_reason_is_escaped(monkeypatch):
    link = SimpleNamespace(peer_id=2, state="linked")
    node = SimpleNamespace(node_id=1, pid=7, links=[link])
    answer = SimpleNamespace(state="refused", reason=HOSTILE)
    monkeypatch.setattr("kvelastic.shared.link_status.nodes", lambda: [node])
    monkeypatch.setattr("kvelastic.shared.link_status.cut", lambda *_: answer)
    result = CliRunner().invoke(main, ["links", "cut", "1", "2"])
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: node 1 has not cut it: ")
    assert result.stderr.rstrip("\n").isprintable()


def test_all_output_goes_through_one_function():
    prints = re.compile(r"\bclick\.s?echo\(|(?<![\w.])print\(|std(out|err)\.write\(")
    files = Path(cli.__file__).parent.rglob("*.py")
    found = {one.name for one in files if prints.search(one.read_text())}
    assert found == {"printing.py", "program.py"}, "program.py reports a stdout that takes no text"


@pytest.mark.parametrize(
    "words", ["kvctl list", "kvctl list --json", "kvctl devices", "kvtop --once"]
)
def test_closed_stdout_prints_one_error_and_exits_1(words):
    done = subprocess.run(
        ["sh", "-c", f"exec {BIN}/{words} >&- </dev/null"], stderr=subprocess.PIPE, text=True
    )
    message = "Error: the output cannot be written: Bad file descriptor.\n"
    assert (done.returncode, done.stderr) == (1, message)


def test_closed_stderr_keeps_the_exit_code():
    done = subprocess.run(["sh", "-c", f"exec {BIN}/kvctl limit nothing 1G 2>&-"])
    assert done.returncode == 1


def test_shell_exits_if_output_cannot_be_written():
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
def test_unknown_command_suggests_the_nearest(word, meant):
    result = CliRunner().invoke(main, [word])
    assert result.exit_code == 2
    assert f"No such command {word!r}." in result.stderr
    assert ("Did you mean" in result.stderr) == (meant is not None)
    if meant is not None:
        assert result.stderr.count(f"Did you mean {meant!r}?") == 1


def test_every_command_is_documented():
    documented = (DOCS / "kvctl.md").read_text()
    assert [name for name in _COMMANDS if f"    kvctl {name}" not in documented] == []
