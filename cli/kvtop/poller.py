"""The poller: reads instances and makes requests on its own threads, so keys never wait.

with Outside(names=(), interval_s=1.0, events=events) as outside:
    outside.look_soon(); outside.ask(ask)
    news = events.get()                      # a Scene, or a Notice
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvelastic.cli.kvtop.keys import Ask, Mood
from kvelastic.cli.kvtop.scene import Scene, scene_of
from kvelastic.cli.rendering.outcome_text import outcome_text
from kvelastic.errors import KvelasticError
from kvelastic.instance.outcome import HOLDS, MAY_HOLD, outcome_of
from kvelastic.shared.segment import Request

if TYPE_CHECKING:
    from kvelastic.cli.kvtop.terminal import Events
    from kvelastic.shared.segment import Ack

ANSWER_WAIT_S: Final = 1.0
"""How long to wait for an answer before reporting that it is missing."""


@dataclass(frozen=True)
class Notice:
    """The outcome of a request, or an error, as a message."""

    message: str
    mood: Mood


def look(names: Sequence[str] = ()) -> Scene:
    """Read all instances and devices once, after removing files of dead instances. Blocks."""
    from kvelastic.cli.segment_lookup import sweep
    from kvelastic.instance.reading import ledgers
    from kvelastic.shared.segment import list_segments
    from kvelastic.shared.tier_status import tiers_of

    sweep(quiet=True)
    found = list_segments()
    return scene_of(found, ledgers(), time.monotonic(), names, tiers_of(found))


def request(ask: Ask) -> Notice:
    """Send the request and return the message of its outcome or error.

    Blocks for up to `ANSWER_WAIT_S`.
    """
    from kvelastic.shared import segment

    try:
        answer = segment.request(ask.name, **vars(request_of(ask)), wait_s=ANSWER_WAIT_S)
    except KvelasticError as error:
        return Notice(f"{ask.label}: {error}", "bad")
    return Notice(*answer_line(ask, answer))


class Outside:
    """Two threads: one reads every `interval_s` seconds, one sends requests in order.

    They start with the context. After its end they finish the present read and the queued requests.
    """

    def __init__(self, *, names: Sequence[str], interval_s: float, events: Events) -> None:
        """Scenes, outcomes and errors are put into `events`."""
        self._names = names
        self._interval_s = interval_s
        self._events = events
        self._look_now = threading.Event()
        self._is_over = False
        self._asks: queue.SimpleQueue[Ask | None] = queue.SimpleQueue()
        """None: no request follows."""

    def __enter__(self) -> Outside:
        for work in (self._look_again_and_again, self._request_one_after_another):
            threading.Thread(target=work, daemon=True, name=f"kvtop{work.__name__}").start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        self._look_now.set()
        self._asks.put(None)

    def look_soon(self) -> None:
        """Read again without waiting for the end of the interval."""
        self._look_now.set()

    def ask(self, ask: Ask) -> None:
        """Queue a request; its outcome follows."""
        self._asks.put(ask)

    def _look_again_and_again(self) -> None:
        while True:
            self._look_now.clear()
            if self._is_over:  # after `clear`, which may have undone the `set` at the end
                return
            begun_s = time.monotonic()
            try:
                self._events.put(look(self._names))
            except KvelasticError as error:
                self._events.put(Notice(f"the instances could not be read: {error}", "bad"))
            self._look_now.wait(max(0.0, begun_s + self._interval_s - time.monotonic()))

    def _request_one_after_another(self) -> None:
        while (ask := self._asks.get()) is not None:
            self._events.put(request(ask))
            self.look_soon()  # the request has changed the shown values


def request_of(ask: Ask) -> Request:
    """Return the segment request for an `Ask`."""
    return Request(
        limit_bytes=ask.value if ask.setting == "limit" else None,
        min_bytes=ask.value if ask.setting == "min" else None,
        priority=ask.value if ask.setting == "priority" else None,
        asleep=bool(ask.value) if ask.setting == "sleep" else None,
    )


def answer_line(ask: Ask, answer: Ack) -> tuple[str, Mood]:
    """Return the message of an outcome, and its mood (good, warn or bad)."""
    request = request_of(ask)
    outcome = outcome_of(request, answer)
    mood: Mood = "bad"
    if outcome.verdict in HOLDS and not outcome.engine_asleep:
        mood = "good"
    elif outcome.verdict in HOLDS | MAY_HOLD:
        mood = "warn"
    return outcome_text(ask.label, request, outcome, answer, exact=False), mood
