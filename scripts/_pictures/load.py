"""Two instances over host memory that share a ledger, and alternating bursts of requests.

    with two_instances() as (chat, code), Bursts(chat, code):
        ...                       # the memory of both rises and falls in turn

The pictures show the memory of these instances. No engine computes anything. The memory, the ledger
and the memory requests between the two are real.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from ledger_instance import BLOCKS_PER_PAGE, PAGE_BYTES, Instance

BUDGET = "512M"
PERIOD_S = 24.0
STEP_S = 0.25
BLOCKS_OF_A_REQUEST = 8
MOST_REQUESTS = 88  # 352 MiB of 512 in use at the top of a burst
CACHED_REQUESTS = 40  # bound of the prefix cache


@contextmanager
def two_instances() -> Iterator[tuple[Instance, Instance]]:
    """Yield the instances `chat`, with a guarantee and a higher priority, and `code`."""
    shared = {"KVELASTIC_HOST_MEMORY": BUDGET, "KVELASTIC_LEDGER": "pictures"}
    chat = {"KVELASTIC_IPC_NAME": "chat", "KVELASTIC_MIN": "128M", "KVELASTIC_PRIORITY": "10"}
    code = {"KVELASTIC_IPC_NAME": "code", "KVELASTIC_LIMIT": "384M"}
    with Instance(**shared, **chat) as first, Instance(**shared, **code) as second:
        yield first, second


class Bursts:
    """A thread that allocates and frees the blocks of requests in both instances, in bursts."""

    def __init__(self, chat: Instance, code: Instance) -> None:
        self._instances = (chat, code)
        self._held: tuple[deque[list[int]], deque[list[int]]] = (deque(), deque())
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        step = 0
        while not self._ended.wait(STEP_S):
            for place in range(2):
                turn = 2 * math.pi * (step * STEP_S / PERIOD_S + place / 2)
                wanted = MOST_REQUESTS * (0.15 + 0.85 * max(0.0, math.sin(turn)))
                self._follow(place, round(wanted))
            step += 1

    def _follow(self, place: int, wanted: int) -> None:
        instance, held = self._instances[place], self._held[place]
        while len(held) > wanted:
            ids = held.popleft()
            (instance.cache if len(held) < CACHED_REQUESTS else instance.free)(ids)
        while len(held) < wanted:
            new = instance.alloc(BLOCKS_OF_A_REQUEST)
            if new is None:  # the other instance has the memory: the request waits
                return
            held.append(new)

    def __enter__(self) -> Bursts:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        for instance, held in zip(self._instances, self._held, strict=True):
            for ids in held:
                instance.free(ids)


assert BLOCKS_OF_A_REQUEST * MOST_REQUESTS // BLOCKS_PER_PAGE * PAGE_BYTES < 384 << 20
