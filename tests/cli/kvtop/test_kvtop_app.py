"""kvtop's loop with a terminal that a test types on: nothing that takes long delays a key."""

from __future__ import annotations

import queue
import threading
from dataclasses import replace

import pytest
from scenes import ONE, instance
from waiting import DEADLINE_S, wait_until

from kvelastic.cli.kvtop import poller
from kvelastic.cli.kvtop.app import App
from kvelastic.cli.kvtop.keys import Ask
from kvelastic.cli.kvtop.poller import Notice, Outside, look
from kvelastic.cli.kvtop.terminal import Events
from kvelastic.cli.kvtop.text import ASCII, Line
from kvelastic.errors import SegmentError


class TypedTerminal:
    """A terminal: what is typed is put in, what is drawn can be waited for."""

    glyphs = ASCII
    size = (100, 24)

    def __init__(self, events: Events) -> None:
        self._events = events
        self._keys: queue.Queue[str] = queue.Queue()
        self._screens: queue.Queue[str] = queue.Queue()

    def press(self, *keys: str) -> None:
        for key in keys:
            self._keys.put(key)
            self._events.put("input")

    def typed(self) -> list[str]:
        return [self._keys.get(timeout=DEADLINE_S)]

    def draw(self, lines: list[Line]) -> None:
        self._screens.put("\n".join("".join(span.text for span in line) for line in lines))

    def wait_for(self, text: str) -> str:
        while text not in (screen := self._screens.get(timeout=DEADLINE_S)):
            pass
        return screen


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setattr(poller, "look", lambda names: ONE)
    events: Events = queue.SimpleQueue()
    terminal = TypedTerminal(events)
    with Outside(names=(), interval_s=3600, events=events) as outside:
        running = threading.Thread(target=App(terminal, outside, events).run)
        running.start()
        terminal.wait_for("kvelastic_vllm_1")
        yield terminal
        terminal.press("escape", "escape", "q")
        running.join(DEADLINE_S)
        assert not running.is_alive()
    wait_until(lambda: not threads_of_kvtop())


def threads_of_kvtop() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name.startswith("kvtop")]


def test_keys_work_while_a_request_is_pending(terminal, monkeypatch):
    asked: queue.Queue[Ask] = queue.Queue()
    may_answer = threading.Event()

    def slow_request(ask: Ask) -> Notice:
        asked.put(ask)
        assert may_answer.wait(DEADLINE_S)
        return Notice("answered at last", "good")

    monkeypatch.setattr(poller, "request", slow_request)
    terminal.press("l", "7", "enter", "y")
    assert asked.get(timeout=DEADLINE_S) == Ask("kvelastic_vllm_1", "kvelastic_vllm_1", "limit", 7)
    terminal.press("?")
    terminal.wait_for("evicted when needed")
    terminal.press("q", "/", "z", "z")
    screen = terminal.wait_for("None of 1 has /zz")
    assert "answered" not in screen
    terminal.press("escape")
    may_answer.set()
    terminal.wait_for("answered at last")


def test_keys_work_while_a_refresh_is_slow(terminal, monkeypatch):
    looking_now, may_end = threading.Event(), threading.Event()

    def slow_refresh(names):
        looking_now.set()
        assert may_end.wait(DEADLINE_S)
        return ONE

    monkeypatch.setattr(poller, "look", slow_refresh)
    terminal.press(" ")
    assert looking_now.wait(DEADLINE_S)
    terminal.press("?")
    terminal.wait_for("evicted when needed")
    may_end.set()


def test_failed_refresh_is_reported_and_the_next_works(terminal, monkeypatch):
    def fail(names):
        raise SegmentError("cannot list /dev/shm: Too many open files")

    monkeypatch.setattr(poller, "look", fail)
    terminal.press(" ")
    terminal.wait_for("could not be read: cannot list /dev/shm: Too many open files")
    monkeypatch.setattr(poller, "look", lambda names: replace(ONE, instances=(instance("other"),)))
    terminal.press(" ")
    terminal.wait_for("other")


def test_requests_before_the_end_are_sent(monkeypatch):
    monkeypatch.setattr(poller, "look", lambda names: ONE)
    monkeypatch.setattr(poller, "request", lambda ask: Notice("sent", "good"))
    events: Events = queue.SimpleQueue()
    with Outside(names=(), interval_s=3600, events=events) as outside:
        outside.ask(Ask("kvelastic_vllm_1", "kvelastic_vllm_1", "limit", 7))
    wait_until(lambda: not threads_of_kvtop())
    found = [events.get() for _ in range(events.qsize())]
    assert Notice("sent", "good") in found


def test_refresh_works_without_ledgers(monkeypatch):
    from kvelastic.shared import ledger

    def fail() -> None:
        raise OSError("no")

    monkeypatch.setattr(ledger, "list_ledgers", fail)
    assert look(["no such instance"]).devices == ()
