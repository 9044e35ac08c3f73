"""Exit codes, and the line on stderr of a command that did not do what was asked."""

from __future__ import annotations

import sys
from typing import Final, NoReturn

from kvelastic.cli.saying import say

EXIT_FAILED: Final = 1
"""No such segment, refused, or not possible."""
EXIT_USAGE: Final = 2
"""Wrong usage: nothing was changed."""
EXIT_TIMED_OUT: Final = 3
"""The time of --wait was over first."""


def fail(message: str, code: int = EXIT_FAILED) -> NoReturn:
    """End the command with `Error: message` on stderr and that exit code (raises SystemExit)."""
    say(f"Error: {message}", err=True)
    sys.exit(code)


def say_pending(who: str, wait_s: float | None, *, as_json: bool) -> None:
    """Say that a request to `who` has no answer: an error only to those who waited for one.

    With `as_json` the object that was printed says so to the others.
    """
    text = f"{who} has not answered yet; the request stays"
    if wait_s is not None:
        fail(f"{text}, and it was not acknowledged within {wait_s:g} s.", EXIT_TIMED_OUT)
    if not as_json:
        say(f"{text}.")


def fall_short(message: str, wait_s: float | None, code: int) -> None:
    """Say what was not reached: an error, with that exit code, only to those who waited for it."""
    if wait_s is None:
        say(f"{message}.")
        return
    waited = f" within {wait_s:g} s" if code == EXIT_TIMED_OUT else ""
    fail(f"{message}{waited}.", code)
