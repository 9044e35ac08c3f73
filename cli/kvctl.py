"""kvctl: look at the instances of this machine and change their limits while they run.

The group, and what is common to all commands; each topic's commands are in a file of their own.
Exit codes: 0 done; 1 no such segment, refused, or not possible; 2 wrong usage, nothing changed;
3 the time of --wait was over. What takes long to import is imported where it is used: every
command is a process of its own.
"""

from __future__ import annotations

from typing import Any

import click

from kvelastic import __version__
from kvelastic.cli.completion import completion_command
from kvelastic.cli.devices import devices_command
from kvelastic.cli.doctor import doctor_command
from kvelastic.cli.endings import EXIT_USAGE, fail
from kvelastic.cli.finding import known_names
from kvelastic.cli.housekeeping import delete_command, gc_command
from kvelastic.cli.kvtop.command import kvtop_command
from kvelastic.cli.looks import explain_command, list_command, stats_command, watch_command
from kvelastic.cli.metrics import metrics_command
from kvelastic.cli.serve import serve_command
from kvelastic.cli.shell import shell_command
from kvelastic.cli.wishes import limit_command, limit_percent_command, set_command, trim_command
from kvelastic.errors import InvalidArgumentError, KvelasticError, SegmentNotFoundError


class KvctlGroup(click.Group):
    """Turns the errors of kvelastic into a line on stderr and an exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except SegmentNotFoundError as error:
            fail(f"{error}. {known_names()}")
        except InvalidArgumentError as error:
            fail(str(error), EXIT_USAGE)
        except KvelasticError as error:
            fail(str(error))


@click.group(
    cls=KvctlGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog='Shell completion: eval "$(kvctl completion bash)" (or zsh, fish).',
)
@click.version_option(__version__, message="kvctl %(version)s")
def main() -> None:
    """Look at kvelastic's instances and change their memory limits while they run."""


@main.command("version")
@click.option("--json", "as_json", is_flag=True, help="Print an object.")
def version_command(as_json: bool) -> None:
    """Print the version."""
    if as_json:
        import json

        click.echo(json.dumps({"version": __version__}))
    else:
        click.echo(f"kvctl {__version__}")


main.add_command(completion_command)
main.add_command(delete_command)
main.add_command(devices_command)
main.add_command(doctor_command)
main.add_command(explain_command)
main.add_command(gc_command)
main.add_command(kvtop_command)
main.add_command(limit_command)
main.add_command(limit_percent_command)
main.add_command(list_command)
main.add_command(metrics_command)
main.add_command(serve_command)
main.add_command(set_command)
main.add_command(shell_command)
main.add_command(stats_command)
main.add_command(trim_command)
main.add_command(watch_command)

if __name__ == "__main__":
    main(prog_name="kvctl")
