"""What a line of `kvctl shell` means: the words of one command, or a refusal.

    words_of("limit 'my model' 2G") == ["limit", "my model", "2G"]
    words_of("list | wc")              # ShellSyntaxError: a pipe
    words_of("list  # all of them") == ["list"]

There is no system shell behind the lines, so what would mean something to one is an error and never
passed on: not as a command, and not as an argument either.
"""

from __future__ import annotations

import re
import shlex
from typing import Final

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


# What is between quotes, behind a backslash, or a comment is text to everybody.
_QUOTED: Final = re.compile(r"""\\.|'[^']*'|"(?:\\.|[^"\\])*"|#.*""")


class ShellSyntaxError(ValueError):
    """The line is no command: it has a sign of system shells, or a quote that is not closed."""


def words_of(line: str) -> list[str]:
    """The words of a line: quotes and backslash as in sh, `#` begins a comment.

    Raises `ShellSyntaxError`.
    """
    for sign in _QUOTED.sub("", line):
        if sign in _REFUSED:
            raise ShellSyntaxError(f"{sign!r} is refused: {_REFUSED[sign]}.")
    try:
        return shlex.split(line, comments=True)
    except ValueError as error:
        raise ShellSyntaxError(f"{str(error).lower()}.") from error
