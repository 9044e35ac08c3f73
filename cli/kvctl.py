"""kvctl: shows the instances of this machine and changes their limits while they run.

This module has the command group and the parts common to all commands. Each topic's commands are in
their own file. Exit codes: 0 done; 1 no such segment, refused, or not possible; 2 wrong usage,
nothing changed; 3 the time of --wait ended. Every command is a new process, so slow imports are
made only where they are used.
"""

from __future__ import annotations

import copy
from importlib import import_module
from typing import Any, Final

import click

from kvelastic import __version__
from kvelastic.cli.program import Program
from kvelastic.cli.rendering.exit_codes import EXIT_USAGE, fail
from kvelastic.cli.rendering.printing import print_json, print_lines
from kvelastic.cli.segment_lookup import known_names
from kvelastic.errors import InvalidArgumentError, KvelasticError, SegmentNotFoundError

_COMMANDS: Final = {
    "capacity": "commands.capacity.capacity_command",
    "completion": "commands.completion.completion_command",
    "delete": "commands.housekeeping.delete_command",
    "devices": "commands.devices.devices_command",
    "doctor": "commands.doctor.doctor_command",
    "explain": "commands.explain.explain_command",
    "gc": "commands.housekeeping.gc_command",
    "kvtop": "kvtop.command.kvtop_command",
    "limit": "commands.limits.limit_command",
    "limit-percent": "commands.limits.limit_percent_command",
    "links": "commands.links.links_command",
    "list": "commands.listing.list_command",
    "metrics": "commands.metrics.metrics_command",
    "serve": ".controller.__main__.main",
    "set": "commands.limits.set_command",
    "shell": "commands.shell.shell_command",
    "sleep": "commands.sleeping.sleep_command",
    "stats": "commands.stats.stats_command",
    "tiers": "commands.tiers.tiers_command",
    "trim": "commands.limits.trim_command",
    "wake": "commands.sleeping.wake_command",
    "watch": "commands.listing.watch_command",
}
"""Each command's module and function in `kvelastic.cli`; a leading dot: in `kvelastic`.

Only the command that runs is imported.
"""
_REMOTE: Final = ("limit", "limit-percent", "list", "set", "sleep", "trim", "wake", "watch")
"""The commands that call a controller with `--address`."""


class KvctlGroup(Program, click.Group):
    """Imports commands on demand, and turns errors into an error line and an exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return all names in alphabetical order."""
        return sorted({*super().list_commands(ctx), *_COMMANDS})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return the command; None for an unknown name.

        Raises `UsageError` for a command that reads this machine only, with `--address`.
        """
        place = _COMMANDS.get(cmd_name)
        is_remote = ctx.params.get("address") is not None
        if is_remote and cmd_name not in _REMOTE and (place or cmd_name in self.commands):
            raise click.UsageError(
                f"{cmd_name!r} reads this machine only; with --address there are"
                f" {', '.join(_REMOTE)}.",
                ctx,
            )
        if place is None:
            return super().get_command(ctx, cmd_name)
        module, _, name = place.rpartition(".")
        command = getattr(import_module(f".{module}", "kvelastic.cli"), name)
        assert isinstance(command, click.Command)
        if is_remote and cmd_name in {"sleep", "wake"}:  # the controller itself waits for these
            command = copy.copy(command)
            command.params = [one for one in command.params if one.name != "wait_s"]
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command; for an unknown name, suggest the nearest."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            from difflib import get_close_matches

            near = get_close_matches(args[0], self.list_commands(ctx), n=1)
            if near and not args[0].startswith("-") and "Did you mean" not in error.message:
                message = f"{error.message} Did you mean {near[0]!r}?"
                raise click.UsageError(message, ctx) from None
            raise

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
@click.option(
    "--address",
    metavar="URL",
    help="Call the controller, or the cluster's front, at http://HOST:PORT instead of this machine."
    " Its key is read from KVELASTIC_CONTROLLER_KEY.",
)
def main(address: str | None) -> None:
    """Show kvelastic's instances and change their memory limits while they run."""


@main.command("version")
@click.option("--json", "as_json", is_flag=True, help="Print an object.")
def version_command(as_json: bool) -> None:
    """Print the version."""
    if as_json:
        print_json({"version": __version__})
    else:
        print_lines(f"kvctl {__version__}")


if __name__ == "__main__":
    main(prog_name="kvctl")
