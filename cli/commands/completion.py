"""`kvctl completion`: prints the shell script that completes commands, options and names."""

from __future__ import annotations

import click

from kvelastic.cli.rendering.printing import print_lines


@click.command("completion", short_help="Print the completion script of a shell.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion_command(ctx: click.Context, shell: str) -> None:
    """Print a shell's script that completes commands, options and instance names.

    \b
    bash:  eval "$(kvctl completion bash)"       in ~/.bashrc
    zsh:   eval "$(kvctl completion zsh)"        in ~/.zshrc, after compinit
    fish:  kvctl completion fish >~/.config/fish/completions/kvctl.fish
    """
    from click.shell_completion import get_completion_class

    generator = get_completion_class(shell)
    if generator is None:
        raise click.UsageError(f"this version of click writes no script for {shell}.")
    # Always use kvctl's names, even if this process was started under another name.
    script = generator(ctx.find_root().command, {}, "kvctl", "_KVCTL_COMPLETE").source()
    print_lines(*script.strip().split("\n"))
