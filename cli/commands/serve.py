"""`kvctl serve`: the controller's command under kvctl's name."""

from __future__ import annotations

from kvelastic.controller.__main__ import main as serve_command

__all__ = ["serve_command"]
