"""The demo's live view: where the memory of one instance is, four times a second.

On a terminal one line is repainted; into a pipe a plain line goes out twice a second.
"""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType

from kvelastic import segment
from kvelastic.sizes import format_size

BAR_CELLS = 40
REPAINT_S = 0.25
PLAIN_LINE_S = 0.5
PARTS = (("in use", "█", "32"), ("cached", "▓", "33"), ("parked", "░", "36"))


class LiveView:
    """Paints in a thread of its own while the `with` block runs."""

    def __init__(self, name: str, label: str) -> None:
        self._name = name
        self._label = label
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._terminal = sys.stdout.isatty()
        self.most_mapped_bytes = 0

    def __enter__(self) -> LiveView:
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
        self._paint()
        if self._terminal:
            print()

    def _run(self) -> None:
        while not self._over.wait(REPAINT_S if self._terminal else PLAIN_LINE_S):
            self._paint()

    def _paint(self) -> None:
        with segment.open_readonly(self._name) as instance:
            usage = instance.record.read_usage()
            limit_bytes = instance.record.read_answer()["effective_limit_bytes"]
        self.most_mapped_bytes = max(self.most_mapped_bytes, usage["mapped_bytes"])
        scale = max(limit_bytes, usage["mapped_bytes"], 1)
        bar = ""
        for name, cell, colour in PARTS:
            cells = round(BAR_CELLS * usage[f"{name.replace(' ', '_')}_bytes"] / scale)
            bar += f"\033[{colour}m{cell * cells}\033[0m" if self._terminal else cell * cells
        plain_length = sum(bar.count(cell) for _, cell, _ in PARTS)
        figures = "  ".join(
            f"{name} {format_size(usage[name.replace(' ', '_') + '_bytes']):>10}"
            for name, _, _ in PARTS
        )
        line = (
            f"  {self._label} [{bar}{' ' * (BAR_CELLS - plain_length)}] {figures}"
            f"  mapped {format_size(usage['mapped_bytes']):>10} of {format_size(limit_bytes)}"
        )
        if self._terminal:
            print(f"\r\033[K{line}", end="", flush=True)
        else:
            print(f"{time.strftime('%H:%M:%S')}{line}", flush=True)
