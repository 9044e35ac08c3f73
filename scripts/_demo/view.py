"""The demo's live views: the use of memory, or the elapsed time.

A terminal shows one picture that stays in place. A pipe gets a line when the bar has changed, at
most `MOST_LINES` per view: each line needs a larger change than the previous one.
"""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Iterator
from itertools import repeat
from types import TracebackType
from typing import Any, NamedTuple

from kvelastic.errors import KvelasticError
from kvelastic.instance.status import UNLIMITED_BYTES
from kvelastic.shared import segment

REPAINT_S = 0.1
PLAIN_LOOK_S = 0.5
MOST_LINES = 10
PLAIN_BAR_CELLS = 40
LONGEST_BAR_CELLS = 70
ASCII_CELLS = {"█": "#", "▓": "=", "░": "-", "│": "|", "·": "."}


def megabytes(size_bytes: int) -> str:
    """Return a size in the unit of the limits in the demo."""
    return "none" if size_bytes == UNLIMITED_BYTES else f"{(size_bytes + (1 << 19)) >> 20}M"


class Memory(NamedTuple):
    """The memory of an instance at one moment, in bytes."""

    in_use: int
    cached: int
    parked: int
    mapped: int
    limit: int

    @classmethod
    def of(cls, name: str) -> Memory:
        with segment.open_readonly(name) as instance:
            usage = instance.control_block.read_usage()
        return cls(
            in_use=usage["in_use_bytes"],
            cached=usage["cached_bytes"],
            parked=usage["parked_bytes"],
            mapped=usage["mapped_bytes"],
            limit=usage["limit_bytes"],
        )


PARTS = (("in use", "█", "green"), ("cached", "▓", "yellow"), ("parked", "░", "cyan"))


def legend(full_bytes: int) -> str:
    """Return the explanation of the lines in a pipe, printed once."""
    cells = [f"{_printable([(cell, style)])} {what}" for what, cell, style in PARTS]
    cells += [f"{_printable([('·', '')])} the rest", f"{_printable([('│', '')])} the limit"]
    return f"  a bar is {megabytes(full_bytes)}: {'  '.join(cells)}"


class Sieve:
    """Selects the reads that get a line: at most `MOST_LINES`, two of them for wanted reads."""

    def __init__(self) -> None:
        self._shown: list[tuple[str, str]] | None = None
        self._lines = 0

    def is_worth_a_line(self, cells: list[tuple[str, str]], *, is_wanted: bool = False) -> bool:
        """Return True if a bar differs enough from the last one shown."""
        if self._shown is None:
            changed = len(cells)
        else:
            changed = sum(a != b for a, b in zip(cells, self._shown, strict=True))
        needed = 1 if is_wanted else 1 + self._lines
        if changed < needed or self._lines >= MOST_LINES - (0 if is_wanted else 2):
            return False
        self._shown, self._lines = cells, self._lines + 1
        return True


def bar(memory: Memory, full_bytes: int, width: int) -> list[tuple[str, str]]:
    """Return (text, style) pieces of `width` cells in total; the whole bar is `full_bytes`.

    A mark shows the limit, if that is within the bar.
    """
    cells: list[tuple[str, str]] = []
    upto_bytes = 0
    for part_bytes, (_, cell, style) in zip(memory[:3], PARTS, strict=True):
        upto_bytes += part_bytes
        # Round the ends of the parts, so that rounding errors do not accumulate.
        end = min(round(width * upto_bytes / full_bytes), width)
        cells += [(cell, style)] * (end - len(cells))
    cells += [("·", "dim")] * (width - len(cells))
    mark = round(width * memory.limit / full_bytes)
    if mark < width:
        cells[mark] = ("│", "bold red")
    return cells


class LiveView:
    """Shows an instance's memory in a separate thread while the `with` block runs.

    with LiveView(name, "burst", full_bytes=1 << 30) as view:
        ...
        view.say("half of it is done")
    """

    def __init__(self, name: str, label: str, full_bytes: int) -> None:
        self._name = name
        self._label = label
        self._full_bytes = full_bytes
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._live: Any = None
        self._sieve = Sieve()
        self._started_s = time.monotonic()
        self.most_mapped_bytes = 0

    def __enter__(self) -> LiveView:
        if sys.stdout.isatty():
            from rich.console import Console
            from rich.live import Live

            self._live = Live(console=Console(highlight=False), auto_refresh=False)
            self._live.start()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join()
        self._look(is_wanted=True)
        if self._live is not None:
            self._live.stop()

    def say(self, line: str) -> None:
        """Print a line above the picture."""
        if self._live is None:
            print(line, flush=True)
        else:
            self._live.console.print(line, markup=False, soft_wrap=True)

    def show(self) -> None:
        """Show the current state, in a pipe too. Use it once per view, besides its end."""
        with self._lock:
            self._look(is_wanted=True)

    def _run(self) -> None:
        while not self._over.wait(PLAIN_LOOK_S if self._live is None else REPAINT_S):
            with self._lock:
                self._look()

    def _look(self, *, is_wanted: bool = False) -> None:
        try:
            memory = Memory.of(self._name)
        except KvelasticError:
            return  # the server has ended; the code that waits for it reports that
        self.most_mapped_bytes = max(self.most_mapped_bytes, memory.mapped)
        if self._live is None:
            self._plain(memory, is_wanted=is_wanted)
        else:
            self._paint(memory)

    def _plain(self, memory: Memory, *, is_wanted: bool) -> None:
        pieces = bar(memory, self._full_bytes, PLAIN_BAR_CELLS)
        if not self._sieve.is_worth_a_line(pieces, is_wanted=is_wanted):
            return
        parts = "  ".join(
            f"{what} {megabytes(part_bytes):>4}"
            for part_bytes, (what, _, _) in zip(memory[:3], PARTS, strict=True)
        )
        print(
            f"  {time.monotonic() - self._started_s:5.1f} s {_printable(pieces)} {parts}"
            f"  mapped {megabytes(memory.mapped):>4}  limit {megabytes(memory.limit):>4}",
            flush=True,
        )

    def _paint(self, memory: Memory) -> None:
        from rich.text import Text

        width = shutil.get_terminal_size().columns
        picture = Text(f"  {self._label:8}", no_wrap=True, overflow="crop")
        for cell, style in bar(
            memory, self._full_bytes, max(10, min(LONGEST_BAR_CELLS, width - 12))
        ):
            picture.append(_printable([(cell, style)]), style)
        picture.append(f"\n{'':10}")
        for part_bytes, (what, cell, style) in zip(memory[:3], PARTS, strict=True):
            picture.append(_printable([(cell, style)]), style)
            picture.append(f" {what} {megabytes(part_bytes):<5} ")
        picture.append(
            f"\n{'':10}{megabytes(memory.mapped)} mapped, limit {megabytes(memory.limit)},"
            f" {time.monotonic() - self._started_s:.0f} s"
        )
        self._live.update(picture, refresh=True)


def plain_pauses() -> Iterator[float]:
    """Return the seconds before each line of a wait in a pipe: few lines, however long it is."""
    pause_s = 10.0
    while True:
        yield pause_s
        pause_s *= 2


class Waiting:
    """Shows the elapsed time while the `with` block runs."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Waiting:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        terminal = sys.stdout.isatty()
        started_s = time.monotonic()
        print(f"  {self._what} ...", end="" if terminal else "\n", flush=True)
        pauses = repeat(1.0) if terminal else plain_pauses()
        while not self._over.wait(next(pauses)):
            passed_s = time.monotonic() - started_s
            if terminal:
                print(f"\r  {self._what} ... {passed_s:.0f} s", end="", flush=True)
            else:
                print(f"  {self._what} ... {passed_s:.0f} s", flush=True)
        if terminal:
            print("\r\033[K", end="", flush=True)


def _printable(pieces: list[tuple[str, str]]) -> str:
    """Return the pieces' text in the characters that stdout supports."""
    text = "".join(cell for cell, _ in pieces)
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return "".join(ASCII_CELLS.get(cell, cell) for cell in text)
    return text
