"""Publishes statistics of the tiers in a status file, and serves operators' requests.

    show(tiers, uuid)           # until the tiers are closed

One thread publishes statistics twice a second, and looks for requests when the file's futex wakes
it. Each request runs in its own thread, and so do the queries of each store. A store that hangs
keeps its last statistics and delays no other store. If the file cannot be written, the publisher
logs one warning and the engine continues.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Final

from kvelastic.errors import KvelasticError
from kvelastic.shared.segment_listing import tier_status_name
from kvelastic.shared.status_file import StatusFile
from kvelastic.shared.tier_status import (
    KIND,
    MOST_PROBLEM_BYTES,
    TierAck,
    TierRequest,
    TiersStatus,
    TierStatus,
    cut_text,
)
from kvelastic.tier_list import MOST_TIERS
from kvelastic.tiers.base import Capacity, Store, StoreStatistics
from kvelastic.tiers.manager import Tiers
from kvelastic.tiers.operator_requests import carry_out, labels_of
from kvelastic.tiers.workers import Workers

_log = logging.getLogger("kvelastic")

PUBLISH_S: Final = 0.5
STORE_S: Final = 0.1
"""How long a publication waits for a store's statistics. On timeout it shows the last ones."""
CHANGED_S: Final = 2.0
"""Replaces `STORE_S` after a request, so that the publication shows the effect of the request."""
SILENT_S: Final = 3.0
"""Age of a store's statistics after which they are shown as not current."""
REQUEST_S: Final = 120.0
"""Timeout of a request. It is then reported as failed, although it may still be running."""
_CLOSE_S: Final = 1.0


def show(tiers: Tiers, uuid: bytes) -> Publisher | None:
    """Publish the tiers in the status file of the instance `uuid` until they are closed.

    If the file cannot be created, logs a warning and returns None.
    """
    try:
        publisher = Publisher(tiers, StatusFile.create(tier_status_name(uuid), KIND))
    except KvelasticError as error:
        _log.warning("kvctl tiers will not see the tiers of this instance: %s", error)
        return None
    tiers.attach(publisher.close)
    return publisher


@dataclass
class _Request:
    """A request in progress."""

    revision: int
    request: TierRequest
    answer: TierAck | None = None
    deadline_s: float = field(default_factory=lambda: time.monotonic() + REQUEST_S)


class Publisher:
    """The publisher thread of one set of tiers. The constructor starts it.

    The publisher owns `file`, and closes it even if the constructor raises.
    """

    def __init__(self, tiers: Tiers, file: StatusFile[TiersStatus, TierRequest, TierAck]) -> None:
        self._tiers = tiers
        self._file = file
        self._labels = labels_of(tiers.stores)
        self._stores = [_Asked(store) for store in tiers.stores[:MOST_TIERS]]
        self._is_closing = threading.Event()
        self._publishing = threading.Lock()
        """Held while statistics are gathered and written, so that they are published in order."""
        self._has_warned = False
        self._current: _Request | None = None
        self._late: list[_Request] = []
        """Requests that were reported as failed and may still be running."""
        try:
            self.publish()
            self._thread = threading.Thread(
                target=self._run, name="kvelastic-tier-status", daemon=True
            )
            self._thread.start()
        except BaseException:
            self._file.close()
            raise

    def close(self) -> None:
        """Stop the threads and remove the file. Idempotent. Waits at most 1 s for each thread."""
        self._is_closing.set()
        self._file.ring()
        if self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_S)
        self._file.close()
        for store in self._stores:
            store.close(_CLOSE_S)

    def _run(self) -> None:
        while not self._is_closing.is_set():
            seen = self._file.bell
            try:
                while self._serve():
                    pass
                self.publish()
            except Exception as error:
                # Keep the thread alive: without it, nothing would be published any longer.
                if not self._has_warned:
                    self._has_warned = True
                    _log.warning("tier status is not kept up; it is tried again: %s", error)
                _log.debug("the tier status file is not kept up", exc_info=True)
                self._is_closing.wait(_CLOSE_S)
            self._file.wait(seen, PUBLISH_S)

    def _serve(self) -> bool:
        """Finish the current request, or start the next one.

        Returns True after it has reported a result. Returns False if there is no request, or if
        the current one is still running. A request for a stalled tier fails at once. So later
        requests are served, and at most one thread per tier hangs.
        """
        if self._is_closing.is_set():
            return False
        if self._current is None:
            pending = self._file.pending()
            if not pending:
                return False
            revision, request = next(iter(pending.items()))
            self._current = self._begun(_Request(revision, request))
        current = self._current
        answer = current.answer
        if answer is None:
            reason = self._obstacle(current.request)
            if time.monotonic() > current.deadline_s:
                reason = f"a tier has not answered within {REQUEST_S:g} s"
            if not reason:
                return False
            self._late.append(current)
            reason = f"{reason}; this one may go on"
            answer = TierAck(current.revision, "failed", (), reason)
        self._current = None
        try:
            self.publish(CHANGED_S)
        finally:
            self._file.answer(answer)
        return True

    def _begun(self, current: _Request) -> _Request:
        """Start a request in its own thread, since a store may hang, and return it.

        If there is an obstacle, sets a failed result instead.
        """
        if reason := self._obstacle(current.request):
            current.answer = TierAck(current.revision, "failed", (), reason)
            return current

        def work() -> None:
            current.answer = carry_out(current.revision, current.request, self._tiers)
            self._file.ring()

        threading.Thread(target=work, name="kvelastic-operator", daemon=True).start()
        return current

    def _obstacle(self, request: TierRequest) -> str:
        """Return why a request cannot run now, or an empty string."""
        self._late = [late for late in self._late if late.answer is None]
        for late in self._late:
            tier = late.request.tier
            if not tier or not request.tier or tier == request.tier:
                return f"an earlier request to {tier or 'all tiers'} has not ended"
        if request.tier in [self._labels[tier] for tier in self._tiers.stuck_tiers]:
            return f"{request.tier} is stalled; ask again when it answers"
        return ""

    def publish(self, store_s: float = STORE_S) -> None:
        """Publish the current statistics. Blocks for at most `store_s` for each store."""
        with self._publishing:
            for store in self._stores:
                store.ask(store_s)
            self._file.publish(self._status())

    def _status(self) -> TiersStatus:
        tiers = self._tiers
        stuck = tiers.stuck_tiers
        return TiersStatus(
            published_realtime_ns=time.time_ns(),
            answered_revision=self._file.answered_revision,
            policy=tiers.rules.policy.value,
            blocks=tiers.block_counts(),
            tiers=tuple(
                TierStatus(
                    tier=self._labels[tier],
                    load_us=None if (load_s := tiers.load_s(tier)) is None else round(load_s * 1e6),
                    waiting_bytes=tiers.waiting_bytes(tier),
                    is_stuck=tier in stuck,
                    **store.reported(),
                )
                for tier, store in enumerate(self._stores)
            ),
        )


class _Asked:
    """A store and what it reported last."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._worker = Workers("kvelastic-statistics")
        self._reported: _Report = (Capacity(0, None, 0), StoreStatistics(), None, "")
        self._answered_s = -math.inf

    def ask(self, timeout_s: float) -> None:
        """Query the store, for at most `timeout_s`. Keeps the last values if that fails.

        Skips the store while an earlier query hangs.
        """
        try:
            self._reported = self._worker.run(partial(_report_of, self._store), timeout_s)
            self._answered_s = time.monotonic()
        except Exception:
            _log.debug("tier %s does not say what it holds", self._store.name, exc_info=True)

    def reported(self) -> dict[str, Any]:
        """Return the fields of the status file that come from the store."""
        capacity, counts, budget, problem = self._reported
        budget_bytes, left_bytes = budget or (None, None)
        return {
            "kind": self._store.name,
            **asdict(capacity),
            **asdict(counts),
            "write_budget_bytes": budget_bytes,
            "write_left_bytes": left_bytes,
            "is_current": time.monotonic() - self._answered_s < SILENT_S,
            "problem": cut_text(problem, MOST_PROBLEM_BYTES),
        }

    def close(self, timeout_s: float) -> None:
        """Stop the query thread. Waits at most `timeout_s`."""
        self._worker.close(timeout_s)


_Report = tuple[Capacity, StoreStatistics, "tuple[int, int] | None", str]


def _report_of(store: Store) -> _Report:
    # `capacity` comes first, because it makes the store check its medium.
    return store.capacity(), store.statistics(), store.write_budget(), store.problem()
