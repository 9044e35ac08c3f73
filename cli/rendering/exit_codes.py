"""Exit codes, and the error line of a command that failed."""

from __future__ import annotations

import sys
from typing import Final, NoReturn

from kvelastic.cli.rendering.printing import print_lines

EXIT_FAILED: Final = 1
"""The segment does not exist, or the request was refused or is not possible."""
EXIT_USAGE: Final = 2
"""Wrong usage: nothing was changed."""
EXIT_TIMED_OUT: Final = 3
"""The time of --wait ended first."""


def fail(message: str, code: int = EXIT_FAILED) -> NoReturn:
    """Print `Error: message` on stderr and raise SystemExit with the exit code."""
    print_lines(f"Error: {message}", err=True)
    sys.exit(code)


def print_pending(who: str, wait_s: float | None, *, as_json: bool) -> None:
    """Report that a request to `who` has no answer yet. It is an error only with --wait.

    With `as_json` and without --wait nothing is printed: the printed object has the state.
    """
    text = f"{who} has not answered yet; the request stays"
    if wait_s is not None:
        fail(f"{text}, and it was not acknowledged within {wait_s:g} s.", EXIT_TIMED_OUT)
    if not as_json:
        print_lines(f"{text}.")


def fall_short(message: str, wait_s: float | None, code: int) -> None:
    """Report an incomplete result. It is an error with the given exit code only with --wait."""
    if wait_s is None:
        print_lines(f"{message}.")
        return
    waited = f" after {wait_s:g} s" if code == EXIT_TIMED_OUT else ""
    fail(f"{message}{waited}.", code)
