"""Where the lines of `kvctl shell` come from: a terminal, with history and completion, or a pipe.

source = Typed("kvctl> ", complete) if is_interactive() else Piped()
while (line := source.read()) is not None: ...
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final, Protocol

import click

_HISTORY_LINES: Final = 1000

Complete = Callable[[str, str], list[str]]
"""What the word that is being typed may become: `complete(line_before_it, word)`."""


def is_interactive() -> bool:
    """Whether somebody types the lines and sees what comes of them."""
    return sys.stdin.isatty() and sys.stdout.isatty()


class Source(Protocol):
    """Where lines come from."""

    def read(self) -> str | None:
        """The next line without its end; None when there is no more."""


class Piped:
    """The lines of stdin, without a prompt."""

    def read(self) -> str | None:
        """The next line; None at the end."""
        line = sys.stdin.readline()
        return line.rstrip("\n") if line else None


class Typed:
    """Lines typed at a prompt, edited with readline where this Python has it."""

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
        # Names may hold : @ + - . and are one word all the same.
        readline.set_completer_delims(" \t\n")
        readline.set_completer(self._match)
        is_libedit = "libedit" in (readline.__doc__ or "")
        readline.parse_and_bind("bind ^I rl_complete" if is_libedit else "tab: complete")
        self._start_history()

    def read(self) -> str | None:
        """The next line; None at Ctrl-D. Raises `KeyboardInterrupt` at Ctrl-C."""
        try:
            line = input(self._prompt)
        except EOFError:
            click.echo()  # the prompt's line has no end yet
            return None
        if line.strip():
            self._remember()
        return line

    def _match(self, word: str, state: int) -> str | None:
        """The completer that readline asks for match after match."""
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
            readline.set_history_length(_HISTORY_LINES)  # in the file
            readline.read_history_file(path)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            click.echo(f"Note: no history is kept: {path}: {reason}.", err=True)
            return
        self._history = path
        self._lines = readline.get_current_history_length()

    def _remember(self) -> None:
        """Append the line at once, so that shells side by side lose nothing of each other's."""
        if self._history is None:
            return
        import readline

        # readline has added the line, unless it is the same as the one before.
        lines = readline.get_current_history_length()
        if lines == self._lines:
            return
        self._lines = lines
        with suppress(OSError, AttributeError):  # libedit may have no append
            readline.append_history_file(1, self._history)


def history_path() -> Path:
    """`kvctl_history` in `$XDG_STATE_HOME/kvelastic`, or in `~/.local/state/kvelastic`."""
    state = os.environ.get("XDG_STATE_HOME", "")
    # A relative path counts as none, by the XDG base directory specification.
    base = Path(state) if state.startswith("/") else Path("~/.local/state").expanduser()
    return base / "kvelastic" / "kvctl_history"
