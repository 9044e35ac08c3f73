"""Where tables are shown: once, or again and again; on a terminal or into a pipe."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable

from kvelastic.cli.saying import say, say_json
from kvelastic.cli.tables import plain_table, rich_table
from kvelastic.instance.row import Row


def show(rows: list[Row]) -> None:
    """Print one table to stdout, in colour where that is a terminal."""
    if not _is_terminal():
        say(*plain_table(rows).split("\n"))
        return
    from rich.console import Console

    console = Console(highlight=False)
    console.print(rich_table(rows, console.width, ascii_only=_is_ascii()))


def watch(
    look: Callable[[], list[Row]],
    interval_s: float,
    count: int | None = None,
    *,
    as_json: bool = False,
) -> None:
    """Show what `look` finds every `interval_s` seconds, `count` times or until Ctrl-C."""
    try:
        if as_json:
            _watch_json(look, interval_s, count)
        elif _is_terminal():
            _watch_terminal(look, interval_s, count)
        else:
            _watch_pipe(look, interval_s, count)
    except KeyboardInterrupt:
        pass  # the way to end it


def _watch_json(look: Callable[[], list[Row]], interval_s: float, count: int | None) -> None:
    def once() -> None:
        say_json(look(), indent=None)
        sys.stdout.flush()

    _repeat(once, interval_s, count)


def _watch_pipe(look: Callable[[], list[Row]], interval_s: float, count: int | None) -> None:
    def once() -> None:
        say(f"# {time.strftime('%H:%M:%S')}", *plain_table(look()).split("\n"), "")
        sys.stdout.flush()

    _repeat(once, interval_s, count)


def _watch_terminal(look: Callable[[], list[Row]], interval_s: float, count: int | None) -> None:
    from rich.console import Console
    from rich.live import Live

    console = Console(highlight=False)
    ascii_only = _is_ascii()  # before Live puts a stdout of its own in place
    with Live(console=console, auto_refresh=False, vertical_overflow="ellipsis") as live:

        def once() -> None:
            # The width is asked for each time: the window may have been resized.
            table = rich_table(look(), shutil.get_terminal_size().columns, ascii_only=ascii_only)
            live.update(table, refresh=True)

        _repeat(once, interval_s, count)


def _repeat(once: Callable[[], None], interval_s: float, count: int | None) -> None:
    """Call `once` at equal distances, however long it takes itself."""
    start, done = time.monotonic(), 0
    while True:
        once()
        done += 1
        if count is not None and done >= count:
            return
        passed_s = time.monotonic() - start
        time.sleep(max(interval_s - passed_s % interval_s, 0.0))


def _is_terminal() -> bool:
    return sys.stdout.isatty()


def _is_ascii() -> bool:
    """Whether the terminal's encoding lacks the glyphs of the bars."""
    try:
        "█▓▒·".encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return True
    return False
