"""kvctl completion: the scripts, and bash with them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from terminal import Terminal

from kvelastic.cli.commands.shell import Shell
from kvelastic.cli.kvctl import main
from kvelastic.shared.segment_listing import SHM_DIR, list_segments

pytestmark = pytest.mark.slow


BIN = Path(sys.executable).parent
PATH = f"{BIN}:{os.environ['PATH']}"


@pytest.mark.parametrize(
    ("shell", "sign"),
    [("bash", "complete -o nosort -F"), ("zsh", "#compdef kvctl"), ("fish", "complete --no-files")],
)
def test_a_script_for_each_shell(shell, sign):
    result = CliRunner().invoke(main, ["completion", shell])
    assert result.exit_code == 0
    assert sign in result.stdout
    assert f"_KVCTL_COMPLETE={shell}_complete" in result.stdout
    if program := shutil.which(shell):
        subprocess.run([program, "-n"], input=result.stdout, text=True, check=True)


@pytest.mark.parametrize("arguments", [[], ["tcsh"], ["bash", "zsh"]])
def test_wrong_usage(arguments):
    result = CliRunner().invoke(main, ["completion", *arguments])
    assert (result.exit_code, result.stdout) == (2, "")


@pytest.fixture(params=["bash", "shell"])
def completed(request, monkeypatch):
    """What is offered for the last of the words: by the script of bash, or by `kvctl shell`."""
    if request.param == "shell":
        return lambda *words: Shell(main).complete(" ".join(words[1:-1]), words[-1])

    def by_bash(*words: str) -> list[str]:
        monkeypatch.setenv("COMP_WORDS", "\n".join(words))
        monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
        monkeypatch.setenv("_KVCTL_COMPLETE", "bash_complete")
        result = CliRunner().invoke(main, prog_name="kvctl")
        assert result.exit_code == 0, result.output
        return [line.partition(",")[2] for line in result.stdout.splitlines()]

    return by_bash


def completed_by_bash(*words: str) -> list[str]:
    """What bash has for the last of the words, with the script that kvctl prints."""
    program = """
eval "$(kvctl completion bash)"
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
_kvctl_completion kvctl 2>/dev/null
printf '%s\\n' "${COMPREPLY[@]}"
"""
    done = subprocess.run(
        ["bash", "--norc", "-c", program, "bash", *words],
        env=os.environ | {"PATH": PATH},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()


@pytest.mark.parametrize(
    "verb",
    [
        "list",
        "limit",
        "limit-percent",
        "set",
        "trim",
        "sleep",
        "wake",
        "stats",
        "explain",
        "watch",
        "delete",
    ],
)
def test_bash_completes_a_name(owner, verb):
    assert owner.name in completed_by_bash("kvctl", verb, owner.name[:-3])
    assert owner.name not in completed_by_bash("kvctl", verb, "no_such")


def test_bash_completes_commands_and_options():
    assert completed_by_bash("kvctl", "lim") == ["limit", "limit-percent"]
    assert {"--min", "--limit", "--priority"} <= set(completed_by_bash("kvctl", "set", "x", "--"))
    assert completed_by_bash("kvctl", "completion", "") == ["bash", "zsh", "fish"]


HOSTILE = ["aa$(touch X)", "aa`id`", "aa;id", "aa b", "aa*", "aa\n'", "aa\x1b[2J", "aa\udcff", "aä"]


def test_completion_offers_only_valid_instance_names(owner, completed):
    """Another user chooses the names of their files in /dev/shm; a shell runs what it inserts."""
    with ExitStack() as files:
        for name in HOSTILE:
            files.callback((SHM_DIR / name).unlink)
            (SHM_DIR / name).write_bytes(owner.path.read_bytes())
        assert {info.name for info in list_segments()} >= {*HOSTILE, owner.name}
        offered = completed("kvctl", "trim", "")
    assert offered == [owner.name]


def test_completion_offers_only_valid_tier_names(owner, completed, monkeypatch):
    figures = [SimpleNamespace(tier=tier) for tier in ("host", "disk2", *HOSTILE)]
    monkeypatch.setattr(
        "kvelastic.shared.tier_status.read", lambda info: SimpleNamespace(tiers=figures)
    )
    assert sorted(completed("kvctl", "tiers", "trim", owner.name, "")) == ["disk2", "host"]


def test_tab_completes_in_an_interactive_bash(owner):
    with Terminal(["bash", "--norc", "-i"], PATH=PATH, PS1="ready> ") as bash:
        bash.until("ready> ")
        bash.type('eval "$(kvctl completion bash)"\r')
        bash.until("ready> ")
        bash.type(f"kvctl lis\t{owner.name[:-3]}\t--js\t\r")
        bash.until(f'"name": "{owner.name}"')
