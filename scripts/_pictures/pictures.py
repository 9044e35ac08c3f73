"""The pictures of README, each of the real program: scripts/pictures."""

from __future__ import annotations

import argparse
from pathlib import Path

import dashboard_picture
import kvtop_picture
from load import PERIOD_S, Bursts, two_instances

FOLDER = Path(__file__).parents[2] / "docs" / "pictures"
PICTURES = ("kvtop", "dashboard")


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/pictures", description=__doc__)
    parser.add_argument("--only", choices=PICTURES, help="one of them (else all)")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where they are written")
    options = parser.parse_args()
    folder: Path = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    with two_instances() as (chat, code), Bursts(chat, code):
        if options.only != "dashboard":
            kvtop_picture.draw(folder / "kvtop.svg", 0.8 * PERIOD_S)
        if options.only != "kvtop":
            with (
                dashboard_picture.front(chat, code) as controller,
                dashboard_picture.requests(controller),
            ):
                dashboard_picture.draw(folder / "dashboard.png", controller, 2 * PERIOD_S)


if __name__ == "__main__":
    main()
