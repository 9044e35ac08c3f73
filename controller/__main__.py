"""The command kvelastic-controller, also `kvctl serve` and `python -m kvelastic.controller`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import NoReturn

import click

from kvelastic import __version__
from kvelastic.cli.program import Program
from kvelastic.errors import KvelasticError

EXIT_FAILED = 1
EXIT_USAGE = 2


@click.command(
    "serve",  # its name in kvctl; as a program it has the program's name
    cls=Program,
    context_settings={"help_option_names": ["-h", "--help"]},
    short_help="Run the controller: one HTTP front over many models.",
)
@click.option(
    "--config",
    "-c",
    "path",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="The configuration, YAML (docs/controller.md).",
)
@click.option("--check", is_flag=True, help="Check the configuration and start nothing.")
@click.option("--schema", is_flag=True, help="Print the configuration's JSON schema.")
@click.version_option(__version__, message="kvelastic-controller %(version)s")
def main(path: Path | None, check: bool, schema: bool) -> None:
    """One OpenAI front over many models: their traffic, memory, sleep and wake.

    Exit codes: 0 ended as asked; 1 it could not listen; 2 the configuration is wrong.
    """
    try:
        from kvelastic.controller.settings import settings_file
        from kvelastic.controller.settings.named_files import programs_not_found
        from kvelastic.controller.settings.settings_warnings import warnings_of
    except ImportError as error:
        _fail(f"{error}: the controller needs `pip install kvelastic[controller]`", EXIT_FAILED)
    if schema:
        click.echo(json.dumps(settings_file.json_schema(), indent=2))
        return
    if path is None:
        _fail("--config FILE is needed", EXIT_USAGE)
    try:
        if check:
            settings = settings_file.load(path)
            count = len(settings.models)
            click.echo(f"{path}: {count} model{'' if count == 1 else 's'}: configuration valid.")
            for warning in (*warnings_of(settings), *programs_not_found(settings, os.environ)):
                click.echo(f"Warning: {warning}", err=True)
            return
        from kvelastic.controller.server import run

        sys.exit(run(path))
    except KvelasticError as error:
        _fail(str(error), EXIT_USAGE)


def _fail(message: str, code: int) -> NoReturn:
    click.echo(f"Error: {message}", err=True)
    sys.exit(code)


if __name__ == "__main__":
    main(prog_name="kvelastic-controller")
