"""`kvctl shell`: kvctl's commands one after another, and nothing but them.

Each line is run as the same command would be on its own, in this process. Nothing is ever handed to
a system shell: anything but a command of kvctl is an error.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

import click

from kvelastic.cli.exit_codes import EXIT_FAILED, EXIT_USAGE

if TYPE_CHECKING:
    from kvelastic.cli.shell_input import Source

EXIT_INTERRUPTED: Final = 130
"""Of a command ended by Ctrl-C, as in other shells."""

_OWN_WORDS: Final = ("help", "exit", "quit")
_OWN_HELP: Final = (
    "Here without `kvctl` in front. Also: `help [COMMAND]`, `exit` or `quit` or Ctrl-D to leave;\n"
    "Ctrl-C ends the command that runs. A line is not run by a system shell: no pipes, no `;`."
)


@click.command("shell", short_help="Commands one after another, with history and completion.")
@click.pass_context
def shell_command(ctx: click.Context) -> None:
    """Read commands from the terminal or from a pipe, and run them one after another.

    On a terminal with completion (Tab) and a history. With commands on stdin the exit code is that
    of the last one that failed, 0 if none did. `#` begins a comment.
    """
    from kvelastic.cli.shell_input import Piped, Typed, is_interactive

    group = ctx.find_root().command
    assert isinstance(group, click.Group)
    shell = Shell(group)
    if is_interactive():
        click.echo("kvctl's commands without `kvctl` in front; `help` lists them, Ctrl-D ends.")
        shell.run(Typed("kvctl> ", shell.complete), goes_on_after_ctrl_c=True)
        return
    sys.exit(shell.run(Piped(), goes_on_after_ctrl_c=False))


class Shell:
    """Runs the commands of a click group line by line."""

    def __init__(self, group: click.Group) -> None:
        self._group = group

    def run(self, source: Source, *, goes_on_after_ctrl_c: bool) -> int:
        """Run the lines until they end, or `exit`; the exit code of the last that failed, or 0."""
        failed = 0
        while True:
            try:
                line = source.read()
            except KeyboardInterrupt:
                click.echo()
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
        """Run one line and return its exit code; None where it says to leave."""
        from kvelastic.cli.shell_words import ShellSyntaxError, words_of

        try:
            words = words_of(line)
        except ShellSyntaxError as error:
            click.echo(f"Error: {error}", err=True)
            return EXIT_USAGE
        # Lines are pasted from pages where they begin with the program's name.
        if words[:1] == ["kvctl"]:
            words = words[1:]
        if not words:
            return 0
        if words[0] in {"exit", "quit"}:
            return None
        if words[0] == "shell":
            click.echo("Error: this is the shell already; `exit` leaves it.", err=True)
            return EXIT_USAGE
        if words[0] == "help":
            if len(words) == 1:
                code = self._run_command(["--help"])
                click.echo(f"\n{_OWN_HELP}")
                return code
            words = [*words[1:], "--help"]
        return self._run_command(words)

    def _run_command(self, words: list[str]) -> int:
        """Run it as the program would, except that whatever happens ends only the command."""
        try:
            # A command that ends early by click's own means (--help) returns its exit code.
            result = self._group.main(words, prog_name="kvctl", standalone_mode=False)
            code = result if isinstance(result, int) else 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else EXIT_FAILED if end.code else 0
        except click.ClickException as error:
            error.show()
            code = error.exit_code
        except (click.Abort, KeyboardInterrupt):
            click.echo("Interrupted.", err=True)
            code = EXIT_INTERRUPTED
        except BrokenPipeError:
            raise  # nobody reads any more: the shell ends as every command does then
        except Exception:
            import traceback

            traceback.print_exc()
            code = EXIT_FAILED
        sys.stdout.flush()  # in step with stderr, also in a pipe
        return code

    def complete(self, before: str, word: str) -> list[str]:
        """What `word`, typed after `before`, may become; completed as a shell's Tab would."""
        from click.shell_completion import ShellComplete

        from kvelastic.cli.shell_words import ShellSyntaxError, words_of

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
