"""A command group that runs `show` if the first word is not one of its commands."""

from __future__ import annotations

import click
from click.shell_completion import CompletionItem


class ShowingGroup(click.Group):
    """Inserts `show` if the first word is not a command, or if there is no word."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments, with `show` inserted if needed."""
        is_command = bool(args) and args[0] in {*self.commands, "-h", "--help"}
        # Completion of the first word must offer the commands too.
        if not is_command and not (ctx.resilient_parsing and not args):
            args = ["show", *args]
        return super().parse_args(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return completions: the commands, and values of the first argument of `show`."""
        shown = self.commands["show"].params[0]
        return [
            *super().shell_complete(ctx, incomplete),
            *shown.type.shell_complete(ctx, shown, incomplete),
        ]
