"""What the demo shows while something goes on: where the memory is, or how long it takes.

On a terminal one picture stays in place; into a pipe a plain line goes out whenever something has
changed, and every ten seconds.
"""

from __future__ import annotations

import shutil
import sys
import threading
import time
from types import TracebackType
from typing import Any, NamedTuple

from kvelastic import segment
from kvelastic.errors import KvelasticError
from kvelastic.sizes import format_size

REPAINT_S = 0.1
PLAIN_LINE_S = 0.5
PLAIN_UNCHANGED_S = 10.0
PLAIN_BAR_CELLS = 40
LONGEST_BAR_CELLS = 70
ASCII_CELLS = {"█": "#", "▓": "=", "░": "-", "│": "|", "·": "."}


class Memory(NamedTuple):
    """One look at an instance; all in bytes."""

    in_use: int
    cached: int
    parked: int
    mapped: int
    limit: int

    @classmethod
    def of(cls, name: str) -> Memory:
        with segment.open_readonly(name) as instance:
            usage = instance.record.read_usage()
            limit_bytes = instance.record.read_answer()["effective_limit_bytes"]
        return cls(
            in_use=usage["in_use_bytes"],
            cached=usage["cached_bytes"],
            parked=usage["parked_bytes"],
            mapped=usage["mapped_bytes"],
            limit=limit_bytes,
        )


PARTS = (("in use", "█", "green"), ("cached", "▓", "yellow"), ("parked", "░", "cyan"))


def bar(memory: Memory, full_bytes: int, width: int) -> list[tuple[str, str]]:
    """(text, style) pieces, `width` cells together; `full_bytes` is the whole bar.

    A mark stands where the limit is, if that is inside the bar.
    """
    cells: list[tuple[str, str]] = []
    upto_bytes = 0
    for part_bytes, (_, cell, style) in zip(memory[:3], PARTS, strict=True):
        upto_bytes += part_bytes
        # Up to rounded ends, so that the parts' rounding errors do not add up.
        end = min(round(width * upto_bytes / full_bytes), width)
        cells += [(cell, style)] * (end - len(cells))
    cells += [("·", "dim")] * (width - len(cells))
    mark = round(width * memory.limit / full_bytes)
    if mark < width:
        cells[mark] = ("│", "bold red")
    return cells


class LiveView:
    """Shows an instance's memory from a thread of its own while the `with` block runs.

    with LiveView(name, "burst", full_bytes=1 << 30) as view:
        ...
        view.say("half of it is done")
    """

    def __init__(self, name: str, label: str, full_bytes: int) -> None:
        self._name = name
        self._label = label
        self._full_bytes = full_bytes
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._live: Any = None
        self._printed: Memory | None = None
        self._printed_s = 0.0
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
        self._look()
        if self._live is not None:
            self._live.stop()

    def say(self, line: str) -> None:
        """Print a line above the picture."""
        if self._live is None:
            print(line, flush=True)
        else:
            self._live.console.print(line, markup=False, soft_wrap=True)

    def _run(self) -> None:
        while not self._over.wait(PLAIN_LINE_S if self._live is None else REPAINT_S):
            self._look()

    def _look(self) -> None:
        try:
            memory = Memory.of(self._name)
        except KvelasticError:
            return  # the server has gone; whoever waits for it says so
        self.most_mapped_bytes = max(self.most_mapped_bytes, memory.mapped)
        if self._live is None:
            self._plain(memory)
        else:
            self._paint(memory)

    def _plain(self, memory: Memory) -> None:
        now_s = time.monotonic()
        if memory == self._printed and now_s - self._printed_s < PLAIN_UNCHANGED_S:
            return
        self._printed, self._printed_s = memory, now_s
        pieces = bar(memory, self._full_bytes, PLAIN_BAR_CELLS)
        parts = "  ".join(
            f"{what} {format_size(part_bytes):>10}"
            for part_bytes, (what, _, _) in zip(memory[:3], PARTS, strict=True)
        )
        print(
            f"  {time.monotonic() - self._started_s:5.1f} s {_printable(pieces)} {parts}"
            f"  mapped {format_size(memory.mapped):>10}  limit {format_size(memory.limit):>10}",
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
            picture.append(f" {what} {format_size(part_bytes):<10} ")
        picture.append(
            f"\n{'':10}{format_size(memory.mapped)} mapped, limit {format_size(memory.limit)},"
            f" {time.monotonic() - self._started_s:.0f} s"
        )
        self._live.update(picture, refresh=True)


class Waiting:
    """Shows that something is still going on, and for how long, while the `with` block runs."""

    PLAIN_S = 10.0

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
        while not self._over.wait(1.0 if terminal else self.PLAIN_S):
            passed_s = time.monotonic() - started_s
            if terminal:
                print(f"\r  {self._what} ... {passed_s:.0f} s", end="", flush=True)
            else:
                print(f"  {self._what} ... {passed_s:.0f} s", flush=True)
        if terminal:
            print("\r\033[K", end="", flush=True)


def _printable(pieces: list[tuple[str, str]]) -> str:
    """The pieces' text in what stdout can show."""
    text = "".join(cell for cell, _ in pieces)
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return "".join(ASCII_CELLS.get(cell, cell) for cell in text)
    return text
