"""`free_port` gives a port to one caller only, before a server has bound it."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from ports import free_port
from processes import PROGRAMS, run_python

ELSEWHERE = """
import random, sys
sys.path.insert(0, sys.argv[1])
from ports import free_port
draw, taken = random.randrange, [int(sys.argv[2])]
random.randrange = lambda *bounds: taken.pop() if taken else draw(*bounds)
print(free_port())
"""


def draws_again(port: int, draw: Callable[[int, int], int]) -> Callable[[int, int], int]:
    again = [port]
    return lambda first, end: again.pop() if again else draw(first, end)


def test_port_drawn_twice_is_given_once(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setattr(random, "randrange", draws_again(port, random.randrange))
    assert free_port() != port


def test_port_of_another_process_is_not_given() -> None:
    port = free_port()
    assert int(run_python("-c", ELSEWHERE, PROGRAMS, str(port)).stdout) != port
