"""A disk tier that is too small, slow, filled and erased, under the chaos of an engine.

    disk = BadDisk(tmp_path)
    with Server(..., environment=disk.environment, under=disk.slow.under) as server:
        operator.disk = disk           # an operator that is `OverBadDisk`, too

Blocks leave and come back all the time, and none may come back as another one.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from chaos import Operator
from slow_disk import SlowDisk
from under_tiers import status_file_of

from kvelastic.shared import segment, tier_status
from kvelastic.shared.tier_status import TierRequest

DISK_BYTES = 24 << 20
"""Less than what the requests have together."""
SMALL_BYTES = 1 << 20
DELAYS_S = (0.0, 0.0, 0.002, 0.05, 0.5)
ANSWER_S = 30.0


class BadDisk:
    """A folder, and how slow it is."""

    def __init__(self, work_folder: Path) -> None:
        folder = work_folder / "disk"
        folder.mkdir(mode=0o700)
        self.slow = SlowDisk(work_folder, folder)
        self.environment = {
            **self.slow.environment,
            "KVELASTIC_TIERS": f"disk:{folder}:{DISK_BYTES}",
            "KVELASTIC_TIER_STAGING": "2M",
            "KVELASTIC_TIER_IDLE_SECONDS": "0.2",
            "KVELASTIC_TIER_LIMIT_SECONDS": "0.5",
            "KVELASTIC_TIER_SLEEP_SECONDS": "2",
            "KVELASTIC_TIER_COMPARE": "false",  # a slow disk is asked all the same
        }


class OverDisk(Operator):
    """Also fills, erases and verifies a disk tier."""

    disk_bytes = DISK_BYTES
    """Of the tier."""
    _loaded = 0

    def things(self) -> dict[Callable[[], None], int]:
        more = {self.fill: 1, self.erase: 1, self.verify: 1}
        return {**super().things(), self.limit: 6, self.sleep: 4, **more}

    def do_something(self) -> None:
        super().do_something()
        status_file = status_file_of(self.name)
        self.clients.counts["blocks loaded"] += status_file.blocks.loaded - self._loaded
        self._loaded = status_file.blocks.loaded

    def fill(self) -> None:
        """A disk that is full: as small as what lies there, or smaller."""
        for size_bytes in (SMALL_BYTES, self.disk_bytes):
            self.ask_tiers(TierRequest("limit", tier="disk", size_bytes=size_bytes))
            self._look(self.pick.random(), None)

    def erase(self) -> None:
        self.ask_tiers(TierRequest("clear"))

    def verify(self) -> None:
        """Index, account and medium agree."""
        self.ask_tiers(TierRequest("verify"))

    def ask_tiers(self, request: TierRequest) -> None:
        """Late is an answer where a slow disk takes longer than is waited for."""
        answer = tier_status.ask(segment.inspect(self.name), request, ANSWER_S)
        state = "late" if answer is None else answer.state
        self.clients.counts[f"{request.kind} {state}"] += 1
        assert state in ("done", "late"), answer


class OverBadDisk(OverDisk):
    """Also slows it down."""

    disk: BadDisk

    def things(self) -> dict[Callable[[], None], int]:
        return {**super().things(), self.slow_down: 2}

    def slow_down(self) -> None:
        self.disk.slow.delay(self.pick.choice(DELAYS_S))
