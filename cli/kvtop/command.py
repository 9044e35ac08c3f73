"""The command line of kvtop, which is also `kvctl kvtop`."""

from __future__ import annotations

import sys
from typing import Any

import click

from kvelastic import __version__
from kvelastic.cli.arguments import NameType, SecondsType
from kvelastic.cli.program import Program
from kvelastic.cli.rendering.exit_codes import fail
from kvelastic.cli.rendering.printing import print_lines
from kvelastic.cli.segment_lookup import known_names, own_names, sweep
from kvelastic.errors import KvelasticError, SegmentNotFoundError

_PIPE_COLUMNS = 120
_USUAL_INTERVAL_S = 1.0


class KvtopCommand(Program):
    """Reports errors of kvelastic as a line on stderr, like kvctl."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except SegmentNotFoundError as error:
            fail(f"{error}. {known_names()}")
        except KvelasticError as error:
            fail(f"{error}.")


@click.command(
    "kvtop",
    cls=KvtopCommand,
    short_help="Watch devices and instances, and change limits by keys.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.argument("names", metavar="[NAME]...", nargs=-1, type=NameType())
@click.option(
    "-n",
    "--interval",
    "--refresh",
    "interval_s",
    type=SecondsType(0.1),
    metavar="SECONDS",
    help=f"Time between two refreshes.  [default: {_USUAL_INTERVAL_S:g}]",
)
@click.option("--once", is_flag=True, help="Print one plain screen and end.")
@click.version_option(__version__, message="kvtop %(version)s")
def kvtop_command(names: tuple[str, ...], interval_s: float | None, once: bool) -> None:
    """Show the devices and instances of this machine live on one screen.

    Keys select an instance and change its limit, guarantee or priority; ? lists the keys. With
    NAMEs only these instances and their devices are shown.

    --once prints to stdout, for pipes. With --interval it reads twice and shows rates.
    """
    if names:
        sweep()
        names = own_names(names)  # an unknown name is an error now, instead of an empty screen
    if once:
        print_lines(*_once(names, interval_s).split("\n"))
        return
    from kvelastic.cli.kvtop.app import run

    run(names, interval_s or _USUAL_INTERVAL_S)


def _once(names: tuple[str, ...], interval_s: float | None) -> str:
    import shutil
    import time

    from kvelastic.cli.kvtop.history import Model
    from kvelastic.cli.kvtop.poller import look
    from kvelastic.cli.kvtop.text import ASCII, UNICODE, has_blocks
    from kvelastic.cli.kvtop.view import plain_screen

    model = Model()
    scene = model.add(look(names))
    if interval_s is not None:
        time.sleep(interval_s)
        scene = model.add(look(names))
    glyphs = UNICODE if has_blocks(sys.stdout.encoding or "ascii") else ASCII
    return plain_screen(scene, shutil.get_terminal_size((_PIPE_COLUMNS, 24)).columns, glyphs)


def main() -> None:
    """Run kvtop as a program."""
    kvtop_command(prog_name="kvtop")
