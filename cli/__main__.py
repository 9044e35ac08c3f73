"""`python -m kvelastic.cli` is `kvctl`."""

from __future__ import annotations

from kvelastic.cli.kvctl import main

if __name__ == "__main__":
    main(prog_name="kvctl")
