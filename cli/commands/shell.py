"""`kvctl shell`: runs kvctl's commands line by line, and no other commands.

Each line runs in this process like the same command on its own. There is no system shell, so syntax
of system shells is an error. It is never passed on, neither as a command nor as an argument.

    words_of("limit 'my model' 2G") == ["limit", "my model", "2G"]
    words_of("list | wc")              # ShellSyntaxError: a pipe

Lines come from a terminal, with history and completion, or from a pipe.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

import click

from kvelastic.cli.rendering.exit_codes import EXIT_FAILED, EXIT_USAGE
from kvelastic.cli.rendering.printing import print_lines

EXIT_INTERRUPTED: Final = 130
"""Exit code of a command ended by Ctrl-C, as in other shells."""

_OWN_WORDS: Final = ("help", "exit", "quit")
_OWN_HELP: Final = (
    "Here without `kvctl` in front. Also: `help [COMMAND]`, `exit` or `quit` or Ctrl-D to leave;\n"
    "Ctrl-C ends the command that runs. A line is not run by a system shell: no pipes, no `;`."
)


@click.command("shell", short_help="Run several commands, with history and completion.")
@click.pass_context
def shell_command(ctx: click.Context) -> None:
    """Read commands from the terminal or from a pipe, and run them one after another.

    A terminal has completion (Tab) and a history. With commands on stdin the exit code is that
    of the last failed command, or 0. `#` begins a comment.
    """
    group = ctx.find_root().command
    assert isinstance(group, click.Group)
    shell = Shell(group)
    if sys.stdin.isatty() and sys.stdout.isatty():
        print_lines("kvctl's commands without `kvctl` in front; `help` lists them, Ctrl-D ends.")
        shell.run(Typed("kvctl> ", shell.complete).read, goes_on_after_ctrl_c=True)
        return
    sys.exit(shell.run(_read_piped, goes_on_after_ctrl_c=False))


class Shell:
    """Runs the commands of a click group line by line."""

    def __init__(self, group: click.Group) -> None:
        self._group = group

    def run(self, read: Callable[[], str | None], *, goes_on_after_ctrl_c: bool) -> int:
        """Run the lines that `read` returns, until None or `exit`.

        Returns the exit code of the last failed line, or 0.
        """
        failed = 0
        while True:
            try:
                line = read()
            except KeyboardInterrupt:
                print_lines("")
                if goes_on_after_ctrl_c:
                    continue
                return EXIT_INTERRUPTED
            if line is None:
                return failed
            code = self.run_line(line)
            if code is None:
                return failed
            if code == EXIT_INTERRUPTED and not goes_on_after_ctrl_c:
                return code
            failed = code or failed

    def run_line(self, line: str) -> int | None:
        """Run one line and return its exit code; None if it ends the shell."""
        try:
            words = words_of(line)
        except ShellSyntaxError as error:
            print_lines(f"Error: {error}", err=True)
            return EXIT_USAGE
        # Users paste lines from documentation that begin with the program's name.
        if words[:1] == ["kvctl"]:
            words = words[1:]
        if not words:
            return 0
        if words[0] in {"exit", "quit"}:
            return None
        if words[0] == "shell":
            print_lines("Error: this is the shell already; `exit` leaves it.", err=True)
            return EXIT_USAGE
        if words[0] == "help":
            if len(words) == 1:
                code = self._run_command(["--help"])
                print_lines("", *_OWN_HELP.split("\n"))
                return code
            words = [*words[1:], "--help"]
        return self._run_command(words)

    def _run_command(self, words: list[str]) -> int:
        """Run a command like the program, except that an error ends only the command."""
        try:
            # If click ends the command early (--help), the result is the exit code.
            result = self._group.main(words, prog_name="kvctl", standalone_mode=False)
            code = result if isinstance(result, int) else 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else EXIT_FAILED if end.code else 0
        except click.ClickException as error:
            error.show()
            code = error.exit_code
        except (click.Abort, KeyboardInterrupt):
            print_lines("Interrupted.", err=True)
            code = EXIT_INTERRUPTED
        except BrokenPipeError:
            raise  # the reader of the output is gone: end the shell, as any command would
        except Exception as error:
            from kvelastic.cli.program import is_of_output

            if isinstance(error, OSError) and is_of_output(error):
                raise  # the output of the next command would be lost too
            import traceback

            traceback.print_exc()
            code = EXIT_FAILED
        sys.stdout.flush()  # keep the order with stderr, in a pipe too
        return code

    def complete(self, before: str, word: str) -> list[str]:
        """Return the completions of `word`, typed after `before`."""
        from click.shell_completion import ShellComplete

        try:
            words = words_of(before)
        except ShellSyntaxError:
            return []
        if words[:1] == ["help"]:
            words = words[1:]
            own: tuple[str, ...] = ()
        else:
            own = () if words else _OWN_WORDS
        found = ShellComplete(self._group, {}, "kvctl", "").get_completions(words, word)
        names = [item.value for item in found if item.type == "plain" and item.value != "shell"]
        return sorted({*names, *(mine for mine in own if mine.startswith(word))})


# ------------------------------------------------------------------------- parsing of lines

_REFUSED: Final = {
    "!": "no other program is started from here",
    ";": "one line is one command",
    "|": "there are no pipes here",
    "&": "nothing runs in the background, and one line is one command",
    "<": "nothing is read from files here",
    ">": "nothing is written to files here",
    "`": "no other program is started from here",
    "$": "there are no variables here",
}


# Quoted text, escaped characters and comments, in which shell syntax has no meaning.
_QUOTED: Final = re.compile(r"""\\.|'[^']*'|"(?:\\.|[^"\\])*"|#.*""")


class ShellSyntaxError(ValueError):
    """The line is not a command: it has system shell syntax, or an unclosed quote."""


def words_of(line: str) -> list[str]:
    """Return the words of a line. Quotes and backslash work as in sh; `#` begins a comment.

    Raises `ShellSyntaxError`.
    """
    for sign in _QUOTED.sub("", line):
        if sign in _REFUSED:
            raise ShellSyntaxError(f"{sign!r} is refused: {_REFUSED[sign]}.")
    try:
        return shlex.split(line, comments=True)
    except ValueError as error:
        raise ShellSyntaxError(f"{str(error).lower()}.") from error


# ------------------------------------------------------------------------ sources of lines

_HISTORY_LINES: Final = 1000

Complete = Callable[[str, str], list[str]]
"""Returns the completions of a word: `complete(line_before_it, word)`."""


def _read_piped() -> str | None:
    """Return the next line of stdin; None at the end."""
    line = sys.stdin.readline()
    return line.rstrip("\n") if line else None


class Typed:
    """Lines typed at a prompt, edited with readline if this Python has it."""

    def __init__(self, prompt: str, complete: Complete) -> None:
        self._prompt = prompt
        self._complete = complete
        self._history: Path | None = None
        self._lines = 0
        self._matches: list[str] = []
        try:
            import readline
        except ImportError:
            return
        # Names may contain : @ + - . and must be completed as one word.
        readline.set_completer_delims(" \t\n")
        readline.set_completer(self._match)
        is_libedit = "libedit" in (readline.__doc__ or "")
        readline.parse_and_bind("bind ^I rl_complete" if is_libedit else "tab: complete")
        self._start_history()

    def read(self) -> str | None:
        """Return the next line; None at Ctrl-D. Raises `KeyboardInterrupt` at Ctrl-C."""
        try:
            line = input(self._prompt)
        except EOFError:
            print_lines("")  # end the prompt's line
            return None
        if line.strip():
            self._remember()
        return line

    def _match(self, word: str, state: int) -> str | None:
        """Return the match number `state` for readline's completer."""
        import readline

        if state == 0:
            before = readline.get_line_buffer()[: readline.get_begidx()]
            self._matches = self._complete(before, word)
            if len(self._matches) == 1:
                self._matches = [f"{self._matches[0]} "]
        return self._matches[state] if state < len(self._matches) else None

    def _start_history(self) -> None:
        import readline

        path = history_path()
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.fchmod(fd, 0o600)
            finally:
                os.close(fd)
            readline.set_history_length(_HISTORY_LINES)  # of the file
            readline.read_history_file(path)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            print_lines(f"Note: no history is kept: {path}: {reason}.", err=True)
            return
        self._history = path
        self._lines = readline.get_current_history_length()

    def _remember(self) -> None:
        """Append the line to the file immediately, so that concurrent shells keep each other's."""
        if self._history is None:
            return
        import readline

        # readline has added the line, unless it equals the previous one.
        lines = readline.get_current_history_length()
        if lines == self._lines:
            return
        self._lines = lines
        with suppress(OSError, AttributeError):  # libedit may lack append_history_file
            readline.append_history_file(1, self._history)


def history_path() -> Path:
    """Return `kvctl_history` in `$XDG_STATE_HOME/kvelastic` or `~/.local/state/kvelastic`."""
    state = os.environ.get("XDG_STATE_HOME", "")
    # The XDG base directory specification ignores a relative path.
    base = Path(state) if state.startswith("/") else Path("~/.local/state").expanduser()
    return base / "kvelastic" / "kvctl_history"
