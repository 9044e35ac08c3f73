"""Calls that may hang, in threads: results, errors, timeouts and the end."""

from __future__ import annotations

import os
import signal
import threading

import pytest
from waiting import DEADLINE_S, wait_until

from kvelastic.tiers.workers import Workers


def test_workers_pass_errors_and_close() -> None:
    workers = Workers("of a test")
    assert workers.run(lambda: 3, DEADLINE_S) == 3
    with pytest.raises(KeyError):
        workers.run(lambda: dict[int, int]()[1], DEADLINE_S)
    assert workers.close(DEADLINE_S)
    assert workers.close(DEADLINE_S)
    with pytest.raises(TimeoutError):
        workers.run(lambda: 3, DEADLINE_S)


def test_map_waits_for_all_calls_before_raising() -> None:
    workers = Workers("of a test", 2)
    ended: list[int] = []
    failed = threading.Event()

    def call(number: int) -> int:
        if number == 0:
            failed.set()
            raise OSError("the first")
        assert failed.wait(DEADLINE_S)
        ended.append(number)
        return -number

    with pytest.raises(OSError, match="the first"):
        workers.map(call, range(9))
    assert sorted(ended) == list(range(1, 9))
    assert workers.map(call, range(1, 9)) == [-n for n in range(1, 9)]
    workers.close()
    assert workers.map(call, [3]) == [-3]
    workers.close()


def test_calls_fail_while_a_late_call_runs() -> None:
    workers = Workers("of a test")
    goes_on = threading.Event()
    errors: list[str] = []

    def call_is_late() -> bool:
        with pytest.raises(TimeoutError) as error:
            workers.run(lambda: goes_on.wait(DEADLINE_S), 0.01)
        errors.append(str(error.value))
        return workers.is_stuck

    wait_until(call_is_late)  # a call that its thread begins too late is never run
    assert "no answer" in errors[-1]
    with pytest.raises(TimeoutError, match="has not ended"):
        workers.run(lambda: 3, DEADLINE_S)
    assert not workers.close(0.0)
    goes_on.set()
    assert workers.close(DEADLINE_S)
    assert not workers.is_stuck


def test_call_timing_out_in_the_queue_never_runs() -> None:
    workers = Workers("of a test")
    goes_on = threading.Event()
    before = workers.submit(lambda: goes_on.wait(DEADLINE_S))
    assert before is not None
    made: list[int] = []
    with pytest.raises(TimeoutError, match="other calls"):
        workers.run(lambda: made.append(1), 0.01)
    assert not workers.is_stuck
    goes_on.set()
    assert workers.run(lambda: 3, DEADLINE_S) == 3
    assert (made, before.result()) == ([], True)
    workers.close()


def test_forked_child_ignores_a_lock_of_its_parent() -> None:
    workers = Workers("of a test")
    workers._lock.acquire()  # as if another thread were in `submit`
    child = os.fork()
    if child:
        workers._lock.release()
    else:
        code = 1
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(int(DEADLINE_S))  # ends a child that hangs
            code = 0 if workers.run(lambda: 3, DEADLINE_S) == 3 else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert workers.run(lambda: 3, DEADLINE_S) == 3
    workers.close()
