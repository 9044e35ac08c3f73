"""State of a disk store: index, slots, files, space and statistics, and the lock over them."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from kvelastic import _vmm
from kvelastic.errors import IntegrityError, InvalidArgumentError
from kvelastic.tier_list import reason_of
from kvelastic.tiers.base import Selection, Store, StoreStatistics, Unerased, each_key
from kvelastic.tiers.stores.circuit_breaker import CircuitBreaker
from kvelastic.tiers.stores.disk.erase import ErasedAtRest, erase_left_behind
from kvelastic.tiers.stores.disk.file import Answers
from kvelastic.tiers.stores.disk.folder import Folder, FolderBusyError
from kvelastic.tiers.stores.disk.format import entries
from kvelastic.tiers.stores.disk.passing_lock import PassingLock
from kvelastic.tiers.stores.disk.room import Room
from kvelastic.tiers.stores.disk.slots import SlotTable
from kvelastic.tiers.stores.disk.write_budget import WriteBudget

_log = logging.getLogger("kvelastic")


class DiskState(Store):
    """State of one disk store. Every change happens under `_changed`.

    `_changed` is a condition over a reentrant lock. It is not held during record I/O. Calls in
    progress are counted in `_reading` and `_writing` instead, and a caller that needs exclusive
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
        super().__init__(record_bytes)
        self._changed = PassingLock()
        self._reading = 0
        self._writing = 0
        self._closed = False
        self._reads = CircuitBreaker(clock)
        self._writes = CircuitBreaker(clock)
        self._growth = CircuitBreaker(clock)
        self._opening = CircuitBreaker(clock)
        """Backoff for folders that could not be opened; the other folders still grow."""
        self._table = SlotTable()
        self._index = _vmm.TierIndex(1, policy)
        self._erasing = 0
        self._held: set[int] = set()
        """Slots of erased records that are still held."""
        self._unerased = Unerased()
        """What the last erasure left in files of other engines."""
        self._problems: dict[object, str] = {}
        """Current failures, keyed by reads, writes, growth or a folder's path.

        Removed on success.
        """
        self._paths = [os.path.abspath(os.fspath(path)) for path in folders]  # noqa: PTH100
        self._folders: list[Folder] = []
        try:
            self._open_folders(again=False)
            self._room = Room(
                self._index, self._table, self._folders, record_bytes, limit_bytes, clock
            )
            first = self._folders[0].fd if self._folders else -1
            self._budget = WriteBudget(first, daily_write_bytes, wall_clock)
            with self._medium(self._growth):
                self._room.adopt()
        except BaseException:
            for folder in self._folders:
                folder.close()
            raise

    # --- the lock ---------------------------------------------------------------------------------

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the lock while no put is in progress; new puts wait until `_erasing` is 0."""
        with self._changed:
            self._erasing += 1
            try:
                self._changed.wait_for(lambda: not self._writing)
                if not self._closed:
                    with self._medium(self._growth):
                        self._room.finish_adoption()
                yield
            finally:
                self._erasing -= 1
                self._changed.notify_all()

    def statistics(self) -> StoreStatistics:
        """Return the counters since the store was opened."""
        with self._changed:
            now = super().statistics()
            evicted, torn = now.evicted + self._room.evicted, now.torn + self._room.torn
            return replace(now, evicted=evicted, torn=torn)

    def problem(self) -> str:
        """Return the current failures, for an operator; empty if there are none."""
        with self._changed:
            return "; ".join(dict.fromkeys(self._problems.values()))

    def write_budget(self) -> tuple[int, int] | None:
        """Return the daily write budget and what remains of it, in bytes; None if unlimited."""
        with self._changed:
            return self._budget.left()

    # --- the medium -------------------------------------------------------------------------------

    def _judge(self, breaker: CircuitBreaker, answers: Answers) -> None:
        """Count the failures of a call; after any failure, suspend I/O of this kind for a while."""
        failed = [-moved for moved, _ in answers if moved < 0]
        if failed:
            self._failed(breaker, OSError(failed[0], os.strerror(failed[0])), len(failed))
        else:
            with self._changed:
                breaker.worked()
                self._problems.pop(breaker, None)

    def _failed(
        self, breaker: CircuitBreaker, error: OSError, calls: int = 1, *, what: object | None = None
    ) -> None:
        """Record a failure of `what`, or of every call of this kind if None."""
        _log.debug("disk tier: %s", error)
        with self._changed:
            self._count(errors=calls)
            breaker.failed(reason_of(error))
            self._problems[what or breaker] = reason_of(error)

    @contextmanager
    def _medium(self, breaker: CircuitBreaker, what: object | None = None) -> Iterator[None]:
        """Catch and count errors of the file system, and suspend calls of this kind for a while.

        The suspension avoids repeated waits for a neighbour that was stopped while it held a
        folder's lock. `problem` shows the failure until `what`, or a read or write of records,
        succeeds.
        """
        try:
            yield
        except FolderBusyError as error:
            self._failed(breaker, error, 0, what=what)
        except OSError as error:
            self._failed(breaker, error, what=what)
        else:
            self._problems.pop(what, None)

    def _look(self) -> None:
        """Check neighbours' requests and reopen folders that are back.

        The caller holds the lock.
        """
        if not self._closed and self._growth.allows_calls:
            with self._medium(self._growth, "look"):
                if self._open_folders(again=True):
                    self._room.begin_to_adopt()
                self._room.look()
                self._problems.pop(self._growth, None)
                if "grow" not in self._problems:
                    self._growth.worked()

    def _grow(self, wanted: int) -> None:
        """Try to allocate space for `wanted` more records. The caller holds the lock."""
        stats = self._index.stats()
        missing = wanted - (stats["slots"] - stats["ready"] - stats["pending"] - stats["closed"])
        if missing > 0 and self._growth.allows_calls:
            with self._medium(self._growth, "grow"):
                self._room.grow(missing)

    def _open_folders(self, *, again: bool) -> bool:
        """Open folders that are not open or were replaced; return whether any was opened.

        Raises `InvalidArgumentError` if other users can access a folder, unless `again` is true.
        """
        for folder in self._folders[:]:
            in_use = any(file.folder == folder.fd for file in self._table.files())
            if not in_use and not folder.is_there():
                self._folders.remove(folder)
                folder.close()
        there = len(self._folders)
        open_paths = {folder.path for folder in self._folders}
        missing = [path for path in self._paths if path not in open_paths]
        for path in missing if self._opening.allows_calls else ():
            self._open_or_go_without(path, again=again)
        if len(self._folders) == len(self._paths):
            self._opening.worked()
        return len(self._folders) > there

    def _open_or_go_without(self, path: str, *, again: bool) -> None:
        try:
            self._open_folder(path)
            return
        except InvalidArgumentError as error:
            if not again:
                raise
            failure = OSError(errno.EPERM, str(error))
        except OSError as error:
            failure = error
        if path not in self._problems:
            _log.warning("the disk tier goes without %s: %s", path, reason_of(failure))
        self._failed(self._opening, failure, what=path)

    def _open_folder(self, path: str) -> None:
        folder = Folder(path)
        if any(folder.identity == other.identity for other in self._folders):
            folder.close()
            raise InvalidArgumentError(f"{path} is named twice; name each folder once")
        self._folders.append(folder)
        self._problems.pop(path, None)

    # --- erasing ----------------------------------------------------------------------------------

    def _erase(self, keys: bytes) -> int:
        """Erase keys and return how many were present.

        The caller holds `_alone`. When the call returns, neither these records nor any displaced
        record can be read from the files. Held records follow when their holds end. The next
        erasure retries what the file system refused: see `unerased`.
        """
        if self._closed:
            return 0
        slots = [self._index.slot_of(key) for key in each_key(keys)]
        slots = [slot for slot in slots if slot >= 0]
        for slot in slots:
            self._table.clear(slot)
        freed = {slot for _, slot in self._index.erase(keys)}
        self._held.update(slot for slot in slots if slot not in freed)
        self._wipe(self._table.residue())
        return len(slots)

    def _erase_left_behind(self, selection: Selection, now_s: float) -> int:
        """Erase records in files of exited engines. The caller holds the lock."""
        done = ErasedAtRest()
        others = 0
        unreached = []
        for folder in self._folders if not self._closed else []:
            own = sum(file.folder == folder.fd for file in self._table.files())
            busy = done.busy_files
            unreached.append(folder.path)
            with self._medium(self._writes):
                erase_left_behind(folder, selection, now_s, done)
                unreached.pop()
                others += max(0, done.busy_files - busy - own)
        self._unerased = Unerased(
            failed=f"{', '.join(unreached)} could not be looked at" if unreached else "",
            elsewhere=f"{others} files of other engines were left" if others else "",
        )
        return done.records + done.damaged_files

    def unerased(self) -> Unerased:
        """Return what could not be erased.

        Held records are omitted: they go when the holds end.
        """
        with self._changed:
            lying = sum(slot not in self._held for slot in self._table.residue())
            failed = [f"{lying} records could not be wiped"] if lying else []
            failed += [self._unerased.failed] if self._unerased.failed else []
            return self._unerased._replace(failed="; ".join(failed))

    def _release(self, ticket: int) -> None:
        """End a hold. Does not block: if the lock is held, its holder ends the hold."""
        self._changed.soon(lambda: self._end_hold(ticket))

    def _end_hold(self, ticket: int) -> None:
        """Wipe records erased during the hold, before their slots can be reused."""
        freed = [slot for _, slot in self._index.release(ticket)]
        if self._closed:
            return
        self._held.difference_update(freed)
        self._wipe(freed)
        if self._room.owes:
            with self._medium(self._growth):
                self._room.fit()

    def _wipe(self, slots: Iterable[int]) -> None:
        """Clear the entries of slots, and zero their records unless held."""
        for file, own in self._table.by_file(slots).items():
            first = self._table.range_of(file).start
            with self._medium(self._writes):
                file.clear_entries(own)
                file.sync()
                free = [slot for slot in own if first + slot not in self._held]
                file.wipe(free)
                file.sync()
                self._table.set_residue((first + slot for slot in free), is_there=False)

    # --- the end ----------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Check index, slots and the tables in the files. Waits for puts in progress."""
        with self._alone():
            if not self._closed:
                self._check()

    def _check(self) -> None:
        self._index.check_integrity()
        self._room.check()
        records = 0
        for slot in self._table.occupied():
            key = self._table.key(slot)
            found = self._index.slot_of(key)
            if found != slot:
                raise _broken(f"slot {slot} has {key.hex()}, which the index has in {found}")
            records += 1
        ready = self._index.stats()["ready"]
        if records != ready:
            raise _broken(f"{records} slots have records, {ready} are in the index")
        with self._medium(self._reads):
            self._check_tables()

    def _check_tables(self) -> None:
        for file in self._table.files():
            first = self._table.range_of(file).start
            found = dict(entries(file.read_table(), file.file_id))
            for slot in self._table.range_of(file):
                entry = found.get(slot - first)
                if self._table.has_record(slot):
                    key = self._table.key(slot)
                    if entry is None or entry.key != key:
                        raise _broken(f"{file.name} does not say that slot {slot} has {key.hex()}")
                elif slot - first in found and not self._counts["errors"]:
                    raise _broken(f"{file.name} says that slot {slot} has a record")

    def close(self) -> None:
        """Close files and folders once no call is in progress. Idempotent."""
        with self._alone():
            if self._closed:
                return
            self._changed.wait_for(lambda: not self._reading)
            held = list(self._held)
            self._held.clear()  # open holds cannot read any longer
            self._wipe(held)
            self._closed = True
            self._budget.close()
            for file in self._table.files():
                file.close()
            for folder in self._folders:
                folder.close()

    def _forget_in_child(self) -> None:
        """Close the descriptors after a fork; the files and their locks belong to the parent."""
        # A thread of the parent may have held the locks, or have been in a call.
        self._changed, self._counting = PassingLock(), threading.Lock()
        self._reading = self._writing = self._erasing = 0
        self._closed = True
        self._budget.close()
        for file in self._table.files():
            file.close()
        for folder in self._folders:
            folder.forget()


def _broken(what: str) -> IntegrityError:
    return IntegrityError(f"disk store: {what}")
