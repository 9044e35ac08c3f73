"""Who waits behind a release that has to wait, and what the scheduler sees meanwhile."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvelastic.integration.sglang.hidden_requests import hidden_requests
from kvelastic.integration.sglang.late_releases import LateReleases


def request(rid: str) -> SimpleNamespace:
    return SimpleNamespace(rid=rid)


class Scheduler(SimpleNamespace):
    """As much of SGLang's as is looked at."""

    def __init__(self, **queues: Any) -> None:
        super().__init__(
            waiting_queue=[],
            running_batch=SimpleNamespace(reqs=[]),
            last_batch=None,
            chunked_req=None,
            grammar_manager=SimpleNamespace(grammar_queue=[]),
            sent=[],
        )
        vars(self).update(queues)

    def send_control_output(self, answer: str, call: str) -> None:
        self.sent.append((answer, call))

    @property
    def waiting(self) -> list[str]:
        return [one.rid for one in self.waiting_queue]

    def is_idle(self) -> bool:
        return not self.waiting_queue and not self.running_batch.reqs


def test_hidden_requests_return_to_their_positions() -> None:
    scheduler = Scheduler(waiting_queue=[request(rid) for rid in "abcd"])
    b, d = scheduler.waiting_queue[1::2]
    with hidden_requests(scheduler, [b, d]):
        assert scheduler.waiting == ["a", "c"]
        scheduler.waiting_queue = [*scheduler.waiting_queue[1:], request("new")]  # a runs
    assert scheduler.waiting == ["b", "c", "d", "new"]
    with pytest.raises(ValueError, match="of SGLang's"), hidden_requests(scheduler, [b]):
        raise ValueError("of SGLang's")
    assert scheduler.waiting == ["b", "c", "d", "new"]


def test_later_requests_wait_behind_a_late_release() -> None:
    running, waiting, compiled, chunked, last = map(request, ("run", "wait", "json", "long", "new"))
    scheduler = Scheduler(
        waiting_queue=[waiting],
        running_batch=SimpleNamespace(reqs=[running]),
        last_batch=SimpleNamespace(reqs=[last]),
        chunked_req=chunked,
        grammar_manager=SimpleNamespace(grammar_queue=[compiled]),
    )
    releases = LateReleases()
    assert releases.behind(scheduler) == []
    releases.add(scheduler, "first call", lambda: "first")
    # Those that it waits for may come back into the queue: they are retracted, or compiled.
    later = request("later")
    scheduler.waiting_queue = [waiting, later, running, compiled, chunked, last]
    assert releases.behind(scheduler) == [later]
    releases.add(scheduler, "second call", lambda: "second")
    releases.carry_out(scheduler, scheduler.is_idle)
    assert scheduler.sent == [], "some that came before wait"
    scheduler.waiting_queue = [later]
    releases.carry_out(scheduler, scheduler.is_idle)
    assert scheduler.sent == [], "one that came before runs"
    scheduler.running_batch.reqs.clear()
    releases.carry_out(scheduler, scheduler.is_idle)
    assert scheduler.sent == [("first", "first call"), ("second", "second call")]
    assert scheduler.waiting == ["later"]
    assert releases.behind(scheduler) == [], "nobody waits behind it any more"


def test_superseded_releases_are_answered_and_block_no_request() -> None:
    scheduler = Scheduler(running_batch=SimpleNamespace(reqs=[request("runs")]))
    releases = LateReleases()
    releases.add(scheduler, "call", lambda: pytest.fail("nothing is to be released"))
    scheduler.waiting_queue = [request("later")]
    releases.give_up(scheduler, "answer")
    assert scheduler.sent == [("answer", "call")]
    assert releases.behind(scheduler) == []
