"""What every program of kvelastic does where its output cannot be written: one line, exit code 1.

@click.command(cls=Program)       # or a class that derives from it
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

import click

from kvelastic.cli.exit_codes import fail

_OF_OUTPUT: Final = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF}


class Program(click.Command):
    """A program whose output may go to a disk that is full."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run it; as a program of its own it says itself that stdout cannot be written."""
        if not kwargs.get("standalone_mode", True):
            return super().main(*args, **kwargs)
        if sys.stdout is None:
            # It was closed (`>&-`). Here a write fails as in other programs, and commands that ask
            # what stdout is need not think of None.
            sys.stdout = os.fdopen(os.open(os.devnull, os.O_RDONLY), "w")
        with _told_of_broken_stdout():
            return super().main(*args, **kwargs)


@contextmanager
def _told_of_broken_stdout() -> Iterator[None]:
    try:
        try:
            yield
        finally:
            # Before Python does it, which would print a traceback of its own and exit with 120.
            sys.stdout.flush()
    except BrokenPipeError:
        raise  # nobody reads any more, and nobody needs to be told
    except OSError as error:
        if not is_of_output(error):
            raise
        with suppress(OSError):  # what is still in the buffer goes nowhere
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        fail(f"the output cannot be written: {error.strerror or error}.")


def is_of_output(error: OSError) -> bool:
    """Whether it came of writing what a command prints: kvctl writes to nothing else.

    It names no file, and what was asked of a segment or a ledger raises a `KvelasticError`.
    """
    return error.filename is None and error.errno in _OF_OUTPUT
