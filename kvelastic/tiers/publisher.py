"""Shows tiers to operators and does what they ask: two threads over a board.

    show(tiers, uuid)           # from now on until the tiers are closed

One thread publishes figures twice a second, the other looks for requests ten times a second. Each
store is asked in a thread of its own, so that one that hangs keeps its last figures and holds
nobody up. What cannot be shown is logged once: an engine never fails because nobody can look.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from kvelastic.errors import KvelasticError
from kvelastic.tier_board_format import (
    MOST_TIERS,
    BoardFigures,
    TierAnswer,
    TierFigures,
    TierRequest,
)
from kvelastic.tiers.base import Capacity, Store, StoreStatistics
from kvelastic.tiers.board import Board
from kvelastic.tiers.deadline_worker import DeadlineWorker
from kvelastic.tiers.manager import Tiers
from kvelastic.tiers.operator_requests import carry_out, labels_of
from kvelastic.tiers.statistics import TiersStatistics, TierStatistics

_log = logging.getLogger("kvelastic")

PUBLISH_S: Final = 0.5
ASK_S: Final = 0.1
"""How often it looks for requests."""
STORE_S: Final = 0.1
"""How long a store may take to say what it holds; what comes later is shown half a second later."""
CHANGED_S: Final = 2.0
"""The same after a request, so that who has the answer sees what came of it."""
SILENT_S: Final = 3.0
"""A store that has not said anything for so long is shown as silent."""
REQUEST_S: Final = 120.0
"""After that a request is answered as failed, though it may go on."""
_CLOSE_S: Final = 1.0


def show(tiers: Tiers, uuid: bytes) -> Publisher | None:
    """Show tiers on the board of the instance with that uuid until they are closed.

    None, and a line in the log, where there can be no board.
    """
    try:
        board = Board.create(uuid)
        try:
            publisher = Publisher(tiers, board)
        except BaseException:
            board.close()
            raise
    except KvelasticError as error:
        _log.warning("kvctl tiers will not see the tiers of this instance: %s", error)
        return None
    tiers.attach(publisher)
    return publisher


class Publisher:
    """See the module. Starts its threads at once; `board` belongs to it."""

    def __init__(self, tiers: Tiers, board: Board) -> None:
        self._tiers = tiers
        self._board = board
        self._labels = labels_of(tiers.stores)
        self._stores = [_Asked(store) for store in tiers.stores[:MOST_TIERS]]
        self._is_closing = threading.Event()
        self._publishing = threading.Lock()
        """Held while figures are gathered and written, so that they never go back in time."""
        self._has_warned = False
        self._late: list[tuple[threading.Thread, str]] = []
        """Requests that were answered as failed and go on, with their tier; empty: all tiers."""
        self.publish()
        self._threads = [
            threading.Thread(
                target=self._repeat, args=(work, pause_s), name="kvelastic-board", daemon=True
            )
            for work, pause_s in ((self.publish, PUBLISH_S), (self._serve, ASK_S))
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End the threads and remove the board. Repeatable. Waits a second at most for each."""
        self._is_closing.set()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_CLOSE_S)
        self._board.close()
        for store in self._stores:
            store.close(_CLOSE_S)

    def _repeat(self, work: Callable[[], None], pause_s: float) -> None:
        while not self._is_closing.wait(pause_s):
            self._try(work)

    def _try(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            # Without this thread operators would be told nothing more, for ever.
            if not self._has_warned:
                self._has_warned = True
                _log.warning("the tier board is not kept up; it is tried again: %s", error)
            _log.debug("the tier board is not kept up", exc_info=True)
            self._is_closing.wait(_CLOSE_S)

    def _serve(self) -> None:
        """Answer what was asked, one after another; what is closed meanwhile is not answered."""
        while not self._is_closing.is_set():
            found = self._board.next_request()
            if found is None:
                return
            revision, request = found
            answer = self._carried_out(revision, request)
            if answer is None:
                return
            self.publish(CHANGED_S)
            self._board.answer(answer)

    def _carried_out(self, revision: int, request: TierRequest) -> TierAnswer | None:
        """In a thread of its own, as a store may hang. None: this is closed meanwhile.

        A request that a stalled tier cannot carry out now fails at once, so those behind it are
        answered, and no more than one thread for each tier hangs.
        """
        if reason := self._obstacle(request):
            return TierAnswer(revision, "failed", (), reason)
        answers: queue.SimpleQueue[TierAnswer] = queue.SimpleQueue()
        thread = threading.Thread(
            target=lambda: answers.put(carry_out(revision, request, self._tiers)),
            name="kvelastic-operator",
            daemon=True,
        )
        thread.start()
        deadline_s = time.monotonic() + REQUEST_S
        while not self._is_closing.is_set():
            with suppress(queue.Empty):
                return answers.get(timeout=ASK_S)
            reason = self._obstacle(request)
            if time.monotonic() > deadline_s:
                reason = f"a tier has not answered within {REQUEST_S:g} s"
            if reason:
                self._late.append((thread, request.tier))
                return TierAnswer(revision, "failed", (), f"{reason}; this one may go on")
        return None

    def _obstacle(self, request: TierRequest) -> str:
        """Why a request cannot be carried out now; empty where it can."""
        self._late = [(thread, tier) for thread, tier in self._late if thread.is_alive()]
        for _, tier in self._late:
            if not tier or not request.tier or tier == request.tier:
                return f"an earlier request to {tier or 'all tiers'} has not ended"
        tiers = zip(self._labels, self._tiers.statistics_with({}, {}).tiers, strict=True)
        if any(label == request.tier and one.is_stuck for label, one in tiers):
            return f"{request.tier} is stalled; ask again when it answers"
        return ""

    def publish(self, store_s: float = STORE_S) -> None:
        """Show what is so now. Blocks for each store's answer, so long at most."""
        with self._publishing:
            for store in self._stores:
                store.ask(store_s)
            statistics = self._tiers.statistics_with({}, {})
            self._board.publish(self._figures(statistics))

    def _figures(self, all_of: TiersStatistics) -> BoardFigures:
        return BoardFigures(
            published_realtime_ns=time.time_ns(),
            answered_revision=self._board.answered_revision,
            policy=self._tiers.rules.policy.value,
            blocks=all_of.blocks,
            tiers=tuple(
                asked.figures(label, one)
                for asked, label, one in zip(self._stores, self._labels, all_of.tiers, strict=False)
            ),
        )


class _Asked:
    """A store, and what it said last."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._worker = DeadlineWorker("kvelastic-figures")
        self._capacity = Capacity(0, None, 0)
        self._counts = StoreStatistics()
        self._budget: tuple[int, int] | None = None
        self._problem = ""
        self._answered_s = -math.inf

    def ask(self, timeout_s: float) -> None:
        """Ask it again, unless it has not answered the last time yet."""
        store = self._store
        try:
            # Asked for what it holds, a store looks at its medium: so that comes first.
            self._capacity, self._counts, self._budget, self._problem = self._worker.run(
                lambda: (
                    store.capacity(),
                    store.statistics(),
                    store.write_budget(),
                    store.problem(),
                ),
                timeout_s,
            )
            self._answered_s = time.monotonic()
        except Exception:
            _log.debug("tier %s does not say what it holds", store.name, exc_info=True)

    def figures(self, label: str, measured: TierStatistics) -> TierFigures:
        """As they are shown."""
        counts = self._counts
        budget_bytes, left_bytes = self._budget or (None, None)
        return TierFigures(
            tier=label,
            kind=self._store.name,
            used_bytes=self._capacity.used_bytes,
            limit_bytes=self._capacity.limit_bytes,
            records=self._capacity.records,
            puts=counts.puts,
            refused=counts.refused,
            hits=counts.hits,
            misses=counts.misses,
            torn=counts.torn,
            evicted=counts.evicted,
            errors=counts.errors,
            bytes_written=counts.bytes_written,
            bytes_read=counts.bytes_read,
            load_us=None if measured.load_s is None else round(measured.load_s * 1e6),
            write_budget_bytes=budget_bytes,
            write_left_bytes=left_bytes,
            waiting_bytes=measured.waiting_bytes,
            is_stuck=measured.is_stuck,
            is_current=time.monotonic() - self._answered_s < SILENT_S,
            problem=self._problem,
        )

    def close(self, timeout_s: float) -> None:
        """Let go of its thread."""
        self._worker.close(timeout_s)
