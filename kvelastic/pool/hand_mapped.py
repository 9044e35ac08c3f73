"""A range of this process whose pages the caller maps by hand, as an instance of its device.

    memory = open_hand_mapped(settings, device, geometry, name=None)
    memory.map([0, 1]); memory.unmap([0]); memory.trim(); memory.close()

There is no pool and no maintenance thread: only the caller maps and unmaps pages. Every mapped page
still needs a grant from the device's ledger. A segment makes the instance visible in `kvctl list`.
Requests through the segment cannot change the instance: the next call refuses them. Does not import
torch.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import Final

from kvelastic import _vmm
from kvelastic.config import Config
from kvelastic.device.selection import Device, reserve_range
from kvelastic.errors import DeviceUnavailableError, DriverError, OutOfMemoryError
from kvelastic.shared import ledger, segment
from kvelastic.units import format_size

_log = logging.getLogger("kvelastic")

ENGINE: Final = "vmm_ops"
"""Engine name of hand-mapped instances in `kvctl list`."""

_PATIENCE_S: Final = _vmm.RECLAIM_PATIENCE_NS / 1e9
_REFUSAL: Final = "its pages are mapped by hand: only the program that maps them changes that"


class HandMapped:
    """A hand-mapped range, returned by `open_hand_mapped`.

    Thread-safe; calls run one at a time. Between calls, exactly the held pages are granted: mapped
    pages, and unmapped pages that are kept.
    """

    def __init__(
        self,
        own_segment: segment.Segment,
        joined: ledger.JoinedLedger,
        memory: _vmm.Range,
        limit_bytes: int,
        reclaim_wait_s: float,
    ) -> None:
        self.segment = own_segment
        self.memory = memory
        self._joined = joined
        self._limit_bytes = limit_bytes
        self._reclaim_wait_s = reclaim_wait_s
        self._lock = threading.Lock()
        self._pages_seen = (0, 0)  # pages held and mapped at the last _publish
        self._answer(0, "applied")
        self._publish()

    def map(self, pages: Sequence[int]) -> None:
        """Map all of the pages or none of them.

        Blocks for at most `KVELASTIC_RECLAIM_WAIT` while other instances release memory. Raises
        `InvalidArgumentError` for a page that is already mapped, listed twice or outside the range,
        and `OutOfMemoryError` if the limit, the ledger or the device has no room.
        """
        self.memory.check_map(())  # refuses a forked child before it can block on the lock
        with self._lock:
            self.memory.check_map(pages)
            try:
                self._take_grant(len(pages))
                self.memory.map(pages)
            finally:
                self._settle()

    def unmap(self, pages: Sequence[int]) -> None:
        """Unmap all of the pages or none of them.

        Their memory is kept for the next `map`. If another instance has requested memory, it is
        released.
        """
        self.memory.check_map(())
        with self._lock:
            try:
                self.memory.unmap(pages)
            finally:
                self._settle()

    def trim(self) -> None:
        """Release the memory of unmapped pages to the device, and then its grant."""
        self.memory.check_map(())
        with self._lock:
            try:
                self._trim()
            finally:
                self._settle()

    def close(self) -> None:
        """Unmap and release all pages, leave the ledger and remove the segment.

        Memory that the driver fails to release keeps its grant. In a forked child, only the child's
        mapping of the segment is closed.
        """
        try:
            self.memory.check_map(())
        except DeviceUnavailableError:  # a forked child does not own inherited memory
            self.segment.close()
            return
        except DriverError:
            pass  # failed earlier; the memory it holds is checked below
        with self._lock:
            try:
                count = self.memory.geometry.pages
                mapped = [page for page in range(count) if self.memory.is_mapped(page)]
                self._report_leaving(self.memory.held_bytes)
                self.memory.unmap(mapped, destroy=True)
                self.memory.trim()
            except DriverError as error:
                _log.warning("%s: not all memory could be given back: %s", self.segment.name, error)
            if self.memory.failed or self.memory.held_bytes:
                self.memory.hold_grant_of(self._joined.member)
                self._joined.linger()
            else:
                self._joined.close()
            self._publish()
            self.segment.close()

    def _take_grant(self, pages: int) -> None:
        """Ensure a grant for `pages` more pages than are mapped.

        Raises `OutOfMemoryError` if the limit or the ledger has no room.
        """
        geometry, member = self.memory.geometry, self._joined.member
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
                if left_s <= 0 or not member.request_memory(missing_bytes):
                    break
                member.wait(seen, min(left_s, _PATIENCE_S))
        finally:
            member.end_memory_request()
        raise OutOfMemoryError(
            f"{format_size(missing_bytes)} more are not available of the"
            f" {format_size(member.capacity_bytes)} that instances may hold of the device; `kvctl"
            " devices` lists the holders"
        )

    def _is_granted(self, missing_bytes: int) -> bool:
        """Take a grant of `missing_bytes`, all or nothing; return whether it was taken."""
        extent_bytes, member = self.memory.geometry.extent_bytes, self._joined.member
        extents = missing_bytes // extent_bytes
        granted = member.grant(extents, extent_bytes)
        if granted == extents:
            return True
        member.give_back(granted, extent_bytes)
        return False

    def _trim(self) -> None:
        geometry = self.memory.geometry
        self._report_leaving(
            self.memory.held_bytes - self.memory.mapped_pages * geometry.page_bytes
        )
        self.memory.trim()

    def _report_leaving(self, size_bytes: int) -> None:
        extent_bytes = self.memory.geometry.extent_bytes
        self._joined.member.leaving(size_bytes // extent_bytes, extent_bytes)

    def _settle(self) -> None:
        """Release the surplus grant, publish the usage, and refuse pending requests.

        If a failure could not be undone, the amount of held memory is unknown and the whole grant
        is kept.
        """
        member, extent_bytes = self._joined.member, self.memory.geometry.extent_bytes
        reclaim_bytes, _ = member.open_reclaim()
        if reclaim_bytes:
            if self.memory.held_bytes > self.memory.mapped_pages * self.memory.geometry.page_bytes:
                self._trim()
            member.handled(reclaim_bytes)
        if not self.memory.failed:
            surplus_bytes = member.granted_bytes - self.memory.held_bytes
            member.give_back(max(0, surplus_bytes) // extent_bytes, extent_bytes)
            member.arrived(member.granted_bytes // extent_bytes, extent_bytes)
        self._publish()
        request = self.segment.control_block.owner_request()
        answered = self.segment.control_block.read_ack()["revision"]
        if request is not None and request["revision"] > answered:
            self._answer(request["revision"], "refused", _REFUSAL)

    def _answer(self, revision: int, state: str, reason: str = "") -> None:
        self.segment.control_block.publish_ack(
            revision,
            state,
            effective_limit_bytes=self._limit_bytes,
            mapped_bytes=self.memory.held_bytes,
            reason=reason,
            min_bytes=self._joined.member.min_bytes,
            priority=self._joined.member.priority,
        )

    def _publish(self) -> None:
        page_bytes, member = self.memory.geometry.page_bytes, self._joined.member
        held_bytes, mapped = self.memory.held_bytes, self.memory.mapped_pages
        held = held_bytes // page_bytes
        control_block = self.segment.control_block
        control_block.publish_usage(
            capacity_bytes=member.capacity_bytes,
            mapped_bytes=held_bytes,
            in_use_bytes=mapped * page_bytes,
            parked_bytes=held_bytes - mapped * page_bytes,
            page_bytes=page_bytes,
            pages_mapped=held,
            pages_parked=held - mapped,
        )
        # Publish all of it as in use: no thread could release it when another instance asks.
        member.publish(held_bytes, 0, 0, page_bytes, True)
        held_before, mapped_before = self._pages_seen
        self._pages_seen = (held, mapped)
        control_block.add_counter("pages_created", max(0, held - held_before))
        control_block.add_counter("pages_destroyed", max(0, held_before - held))
        control_block.add_counter("pages_mapped", max(0, mapped - mapped_before))
        control_block.add_counter("pages_unmapped", max(0, mapped_before - mapped))


def open_hand_mapped(
    settings: Config, device: Device, geometry: _vmm.Geometry, *, name: str | None
) -> HandMapped:
    """Reserve addresses, create the segment and join the ledger. Maps no page.

    Limit, guarantee and priority come from `settings`. See `segment.create` for `name`. Raises
    `GuaranteeError`, `LedgerError`, `SegmentError` or `DriverError`; then everything created is
    removed.
    """
    _vmm.set_log_level(_log.getEffectiveLevel())
    memory = reserve_range(device.driver(), geometry, guard_pages=settings.guard_pages)
    own_segment = segment.create(name, engine=ENGINE, device=device.name)
    joined: ledger.JoinedLedger | None = None
    try:
        joined = ledger.join(
            device.name,
            group=settings.ledger,
            capacity_bytes=device.capacity_bytes,
            total_bytes=device.total_bytes,
            name=own_segment.name,
            uuid=own_segment.control_block.read_header()["uuid"],
            min_bytes=settings.minimum,
            priority=settings.priority,
        )
        capacity_bytes = joined.member.capacity_bytes
        limit_bytes = settings.limit_bytes(capacity_bytes)
        if limit_bytes is None:
            limit_bytes = min(capacity_bytes, memory.range_bytes)
        return HandMapped(own_segment, joined, memory, limit_bytes, settings.reclaim_wait_s)
    except BaseException:
        if joined is not None:
            joined.close()
        own_segment.close()
        raise
