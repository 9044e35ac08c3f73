"""The command class of kvelastic's programs: they exit with 1 if stdout cannot be written.

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

_OF_OUTPUT: Final = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF}


class Program(click.Command):
    """A command that reports output errors, for example of a full disk."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run the command. In standalone mode, report a stdout that cannot be written."""
        if not kwargs.get("standalone_mode", True):
            return super().main(*args, **kwargs)
        if sys.stdout is None:
            # The caller closed it (`>&-`). A write to this file fails, as in other programs.
            sys.stdout = os.fdopen(os.open(os.devnull, os.O_RDONLY), "w")
        with _reported_output_errors():
            return super().main(*args, **kwargs)


@contextmanager
def _reported_output_errors() -> Iterator[None]:
    try:
        try:
            yield
        finally:
            # Python would flush at exit, print a traceback and exit with 120.
            sys.stdout.flush()
    except BrokenPipeError:
        raise  # the reader of the pipe has ended; click exits quietly
    except OSError as error:
        if not is_of_output(error):
            raise
        with suppress(OSError):  # discards what the buffer holds
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        click.echo(f"Error: the output cannot be written: {error.strerror or error}.", err=True)
        sys.exit(1)


def is_of_output(error: OSError) -> bool:
    """Return whether the error comes from writing to stdout: it has no file name.

    Errors of segments and ledgers are `KvelasticError`.
    """
    return error.filename is None and error.errno in _OF_OUTPUT
