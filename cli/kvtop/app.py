"""kvtop's main loop: receives events, updates the state by `keys` and `model`, and draws the view.

run(names=(), interval_s=1.0)       # until q, Ctrl-C or SIGTERM
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from queue import SimpleQueue

from kvelastic.cli.kvtop import keys
from kvelastic.cli.kvtop.history import Model
from kvelastic.cli.kvtop.poller import Notice, Outside
from kvelastic.cli.kvtop.scene import Scene
from kvelastic.cli.kvtop.terminal import Events, Terminal
from kvelastic.cli.kvtop.view import screen


def run(names: Sequence[str], interval_s: float) -> None:
    """Show the screen until the user ends it. Raises `TerminalError` if there is no terminal."""
    events: Events = SimpleQueue()
    with (
        Terminal.opened(events) as terminal,
        Outside(names=names, interval_s=interval_s, events=events) as outside,
    ):
        App(terminal, outside, events).run()


class App:
    """The main loop. `_scene` and `_ui` are the whole state of the screen, used by one thread."""

    def __init__(self, terminal: Terminal, outside: Outside, events: Events) -> None:
        self._terminal = terminal
        self._outside = outside
        self._events = events
        self._model = Model()
        self._scene: Scene | None = None
        self._ui = keys.Ui()
        self._is_over = False

    def run(self) -> None:
        """Run until the user or a signal ends it. Blocks."""
        while not self._is_over:
            self._take(self._events.get())
            if self._events.empty() and not self._is_over:
                self._draw()

    def _take(self, event: Scene | Notice | str) -> None:
        if isinstance(event, Scene):
            self._take_scene(event)
        elif isinstance(event, Notice):
            self._ui = keys.with_message(self._ui, event.message, event.mood)
        elif event == "input":
            for key in self._terminal.typed():
                self._press(key)
        elif event == "resize":
            self._terminal.resize()
        else:
            self._is_over = True

    def _press(self, key: str) -> None:
        if self._is_over:
            return
        instances = self._scene.instances if self._scene else ()
        self._ui, effects = keys.press(self._ui, key, instances)
        for effect in effects:
            if effect == "quit":
                self._is_over = True
            elif effect == "look":
                self._outside.look_soon()
            else:
                self._outside.ask(effect)

    def _take_scene(self, scene: Scene) -> None:
        self._scene = self._model.add(scene)
        self._ui = keys.found(self._ui, self._scene.instances)
        if self._model.ended and not self._ui.message:
            have = "has" if len(self._model.ended) == 1 else "have"
            self._ui = keys.with_message(
                self._ui, f"{', '.join(self._model.ended)} {have} ended", "warn"
            )

    def _draw(self) -> None:
        columns, lines = self._terminal.size
        ui = self._ui
        if self._scene is None and not ui.message:
            ui = replace(ui, message="looking for instances")
        self._terminal.draw(
            screen(
                self._scene or Scene(at_s=0.0),
                ui,
                width=columns,
                height=lines,
                glyphs=self._terminal.glyphs,
                clock=time.strftime("%H:%M:%S"),
            )
        )
