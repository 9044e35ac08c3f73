"""State of a disk store: index, slots, files, space and statistics, and the lock over them."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from kvelastic import _vmm
from kvelastic.errors import IntegrityError, InvalidArgumentError
from kvelastic.tier_list import reason_of
from kvelastic.tiers.base import Selection, StoreStatistics, Unerased, each_key
from kvelastic.tiers.stores.circuit_breaker import CircuitBreaker
from kvelastic.tiers.stores.disk.erase import erase_left_behind
from kvelastic.tiers.stores.disk.folder import Folder, FolderBusyError
from kvelastic.tiers.stores.disk.format import entries
from kvelastic.tiers.stores.disk.passing_lock import PassingLock
from kvelastic.tiers.stores.disk.record_transfers import Answers
from kvelastic.tiers.stores.disk.room import Room
from kvelastic.tiers.stores.disk.slots import SlotTable
from kvelastic.tiers.stores.disk.write_budget import WriteBudget

_log = logging.getLogger("kvelastic")


class DiskState:
    """State of one disk store. Every change happens under `changed`.

    `changed` is a condition over a reentrant lock. It is not held during record I/O. Calls in
    progress are counted in `reading` and `writing` instead, and a caller that needs exclusive
    access waits for them.
    """

    def __init__(
        self,
        folders: Sequence[str | os.PathLike[str]],
        record_bytes: int,
        limit_bytes: int,
        policy: str,
        daily_write_bytes: int | None,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        """Open the folders and adopt their files. Raises as `DiskStore` does."""
        self.changed = PassingLock()
        self.reading = 0
        self.writing = 0
        self.closed = False
        self.reads = CircuitBreaker(clock)
        self.writes = CircuitBreaker(clock)
        self.growth = CircuitBreaker(clock)
        self.opening = CircuitBreaker(clock)
        """Backoff for folders that could not be opened; the other folders still grow."""
        self.table = SlotTable()
        self.index = _vmm.TierIndex(1, policy)
        self._record_bytes = record_bytes
        self._erasing = 0
        self._held: set[int] = set()
        """Slots of erased records that are still held."""
        self._unerased = Unerased()
        """What the last erasure left in files of other engines."""
        self._statistics = StoreStatistics()
        self._problems: dict[object, str] = {}
        """Current failures, keyed by reads, writes, growth or a folder's path.

        Removed on success.
        """
        self._paths = [os.path.abspath(os.fspath(path)) for path in folders]  # noqa: PTH100
        self._folders: list[Folder] = []
        try:
            self._open_folders(again=False)
            self.room = Room(
                self.index, self.table, self._folders, record_bytes, limit_bytes, clock
            )
            first = self._folders[0].fd if self._folders else -1
            self.budget = WriteBudget(first, daily_write_bytes, wall_clock)
            with self.medium(self.growth):
                self.room.adopt()
        except BaseException:
            for folder in self._folders:
                folder.close()
            raise

    # --- the lock ---------------------------------------------------------------------------------

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the lock while no put is in progress; new puts wait."""
        with self.changed:
            self._erasing += 1
            try:
                self.changed.wait_for(lambda: not self.writing)
                if not self.closed:
                    with self.medium(self.growth):
                        self.room.finish_adoption()
                yield
            finally:
                self._erasing -= 1
                self.changed.notify_all()

    def wait_for_erasing(self) -> None:
        """Wait until no caller holds or waits for `alone`. The caller holds the lock."""
        self.changed.wait_for(lambda: not self._erasing)

    def count(self, **more: int) -> None:
        """Add to the statistics."""
        with self.changed:
            now = self._statistics
            self._statistics = replace(
                now, **{name: getattr(now, name) + count for name, count in more.items()}
            )

    def statistics(self) -> StoreStatistics:
        """Return all statistics."""
        with self.changed:
            now = self._statistics
            evicted, torn = now.evicted + self.room.evicted, now.torn + self.room.torn
            return replace(now, evicted=evicted, torn=torn)

    def problem(self) -> str:
        """Return the current failures, for an operator; empty if there are none."""
        with self.changed:
            return "; ".join(dict.fromkeys(self._problems.values()))

    def write_budget(self) -> tuple[int, int] | None:
        """Return the daily write budget and what remains of it, in bytes; None if unlimited."""
        with self.changed:
            return self.budget.left()

    # --- the medium -------------------------------------------------------------------------------

    def judge(self, breaker: CircuitBreaker, answers: Answers) -> None:
        """Count the failures of a call; after any failure, suspend I/O of this kind for a while."""
        failed = [-moved for moved, _ in answers if moved < 0]
        if failed:
            self.failed(breaker, OSError(failed[0], os.strerror(failed[0])), len(failed))
        else:
            with self.changed:
                breaker.worked()
                self._problems.pop(breaker, None)

    def failed(
        self, breaker: CircuitBreaker, error: OSError, calls: int = 1, *, what: object | None = None
    ) -> None:
        """Record a failure of `what`, or of every call of this kind if None."""
        _log.debug("disk tier: %s", error)
        with self.changed:
            self.count(errors=calls)
            breaker.failed(reason_of(error))
            self._problems[what or breaker] = reason_of(error)

    @contextmanager
    def medium(self, breaker: CircuitBreaker, what: object | None = None) -> Iterator[None]:
        """Catch and count errors of the file system, and suspend calls of this kind for a while.

        The suspension avoids repeated waits for a neighbour that was stopped while it held a
        folder's lock. `problem` shows the failure until `what`, or a read or write of records,
        succeeds.
        """
        try:
            yield
        except FolderBusyError as error:
            self.failed(breaker, error, 0, what=what)
        except OSError as error:
            self.failed(breaker, error, what=what)
        else:
            self._problems.pop(what, None)

    def look(self) -> None:
        """Check neighbours' requests and reopen folders that are back.

        The caller holds the lock.
        """
        if not self.closed and self.growth.allows_calls:
            with self.medium(self.growth, "look"):
                if self._open_folders(again=True):
                    self.room.begin_to_adopt()
                self.room.look()
                self._problems.pop(self.growth, None)

    def grow(self, wanted: int) -> None:
        """Try to allocate space for `wanted` more records. The caller holds the lock."""
        stats = self.index.stats()
        missing = wanted - (stats["slots"] - stats["ready"] - stats["pending"] - stats["closed"])
        if missing > 0 and self.growth.allows_calls:
            with self.medium(self.growth, "grow"):
                self.room.grow(missing)

    def _open_folders(self, *, again: bool) -> bool:
        """Open folders that are not open or were replaced; return whether any was opened.

        Raises `InvalidArgumentError` if other users can access a folder, unless `again` is true.
        """
        for folder in self._folders[:]:
            in_use = any(file.folder == folder.fd for file in self.table.files())
            if not in_use and not folder.is_there():
                self._folders.remove(folder)
                folder.close()
        there = len(self._folders)
        open_paths = {folder.path for folder in self._folders}
        missing = [path for path in self._paths if path not in open_paths]
        for path in missing if self.opening.allows_calls else ():
            self._open_or_go_without(path, again=again)
        if len(self._folders) == len(self._paths):
            self.opening.worked()
        return len(self._folders) > there

    def _open_or_go_without(self, path: str, *, again: bool) -> None:
        try:
            self._open_folder(path)
        except InvalidArgumentError as error:
            if not again:
                raise
            self._go_without(path, OSError(errno.EPERM, str(error)))
        except OSError as error:
            self._go_without(path, error)

    def _go_without(self, path: str, error: OSError) -> None:
        if path not in self._problems:
            _log.warning("the disk tier goes without %s: %s", path, reason_of(error))
        self.failed(self.opening, error, what=path)

    def _open_folder(self, path: str) -> None:
        folder = Folder(path)
        if any(folder.identity == other.identity for other in self._folders):
            folder.close()
            raise InvalidArgumentError(f"{path} is named twice; name each folder once")
        self._folders.append(folder)
        self._problems.pop(path, None)

    # --- erasing ----------------------------------------------------------------------------------

    def erase(self, keys: bytes) -> int:
        """Erase keys and return how many were present.

        The caller holds `alone`. When the call returns, neither these records nor any displaced
        record can be read from the files. Held records follow when their holds end. The next
        erasure retries what the file system refused: see `unerased`.
        """
        if self.closed:
            return 0
        slots = [self.index.slot_of(key) for key in each_key(keys)]
        slots = [slot for slot in slots if slot >= 0]
        for slot in slots:
            self.table.clear(slot)
        freed = {slot for _, slot in self.index.erase(keys)}
        self._held.update(slot for slot in slots if slot not in freed)
        self._wipe(self.table.residue())
        return len(slots)

    def erase_left_behind(self, selection: Selection, now_s: float) -> int:
        """Erase records in files of exited engines. The caller holds the lock."""
        erased = others = 0
        unreached = []
        for folder in self._folders if not self.closed else []:
            own = sum(file.folder == folder.fd for file in self.table.files())
            unreached.append(folder.path)
            with self.medium(self.writes):
                done = erase_left_behind(folder, selection, now_s)
                unreached.pop()
                erased += done.records + done.damaged_files
                others += max(0, done.busy_files - own)
        self._unerased = Unerased(
            failed=f"{', '.join(unreached)} could not be looked at" if unreached else "",
            elsewhere=f"{others} files of other engines were left" if others else "",
        )
        return erased

    def unerased(self) -> Unerased:
        """Return what could not be erased.

        Held records are omitted: they go when the holds end.
        """
        with self.changed:
            lying = sum(slot not in self._held for slot in self.table.residue())
            failed = [f"{lying} records could not be wiped"] if lying else []
            failed += [self._unerased.failed] if self._unerased.failed else []
            return self._unerased._replace(failed="; ".join(failed))

    def release(self, ticket: int) -> None:
        """End a hold. Does not block: if the lock is held, its holder ends the hold."""
        self.changed.soon(lambda: self._end_hold(ticket))

    def _end_hold(self, ticket: int) -> None:
        """Wipe records erased during the hold, before their slots can be reused."""
        freed = [slot for _, slot in self.index.release(ticket)]
        if self.closed:
            return
        self._held.difference_update(freed)
        self._wipe(freed)
        if self.room.owes:
            with self.medium(self.growth):
                self.room.fit()

    def _wipe(self, slots: Iterable[int]) -> None:
        """Clear the entries of slots, and zero their records unless held."""
        for file, own in self.table.by_file(slots).items():
            first = self.table.range_of(file).start
            with self.medium(self.writes):
                file.clear_entries(own)
                file.sync()
                free = [slot for slot in own if first + slot not in self._held]
                file.wipe(free)
                file.sync()
                self.table.set_residue((first + slot for slot in free), is_there=False)

    # --- the end ----------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Raises `IntegrityError` if index, slots and files disagree. The caller holds `alone`."""
        self.index.check_integrity()
        self.room.check()
        records = 0
        for slot in self.table.occupied():
            key = self.table.key(slot)
            found = self.index.slot_of(key)
            if found != slot:
                raise _broken(f"slot {slot} has {key.hex()}, which the index has in {found}")
            records += 1
        ready = self.index.stats()["ready"]
        if records != ready:
            raise _broken(f"{records} slots have records, {ready} are in the index")
        with self.medium(self.reads):
            self._check_tables()

    def _check_tables(self) -> None:
        for file in self.table.files():
            first = self.table.range_of(file).start
            found = dict(entries(file.read_table(), file.file_id))
            for slot in self.table.range_of(file):
                entry = found.get(slot - first)
                if self.table.has_record(slot):
                    key = self.table.key(slot)
                    if entry is None or entry.key != key:
                        raise _broken(f"{file.name} does not say that slot {slot} has {key.hex()}")
                elif slot - first in found and not self._statistics.errors:
                    raise _broken(f"{file.name} says that slot {slot} has a record")

    def close(self) -> None:
        """Close files and folders once no call is in progress. Idempotent."""
        with self.alone():
            if self.closed:
                return
            self.changed.wait_for(lambda: not self.reading)
            held = list(self._held)
            self._held.clear()  # open holds cannot read any longer
            self._wipe(held)
            self.closed = True
            self.budget.close()
            for file in self.table.files():
                file.close()
            for folder in self._folders:
                folder.close()

    def forget_in_child(self) -> None:
        """Close the descriptors after a fork; the files and their locks belong to the parent."""
        self.changed = PassingLock()
        self.closed = True
        self.budget.close()
        for file in self.table.files():
            file.close()
        for folder in self._folders:
            folder.forget()


def _broken(what: str) -> IntegrityError:
    return IntegrityError(f"disk store: {what}")
