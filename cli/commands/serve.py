"""`kvctl serve`: the controller under kvctl's name."""

from __future__ import annotations

import click


@click.command("serve", short_help="Run the controller: one HTTP front over many models.")
@click.option(
    "--config", "-c", "path", required=True, metavar="FILE", help="See docs/controller.md."
)
def serve_command(path: str) -> None:
    """Run the controller with the configuration FILE, until SIGTERM (kvelastic[controller])."""
    from kvelastic.controller.__main__ import main as controller

    controller.main(["--config", path], prog_name="kvctl serve")
