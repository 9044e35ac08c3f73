"""The terminal under kvtop: curses, and the one place that waits for keys, sizes and signals.

    with Terminal.opened() as terminal:
        terminal.draw(lines)
        for event in terminal.wait(0.5): ...     # "key:j", "resize", "end", "wake"

A wait ends at once for a key, a new size, a signal to end, or `wake()` from another thread.
"""

from __future__ import annotations

import curses
import locale
import os
import select
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Final

from kvelastic.cli.kvtop.text import ASCII, UNICODE, Glyphs, Line, Span, cells, has_blocks
from kvelastic.errors import TerminalError

_KEY_NAMES: Final = {
    curses.KEY_UP: "up",
    curses.KEY_DOWN: "down",
    curses.KEY_PPAGE: "page_up",
    curses.KEY_NPAGE: "page_down",
    curses.KEY_HOME: "home",
    curses.KEY_END: "end",
    curses.KEY_ENTER: "enter",
    curses.KEY_BACKSPACE: "backspace",
    curses.KEY_DC: "backspace",
}
_CHARACTER_NAMES: Final = {
    "\n": "enter",
    "\r": "enter",
    "\x1b": "escape",
    "\x7f": "backspace",
    "\b": "backspace",
}
_ESCAPE_WAIT_MS: Final = 25
"""How long an Esc may be the beginning of an arrow key; the usual second would be felt."""
_ENDING_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_COLOURS: Final = {
    "good": curses.COLOR_GREEN,
    "warn": curses.COLOR_YELLOW,
    "bad": curses.COLOR_RED,
    "in_use": curses.COLOR_GREEN,
    "cached": curses.COLOR_CYAN,
    "parked": curses.COLOR_BLUE,
    "slack": curses.COLOR_YELLOW,
    "reserved": curses.COLOR_WHITE,
    "others": curses.COLOR_MAGENTA,
    "trend": curses.COLOR_CYAN,
}
_ATTRIBUTES: Final = {
    "strong": curses.A_BOLD,
    "dim": curses.A_DIM,
    "free": curses.A_DIM,
    "title": curses.A_REVERSE,
    "heading": curses.A_BOLD,
}


class Terminal:
    """A screen in curses mode. Made by `opened`, which also puts everything back."""

    @classmethod
    @contextmanager
    def opened(cls) -> Iterator[Terminal]:
        """Take the terminal over; it is as it was afterwards, however this ends.

        Raises `TerminalError` if there is none, or none that can place text.
        """
        if not (sys.stdin.isatty() and sys.stdout.isatty()):
            raise TerminalError("kvtop needs a terminal; `kvtop --once` prints one plain screen")
        with suppress(locale.Error):
            locale.setlocale(locale.LC_ALL, "")
        with _Signals() as signals:  # before curses, which leaves alone what is handled already
            try:
                curses.setupterm(fd=sys.stdout.fileno())
                if curses.tigetstr("cup") is None:
                    raise curses.error("it cannot place text")
                window = curses.initscr()
            except curses.error as error:
                raise TerminalError(
                    f"kvtop cannot use this terminal (TERM={os.environ.get('TERM', '')}): {error};"
                    " `kvtop --once` prints one plain screen"
                ) from None
            try:
                yield cls(window, signals)
            finally:
                with suppress(curses.error):
                    window.keypad(False)
                    curses.nocbreak()
                    curses.echo()
                    curses.endwin()

    def __init__(self, window: curses.window, signals: _Signals) -> None:
        self._window = window
        self._signals = signals
        curses.noecho()
        curses.cbreak()
        curses.set_escdelay(_ESCAPE_WAIT_MS)
        window.keypad(True)
        window.nodelay(True)
        with suppress(curses.error):
            curses.curs_set(0)
        self._styles = _styles()
        codeset = locale.nl_langinfo(locale.CODESET)
        is_able = has_blocks(codeset) and has_blocks(sys.stdout.encoding or "ascii")
        self.glyphs: Glyphs = UNICODE if is_able else ASCII
        self._poll = select.poll()
        self._poll.register(sys.stdin.fileno(), select.POLLIN)
        self._poll.register(signals.reader, select.POLLIN)

    @property
    def size(self) -> tuple[int, int]:
        """Columns and lines."""
        lines, columns = self._window.getmaxyx()
        return columns, lines

    def wake(self) -> None:
        """End a wait; for other threads."""
        self._signals.wake()

    def wait(self, timeout_s: float) -> list[str]:
        """What has happened, as soon as something has, or nothing after `timeout_s`.

        `key:K` with K as `keys.press` takes it, `resize`, `wake`, or `end` (a signal, or the
        terminal is gone).
        """
        ready = dict(self._poll.poll(max(0.0, timeout_s) * 1000))
        events: list[str] = []
        if self._signals.reader in ready:
            events += self._signals.take()
        state = ready.get(sys.stdin.fileno(), 0)
        if state & (select.POLLHUP | select.POLLERR | select.POLLNVAL):
            events.append("end")
        elif state:
            events += self._keys()
        if "resize" in events:
            self._resize()
        return events

    def draw(self, lines: list[Line]) -> None:
        """Show these lines, from the top; they fit, or what does not is left out."""
        self._window.erase()
        for y, line in enumerate(lines):
            x = 0
            for span in line:
                # The last cell of the screen cannot be written without an error, nor can anything
                # after the window has become smaller: the next draw is right again.
                with suppress(curses.error):
                    self._window.addstr(y, x, span.text, self._attribute(span))
                x += cells(span.text)
        self._window.noutrefresh()
        curses.doupdate()

    def _attribute(self, span: Span) -> int:
        attribute = self._styles.get(span.style, curses.A_NORMAL)
        if not span.is_selected:
            return attribute
        # No dim, nor colours, on the selected line: some terminals make them unreadable there.
        return curses.A_REVERSE | (attribute & curses.A_BOLD)

    def _keys(self) -> list[str]:
        found: list[str] = []
        while True:
            try:
                key = self._window.get_wch()
            except (curses.error, ValueError):  # no more input, or bytes outside the encoding
                return found
            if isinstance(key, int):
                name = _KEY_NAMES.get(key, "")
            else:
                name = _CHARACTER_NAMES.get(key, key)
            if name:
                found.append(f"key:{name}")

    def _resize(self) -> None:
        try:
            columns, lines = os.get_terminal_size(sys.stdout.fileno())
        except OSError:
            return
        if columns > 0 and lines > 0:
            with suppress(curses.error):
                curses.resizeterm(lines, columns)
            self._window.clear()


def _styles() -> dict[str, int]:
    styles = dict(_ATTRIBUTES)
    if not curses.has_colors() or os.environ.get("NO_COLOR"):
        return styles
    with suppress(curses.error):
        curses.start_color()
        background = -1
        try:
            curses.use_default_colors()
        except curses.error:
            background = curses.COLOR_BLACK
        for number, (style, colour) in enumerate(_COLOURS.items(), 1):
            curses.init_pair(number, colour, background)
            styles[style] = styles.get(style, 0) | curses.color_pair(number)
    return styles


class _Signals:
    """Signals as bytes in a pipe, next to which keys are waited for; the old handlers come back."""

    def __enter__(self) -> _Signals:
        self.reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._events: list[str] = []
        self._before = {
            number: signal.signal(number, self._on_signal)
            for number in (*_ENDING_SIGNALS, signal.SIGWINCH)
        }
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        reader, writer = self.reader, self._writer
        self._writer = -1  # a thread that wakes us later wakes nobody
        os.close(reader)
        os.close(writer)

    def wake(self) -> None:
        with suppress(OSError):  # full: it wakes anyway
            os.write(self._writer, b"w")

    def take(self) -> list[str]:
        with suppress(BlockingIOError):
            while os.read(self.reader, 4096):
                pass
        events, self._events = self._events, []
        return [*events, "wake"]

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self._events.append("resize" if number == signal.SIGWINCH else "end")
        self.wake()
