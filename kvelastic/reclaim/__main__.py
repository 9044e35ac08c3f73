"""Replay a trace of arrivals by the policy of reclaim, and print who got what.

    python -m kvelastic.reclaim TRACE [--capacity 8G] [--json]
    python -m kvelastic.reclaim --example bursts

The command line only; `kvelastic.reclaim.simulation.simulate` does it. Exit codes: 0 done; 2 wrong
usage, or no trace.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Final

import click

from kvelastic.cli.arguments import SizeType
from kvelastic.cli.exit_codes import EXIT_USAGE, fail
from kvelastic.errors import InvalidArgumentError
from kvelastic.reclaim.examples import EXAMPLES, example_trace
from kvelastic.reclaim.report import report_table, summary
from kvelastic.reclaim.simulation import simulate
from kvelastic.reclaim.trace import Trace, load_trace

_PIPE_COLUMNS: Final = 180
"""Wide enough for all columns; a terminal folds them."""


class SimulatorCommand(click.Command):
    """Turns a file that is not a trace into a line on stderr and exit code 2."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run it."""
        try:
            return super().invoke(ctx)
        except InvalidArgumentError as error:
            fail(str(error), EXIT_USAGE)


@click.command(
    "python -m kvelastic.reclaim",
    cls=SimulatorCommand,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="The format of a TRACE and what the columns mean: docs/reclaim.md.",
)
@click.argument("trace", required=False, type=click.Path(path_type=Path))
@click.option("--example", type=click.Choice(list(EXAMPLES)), help="Replay an example instead.")
@click.option(
    "--capacity", "capacity_bytes", type=SizeType(), help="Of the device, if not its own."
)
@click.option("--json", "as_json", is_flag=True, help="Print one object (docs/reclaim.md).")
@click.option("--print-example", is_flag=True, help="Print the example as a TRACE, and end.")
def main(
    trace: Path | None,
    example: str | None,
    capacity_bytes: int | None,
    as_json: bool,
    print_example: bool,
) -> None:
    """Replay TRACE, a file, by the policy of reclaim: shared, and split into equal parts.

    Every model has two rows: one for a device that all share, and one for an equal, fixed part of
    its own.
    """
    if (trace is None) == (example is None):
        raise click.UsageError("give a TRACE or --example, one of the two.")
    if print_example and example is None:
        raise click.UsageError("--print-example needs --example.")
    if print_example and example is not None:
        click.echo(json.dumps(EXAMPLES[example].document, indent=2))
        return
    replayed = _find(trace, example, capacity_bytes)
    shared, split = simulate(replayed), simulate(replayed.split_evenly())
    if as_json:
        report = {
            "capacity_bytes": replayed.capacity_bytes,
            "shared": shared.as_dict(),
            "split": split.as_dict(),
        }
        click.echo(json.dumps(report, indent=2))
        return
    from rich.console import Console

    if example is not None:
        click.echo(EXAMPLES[example].what)
    width = None if sys.stdout.isatty() else _PIPE_COLUMNS
    Console(width=width).print(report_table(shared, split))
    click.echo(summary(shared, split))


def _find(trace: Path | None, example: str | None, capacity_bytes: int | None) -> Trace:
    if trace is not None:
        return load_trace(trace, capacity_bytes)
    assert example is not None
    return example_trace(example, capacity_bytes)


if __name__ == "__main__":
    main(prog_name="python -m kvelastic.reclaim")
