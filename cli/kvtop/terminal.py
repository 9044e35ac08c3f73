"""kvtop's terminal: curses; keys, resizes and signals become events of one queue.

with Terminal.opened(events) as terminal:
    terminal.draw(lines)
    if events.get() == "input": keys = terminal.typed()
"""

from __future__ import annotations

import curses
import locale
import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from types import FrameType
from typing import Any, Final

from kvelastic.cli.kvtop.text import ASCII, UNICODE, Glyphs, Line, Span, cells, has_blocks
from kvelastic.errors import TerminalError

Events = SimpleQueue[Any]
"""Events of the terminal as text, and what other threads report to the main loop."""

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
"""Time in which an Esc may be the start of an arrow key. curses' default of 1 s is too slow."""
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
    """A screen in curses mode. `opened` creates it and restores the terminal."""

    @classmethod
    @contextmanager
    def opened(cls, events: Events) -> Iterator[Terminal]:
        """Take over the terminal for the context, and always restore it afterwards.

        Puts into `events`: "input" if keys were typed, "resize", and "end" at a signal that ends
        the program, or if the terminal was closed. Raises `TerminalError` without a terminal, or
        if it cannot position text.
        """
        if not (sys.stdin.isatty() and sys.stdout.isatty()):
            raise TerminalError("kvtop needs a terminal; `kvtop --once` prints one plain screen")
        with suppress(locale.Error):
            locale.setlocale(locale.LC_ALL, "")
        with _signals_into(events):  # before curses, which keeps existing signal handlers
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
                with _input_into(events) as resume_fd:
                    yield cls(window, resume_fd)
            finally:
                with suppress(curses.error):
                    window.keypad(False)
                    curses.nocbreak()
                    curses.echo()
                    curses.endwin()

    def __init__(self, window: curses.window, resume_fd: int) -> None:
        self._window = window
        self._resume_fd = resume_fd
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

    @property
    def size(self) -> tuple[int, int]:
        """Number of columns and lines."""
        lines, columns = self._window.getmaxyx()
        return columns, lines

    def draw(self, lines: list[Line]) -> None:
        """Draw the lines from the top. Parts that do not fit are omitted."""
        self._window.erase()
        for y, line in enumerate(lines):
            x = 0
            for span in line:
                # Writing the last cell of the screen always raises an error, and so does writing
                # after the window has shrunk. The next draw is correct again.
                with suppress(curses.error):
                    self._window.addstr(y, x, span.text, self._attribute(span))
                x += cells(span.text)
        self._window.noutrefresh()
        curses.doupdate()

    def _attribute(self, span: Span) -> int:
        attribute = self._styles.get(span.style, curses.A_NORMAL)
        if not span.is_selected:
            return attribute
        # No dim and no colours on the selected line: some terminals make them unreadable there.
        return curses.A_REVERSE | (attribute & curses.A_BOLD)

    def typed(self) -> list[str]:
        """Return the keys typed since the last call, for `keys.press`."""
        found: list[str] = []
        while True:
            try:
                key = self._window.get_wch()
            except (curses.error, ValueError):  # no input, or bytes outside the encoding
                os.write(self._resume_fd, b"\n")
                return found
            if isinstance(key, int):
                name = _KEY_NAMES.get(key, "")
            else:
                name = _CHARACTER_NAMES.get(key, key)
            if name:
                found.append(name)

    def resize(self) -> None:
        """Take the present size of the terminal."""
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


@contextmanager
def _input_into(events: Events) -> Iterator[int]:
    """Turn typed keys into events. Yields the file to write a byte to when the keys were read."""
    wait_fd, resume_fd = os.pipe()
    watching = threading.Thread(target=_watch_input, args=(events, wait_fd), daemon=True)
    watching.start()
    try:
        yield resume_fd
    finally:
        os.close(resume_fd)
        watching.join()
        os.close(wait_fd)


def _watch_input(events: Events, wait_fd: int) -> None:
    """Report that keys were typed, or that the terminal was closed, until `wait_fd` is at its end.

    Runs in its own thread.
    """
    typed_fd = sys.stdin.fileno()
    poll = select.poll()
    poll.register(typed_fd, select.POLLIN)
    poll.register(wait_fd, select.POLLIN)
    while True:
        states = dict(poll.poll())
        if wait_fd in states:
            return
        if states[typed_fd] & (select.POLLHUP | select.POLLERR | select.POLLNVAL):
            events.put("end")
            return
        events.put("input")
        if not os.read(wait_fd, 1):
            return


@contextmanager
def _signals_into(events: Events) -> Iterator[None]:
    """Turn signals into events. Restores the old handlers at its end."""

    def put(number: int, _: FrameType | None) -> None:
        events.put("resize" if number == signal.SIGWINCH else "end")

    before = {number: signal.signal(number, put) for number in (*_ENDING_SIGNALS, signal.SIGWINCH)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
