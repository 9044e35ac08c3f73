"""Prints the output of commands. All text for a terminal goes through this module.

    print_lines(f"Deleted {name}.")          # one line each, whatever is in it
    print_lines(*table(rows).split("\\n"))
    print_json(answer)

Names, models and reasons may come from other users. Unprintable characters in them, such as the ESC
of a terminal command or a newline, are replaced.
"""

from __future__ import annotations

import click


def print_lines(*lines: str, err: bool = False) -> None:
    """Print each line on stdout, or on stderr with `err`."""
    from kvelastic.instance.row import printable

    click.echo("\n".join(map(printable, lines)), err=err)


def print_styled(text: str) -> None:
    """Print coloured text on stdout. The caller must have made all text in it printable."""
    click.echo(text)


def print_json(value: object, *, indent: int | None = 2) -> None:
    """Print a value as JSON on stdout, in ASCII."""
    import json

    click.echo(json.dumps(value, indent=indent))
