"""kvctl in this process, with its exit code and streams.

assert kvctl("list", "--json").exit_code == 0
"""

from __future__ import annotations

from click.testing import CliRunner, Result

from kvelastic.cli.kvctl import main


def kvctl(*arguments: str) -> Result:
    """Fails where the command raises anything but its exit."""
    result = CliRunner().invoke(main, list(arguments))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result
