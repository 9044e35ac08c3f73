"""kvctl shell: the same commands and nothing but them, on a terminal and from a pipe."""

from __future__ import annotations

import json
import re
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from segment_owner import Owner
from terminal import Terminal
from waiting import DEADLINE_S, wait_until

from kvelastic.cli.commands.shell import Shell, ShellSyntaxError, history_path, words_of
from kvelastic.cli.kvctl import main
from kvelastic.shared import segment

KVCTL = str(Path(sys.executable).with_name("kvctl"))
PROMPT = "kvctl> "
SCREEN_BEGINS, SCREEN_ENDS = "\x1b[?1049h", "\x1b[?1049l"


@pytest.fixture
def state(tmp_path):
    """Where the shells of a test keep their history."""
    return tmp_path / "state"


@pytest.fixture
def terminal(state):
    with Terminal([KVCTL, "shell"], XDG_STATE_HOME=str(state)) as running:
        running.until(PROMPT)
        yield running


def piped(*lines: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [KVCTL, "shell"],
        input="".join(f"{line}\n" for line in lines),
        capture_output=True,
        text=True,
    )


# --------------------------------------------------------------------------- what a line means


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", []),
        ("   # only a comment; with | signs", []),
        ("list --json", ["list", "--json"]),
        ("limit 'my model' 2G  # that one", ["limit", "my model", "2G"]),
        ('limit "a;b|c" 2G', ["limit", "a;b|c", "2G"]),
        (r"limit a\;b 2G", ["limit", "a;b", "2G"]),
        ("limit a:b@c+d-e.f 1.5GiB", ["limit", "a:b@c+d-e.f", "1.5GiB"]),
        ("list ''", ["list", ""]),
    ],
)
def test_lines_are_split_into_words(line, words):
    assert words_of(line) == words


@pytest.mark.parametrize(
    ("line", "sign"),
    [
        ("!ls", "!"),
        ("list; rm -rf x", ";"),
        ("list | wc", "|"),
        ("list && list", "&"),
        ("watch &", "&"),
        ("list > file", ">"),
        ("list < file", "<"),
        ("limit `hostname` 1G", "`"),
        ("limit $(hostname) 1G", "$"),
        ("limit $NAME 1G", "$"),
        ("limit 'a'; list", ";"),
        (r'limit "a\"b"; list', ";"),
    ],
)
def test_shell_metacharacters_are_refused(line, sign):
    with pytest.raises(ShellSyntaxError) as caught:
        words_of(line)
    assert repr(sign) in str(caught.value)


@pytest.mark.parametrize("line", ["limit 'a 1G", 'limit "a 1G', "limit a\\"])
def test_unterminated_quotes_are_refused(line):
    with pytest.raises(ShellSyntaxError):
        words_of(line)


# -------------------------------------------------------------------------------- from a pipe


@pytest.mark.slow
def test_commands_are_read_from_a_pipe(owner):
    done = piped(f"limit {owner.name} 2G --wait 300", "", "# nothing", f"list {owner.name} --json")
    said, _, listed = done.stdout.partition("\n")
    assert "limit 2.00 GiB (2147483648 bytes) applied" in said
    assert json.loads(listed)[0]["limit_bytes"] == 2 << 30
    assert (done.returncode, done.stderr) == (0, "")
    assert PROMPT not in done.stdout


@pytest.mark.parametrize(
    ("lines", "code"),
    [
        (["version"], 0),
        (["limit no_such_instance 1G"], 1),
        (["limit"], 2),
        (["no_such_command"], 2),
        (["limit no_such_instance 1G", "limit", "version"], 2),
        (["limit", "limit no_such_instance 1G", "version"], 1),
        (["list; list"], 2),
        (["limit", "exit"], 2),
        (["exit", "limit"], 0),
        (["quit", "limit"], 0),
        (["limit --help"], 0),
        (["shell"], 2),
        ([], 0),
    ],
)
def test_exit_code_is_that_of_the_last_failure(lines, code):
    done = piped(*lines)
    assert done.returncode == code
    assert "Traceback" not in done.stderr


def test_no_line_reaches_a_system_shell(tmp_path):
    """What a system shell would do is create a file; each line is refused with a reason."""
    made = tmp_path / "made"
    lines = [f"touch {made}", f"!touch {made}", f"list; touch {made}", f"list $(touch {made})"]
    lines += [f"version > {made}", f"version | tee {made}", f"`touch {made}`"]
    done = piped(*lines, "version")
    assert not made.exists()
    assert done.stderr.count("Error: ") == len(lines)
    assert "kvctl 0" in done.stdout  # and the shell lived on


@pytest.mark.slow
def test_wait_timeout_in_the_shell_exits_3(owner):
    with Owner(f"{owner.name}_mute", "mute") as mute:
        assert piped(f"limit {mute.name} 1M --wait 0.05").returncode == 3


def test_help_of_the_shell_and_of_a_command():
    done = piped("help", "help limit", "help no_such_command")
    assert "limit-percent" in done.stdout
    assert "exit" in done.stdout
    assert "Set the memory limit of an instance to SIZE" in done.stdout
    assert done.returncode == 2


def test_exception_in_a_command_does_not_end_shell(capsys):
    import click

    @click.group()
    def group():
        pass

    @group.command()
    def broken():
        raise ZeroDivisionError("a bug")

    shell = Shell(group)
    assert shell.run_line("broken") == 1
    assert "ZeroDivisionError: a bug" in capsys.readouterr().err


@pytest.mark.slow
def test_ctrl_c_ends_a_non_interactive_shell(owner):
    done = subprocess.Popen(
        [KVCTL, "shell"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with Owner(f"{owner.name}_mute", "mute") as mute:
        done.stdin.write(f"version\nlimit {mute.name} 1M --wait 600\nversion\n")
        done.stdin.flush()
        assert done.stdout.readline().startswith("kvctl")
        wait_until_requested(mute.name)
        done.send_signal(2)
        rest, _ = done.communicate(timeout=DEADLINE_S)
    assert done.returncode == 130
    assert rest == ""  # the second `version` did not run


@pytest.mark.slow
def test_signals_work_after_metrics_has_ended():
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        subprocess.Popen(
            [KVCTL, "shell"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as shell,
    ):
        try:
            shell.stdin.write(f"metrics --listen 127.0.0.1:{taken.getsockname()[1]}\n")
            shell.stdin.write("version\n")
            shell.stdin.flush()
            assert "cannot listen" in shell.stderr.readline()
            assert shell.stdout.readline().startswith("kvctl")
            assert blocked_signals(shell.pid) == 0
            shell.stdin.write("metrics --listen 127.0.0.1:0\nversion\n")
            shell.stdin.flush()
            assert shell.stdout.readline().startswith("Serving")
            shell.send_signal(signal.SIGTERM)
            assert shell.stdout.readline().startswith("kvctl")
            assert blocked_signals(shell.pid) == 0
        finally:
            shell.kill()


def blocked_signals(pid: int) -> int:
    """Return the mask of the signals that the main thread of a process blocks."""
    (mask,) = re.findall(r"SigBlk:\s+(\w+)", Path(f"/proc/{pid}/status").read_text())
    return int(mask, 16)


def wait_until_requested(name: str) -> None:
    """Return when a request has been written to an instance."""
    wait_until(lambda: segment.inspect(name).request["revision"])


# ------------------------------------------------------------------------------- on a terminal


@pytest.mark.slow
def test_a_session_on_a_terminal(terminal, owner):
    terminal.type(f"list {owner.name}\r")
    assert owner.name in terminal.until(PROMPT)
    terminal.type("limit no_such_instance 1G\r")
    assert "Known names" in terminal.until(PROMPT)
    terminal.type("list | wc\r")
    assert "refused" in terminal.until(PROMPT)
    terminal.type("version\r")
    terminal.until("kvctl 0")
    terminal.until(PROMPT)
    terminal.press_ctrl_d()
    assert terminal.end() == 0


@pytest.mark.parametrize("word", ["exit", "quit"])
def test_exit_and_quit_end_the_shell(terminal, word):
    terminal.type(f"{word}\r")
    assert terminal.end() == 0


@pytest.mark.slow
def test_ctrl_c_interrupts_only_the_command(terminal, owner):
    with Owner(f"{owner.name}_mute", "mute") as mute:
        terminal.type(f"limit {mute.name} 1M --wait 600\r")
        wait_until_requested(mute.name)
        terminal.press_ctrl_c()
        terminal.until("Interrupted.")
        terminal.until(PROMPT)
    terminal.type("watch -n 60\r")
    terminal.until(owner.name)
    terminal.press_ctrl_c()
    terminal.until(PROMPT)
    terminal.type("half a li")
    terminal.until("half a li")
    terminal.until_it_waits()
    terminal.press_ctrl_c()
    terminal.until(PROMPT)
    terminal.type("version\r")
    terminal.until("kvctl 0")
    terminal.until(PROMPT)


@pytest.mark.slow
def test_kvtop_leaves_no_thread_in_the_shell(terminal):
    tasks = Path(f"/proc/{terminal.process.pid}/task")
    before = len(list(tasks.iterdir()))
    for _ in range(2):
        terminal.type("kvtop\r")
        terminal.until(SCREEN_BEGINS)
        terminal.type("q")
        terminal.until(SCREEN_ENDS)
        terminal.until(PROMPT)
    terminal.type("version\r")  # and no thread takes the keys
    terminal.until("kvctl 0")
    wait_until(lambda: len(list(tasks.iterdir())) == before)


@pytest.mark.slow
def test_tab_completes_commands_options_and_names(terminal, owner):
    terminal.type("vers\t\r")
    terminal.until("kvctl 0")
    terminal.until(PROMPT)
    terminal.type(f"limit {owner.name[:-2]}\t1G --wa\t300\r")
    terminal.until(f"{owner.name}: limit 1.00 GiB (1073741824 bytes) applied")


@pytest.mark.slow
def test_history_is_private_and_restored(state, owner):
    path = state / "kvelastic" / "kvctl_history"
    with Terminal([KVCTL, "shell"], XDG_STATE_HOME=str(state)) as first:
        first.until(PROMPT)
        for line in (f"list {owner.name}", "version", "version", "  "):
            first.type(f"{line}\r")
            first.until(PROMPT)
        # At once, not at the end: a shell that is killed has lost nothing.
        assert path.read_text().splitlines() == [f"list {owner.name}", "version"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    with Terminal([KVCTL, "shell"], XDG_STATE_HOME=str(state)) as second:
        second.until(PROMPT)
        second.type("\x10\x10\r")  # Ctrl-P twice: the line before the last
        second.until("applied")  # the table again, and not the version


def test_world_readable_history_is_made_private(state):
    path = state / "kvelastic" / "kvctl_history"
    path.parent.mkdir(parents=True)
    path.write_text("version\n")
    path.chmod(0o644)
    with Terminal([KVCTL, "shell"], XDG_STATE_HOME=str(state)) as terminal:
        terminal.until(PROMPT)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_unwritable_history_warns_and_shell_continues(state):
    state.write_text("in the way")
    with Terminal([KVCTL, "shell"], XDG_STATE_HOME=str(state)) as terminal:
        assert "no history is kept" in terminal.until(PROMPT)
        terminal.type("version\r")
        terminal.until("kvctl 0")


@pytest.mark.parametrize(
    ("environ", "path"),
    [
        ({"XDG_STATE_HOME": "/some/where"}, "/some/where/kvelastic/kvctl_history"),
        ({"HOME": "/home/x"}, "/home/x/.local/state/kvelastic/kvctl_history"),
        (
            {"XDG_STATE_HOME": "relative", "HOME": "/home/x"},
            "/home/x/.local/state/kvelastic/kvctl_history",
        ),
    ],
)
def test_history_path_follows_xdg_state_home(monkeypatch, environ, path):
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert history_path() == Path(path)


@pytest.mark.parametrize(
    ("before", "word", "some", "none"),
    [
        ("", "", {"list", "limit", "set", "help", "exit", "quit"}, {"shell", "--help"}),
        ("", "lim", {"limit", "limit-percent"}, {"list", "exit"}),
        ("help ", "l", {"limit", "list"}, {"help"}),
        ("set x ", "--", {"--min", "--limit", "--priority", "--wait"}, {"list"}),
        ("completion ", "", {"bash", "zsh", "fish"}, {"list"}),
        ("list; ", "", set(), {"list"}),
        ("limit 'a ", "", set(), {"list"}),
    ],
)
def test_completions(before, word, some, none):
    found = set(Shell(main).complete(before, word))
    assert some <= found
    assert not none & found


def test_names_with_punctuation_are_completed(owner):
    with Owner(f"{owner.name}:a@b") as other:
        found = Shell(main).complete("trim ", f"{owner.name}:")
        assert found == [other.name]
