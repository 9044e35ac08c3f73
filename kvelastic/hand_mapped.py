"""A range of this process whose pages the caller maps by hand, as an instance of its device.

    memory = open_hand_mapped(settings, device, geometry, name=None)
    memory.map([0, 1]); memory.unmap([0]); memory.trim(); memory.close()

There is no pool and no keeper: pages come and go by the caller's word alone, but none comes without
a grant of the device's ledger. A segment shows in `kvctl list` what is held; nobody can change it
from there, so every request is refused, at the next call. Imports no torch.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import Final

from kvelastic import _vmm, ledger, segment
from kvelastic.config import Config
from kvelastic.device import Device, reserve_range
from kvelastic.errors import DeviceUnavailableError, DriverError, OutOfMemoryError
from kvelastic.sizes import format_size

_log = logging.getLogger("kvelastic")

ENGINE: Final = "vmm_ops"
"""What `kvctl list` has as the engine of these instances."""

_PATIENCE_S: Final = _vmm.RECLAIM_PATIENCE_NS / 1e9
_REFUSAL: Final = "its pages are mapped by hand: only the program that maps them changes that"


class HandMapped:
    """What `open_hand_mapped` made. Any thread may call it, one call runs at a time.

    Between two calls what is granted is what is held: mapped pages, and those kept by `unmap`.
    """

    def __init__(
        self,
        own_segment: segment.Segment,
        place: ledger.JoinedLedger,
        memory: _vmm.Range,
        limit_bytes: int,
        reclaim_wait_s: float,
    ) -> None:
        self.segment = own_segment
        self.memory = memory
        self._place = place
        self._limit_bytes = limit_bytes
        self._reclaim_wait_s = reclaim_wait_s
        self._lock = threading.Lock()
        self._pages_seen = (0, 0)  # held and mapped, as they were counted last
        self._answer(0, "applied")
        self._publish()

    def map(self, pages: Sequence[int]) -> None:
        """Map pages, all or none; waits at most `KVELASTIC_RECLAIM_WAIT` for others' memory.

        Raises `InvalidArgumentError` for a page that is mapped already, named twice or outside the
        range, `OutOfMemoryError` where limit, ledger or device have no room.
        """
        self.memory.check_map(())  # a forked child is refused before it waits for a lock
        with self._lock:
            self.memory.check_map(pages)
            try:
                self._take_grant(len(pages))
                self.memory.map(pages)
            finally:
                self._settle()

    def unmap(self, pages: Sequence[int]) -> None:
        """Unmap pages, all or none. Their memory is kept for the next `map`, unless others ask."""
        self.memory.check_map(())
        with self._lock:
            try:
                self.memory.unmap(pages)
            finally:
                self._settle()

    def trim(self) -> None:
        """Give the memory of unmapped pages back to the device, and then its grant."""
        self.memory.check_map(())
        with self._lock:
            try:
                self._trim()
            finally:
                self._settle()

    def close(self) -> None:
        """Unmap all, give it back, leave the ledger and remove the segment.

        What the driver does not take back stays granted as long as it is there. In a forked child
        only the child's view of the segment goes.
        """
        try:
            self.memory.check_map(())
        except DeviceUnavailableError:  # a forked child: what it has inherited is not its own
            self.segment.close()
            return
        except DriverError:
            pass  # failed before: what it holds is looked at below
        with self._lock:
            try:
                count = self.memory.geometry.pages
                mapped = [page for page in range(count) if self.memory.is_mapped(page)]
                self._say_leaving(self.memory.held_bytes)
                self.memory.unmap(mapped, destroy=True)
                self.memory.trim()
            except DriverError as error:
                _log.warning("%s: not all memory could be given back: %s", self.segment.name, error)
            if self.memory.failed or self.memory.held_bytes:
                self.memory.hold_grant_of(self._place.member)
                self._place.linger()
            else:
                self._place.close()
            self._publish()
            self.segment.close()

    def _take_grant(self, pages: int) -> None:
        """Have what is granted be enough for so many pages more than are mapped."""
        geometry, member = self.memory.geometry, self._place.member
        wanted_bytes = (self.memory.mapped_pages + pages) * geometry.page_bytes
        missing_bytes = wanted_bytes - member.granted_bytes
        if wanted_bytes > self._limit_bytes:
            raise OutOfMemoryError(
                f"{format_size(wanted_bytes)} mapped would be more than the limit of"
                f" {format_size(self._limit_bytes)}; unmap pages, or raise KVELASTIC_LIMIT"
            )
        if missing_bytes <= 0 or self._is_granted(missing_bytes):
            return
        deadline_s = time.monotonic() + self._reclaim_wait_s
        try:
            while True:
                seen = member.bell
                if self._is_granted(missing_bytes):
                    return
                left_s = deadline_s - time.monotonic()
                if left_s <= 0 or not member.ask(missing_bytes):
                    break
                member.wait(seen, min(left_s, _PATIENCE_S))
        finally:
            member.stop_asking()
        raise OutOfMemoryError(
            f"{format_size(missing_bytes)} more are not available of the"
            f" {format_size(member.capacity_bytes)} that instances may hold of the device; `kvctl"
            " devices` lists the holders"
        )

    def _is_granted(self, missing_bytes: int) -> bool:
        """Take all of it or nothing."""
        extent_bytes, member = self.memory.geometry.extent_bytes, self._place.member
        extents = missing_bytes // extent_bytes
        granted = member.grant(extents, extent_bytes)
        if granted == extents:
            return True
        member.give_back(granted, extent_bytes)
        return False

    def _trim(self) -> None:
        geometry = self.memory.geometry
        self._say_leaving(self.memory.held_bytes - self.memory.mapped_pages * geometry.page_bytes)
        self.memory.trim()

    def _say_leaving(self, size_bytes: int) -> None:
        extent_bytes = self.memory.geometry.extent_bytes
        self._place.member.leaving(size_bytes // extent_bytes, extent_bytes)

    def _settle(self) -> None:
        """Give back what is granted and not held, say what is held, and answer requests.

        After a failure that could not be undone nobody knows what is held: all stays granted.
        """
        member, extent_bytes = self._place.member, self.memory.geometry.extent_bytes
        wanted_bytes, _ = member.wanted()
        if wanted_bytes:
            if self.memory.held_bytes > self.memory.mapped_pages * self.memory.geometry.page_bytes:
                self._trim()
            member.handled(wanted_bytes)
        if not self.memory.failed:
            surplus_bytes = member.granted_bytes - self.memory.held_bytes
            member.give_back(max(0, surplus_bytes) // extent_bytes, extent_bytes)
            member.arrived(member.granted_bytes // extent_bytes, extent_bytes)
        self._publish()
        request = self.segment.record.owner_request()
        answered = self.segment.record.read_answer()["revision"]
        if request is not None and request["revision"] > answered:
            self._answer(request["revision"], "refused", _REFUSAL)

    def _answer(self, revision: int, state: str, reason: str = "") -> None:
        self.segment.record.publish_answer(
            revision,
            state,
            effective_limit_bytes=self._limit_bytes,
            mapped_bytes=self.memory.held_bytes,
            reason=reason,
            min_bytes=self._place.member.min_bytes,
            priority=self._place.member.priority,
        )

    def _publish(self) -> None:
        page_bytes, member = self.memory.geometry.page_bytes, self._place.member
        held_bytes, mapped = self.memory.held_bytes, self.memory.mapped_pages
        held = held_bytes // page_bytes
        record = self.segment.record
        record.publish_usage(
            capacity_bytes=member.capacity_bytes,
            mapped_bytes=held_bytes,
            in_use_bytes=mapped * page_bytes,
            parked_bytes=held_bytes - mapped * page_bytes,
            page_bytes=page_bytes,
            pages_mapped=held,
            pages_parked=held - mapped,
        )
        # To others all of it is in use: nobody is there to give it the moment that they ask.
        member.publish(held_bytes, 0, 0, page_bytes, True)
        held_before, mapped_before = self._pages_seen
        self._pages_seen = (held, mapped)
        record.add_counter("pages_created", max(0, held - held_before))
        record.add_counter("pages_destroyed", max(0, held_before - held))
        record.add_counter("pages_mapped", max(0, mapped - mapped_before))
        record.add_counter("pages_unmapped", max(0, mapped_before - mapped))


def open_hand_mapped(
    settings: Config, device: Device, geometry: _vmm.Geometry, *, name: str | None
) -> HandMapped:
    """Reserve the addresses, make the segment and join the ledger; maps nothing.

    Limit, guarantee and priority are those of the variables; `name` as in `segment.create`. Raises
    `GuaranteeError`, `LedgerError`, `SegmentError`, `DriverError`; nothing is left behind then.
    """
    _vmm.set_log_level(_log.getEffectiveLevel())
    memory = reserve_range(device.driver(), geometry, guard_pages=settings.guard_pages)
    own_segment = segment.create(name, engine=ENGINE, device=device.name)
    place: ledger.JoinedLedger | None = None
    try:
        place = ledger.join(
            device.name,
            group=settings.ledger,
            capacity_bytes=device.capacity_bytes,
            total_bytes=device.total_bytes,
            name=own_segment.name,
            uuid=own_segment.record.read_header()["uuid"],
            min_bytes=settings.minimum,
            priority=settings.priority,
        )
        capacity_bytes = place.member.capacity_bytes
        limit_bytes = settings.limit_bytes(capacity_bytes)
        if limit_bytes is None:
            limit_bytes = min(capacity_bytes, memory.range_bytes)
        return HandMapped(own_segment, place, memory, limit_bytes, settings.reclaim_wait_s)
    except BaseException:
        if place is not None:
            place.close()
        own_segment.close()
        raise
