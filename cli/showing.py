"""A group of commands that shows something where its first word is none of them."""

from __future__ import annotations

import click
from click.shell_completion import CompletionItem


class ShowingGroup(click.Group):
    """Puts `show` before what is not the name of a command: an argument of it, or nothing."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click's, with `show` put in."""
        is_command = bool(args) and args[0] in {*self.commands, "-h", "--help"}
        # A shell that completes the first word wants the commands, too.
        if not is_command and not (ctx.resilient_parsing and not args):
            args = ["show", *args]
        return super().parse_args(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Offer commands, and what `show` takes first."""
        shown = self.commands["show"].params[0]
        return [
            *super().shell_complete(ctx, incomplete),
            *shown.type.shell_complete(ctx, shown, incomplete),
        ]
