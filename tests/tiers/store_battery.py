"""What every store has to do, as cases over one store each.

A record's bytes are its key, over and over, so a record can be checked with nothing but its key:
what is read as whole and is not that is a wrong record served.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from waiting import DEADLINE_S

from kvelastic.errors import InvalidArgumentError
from kvelastic.tiers.base import KEY_BYTES, NO_KEY, Selection, Store
from kvelastic.tiers.namespace import Namespace

RECORD_BYTES = 256 << 10
ROOM = 20
"""How many records the limit of a fresh store has room for, at least."""
FEW = 4
"""Records of a case that repeats itself for every call of the medium."""
WORLD = Namespace(model="llama", dtype="float16", block_tokens=16, record_bytes=RECORD_BYTES)
OTHER = Namespace(model="qwen", dtype="float16", block_tokens=16, record_bytes=RECORD_BYTES)


@dataclass(frozen=True)
class Kind:
    """One kind of store, and what of the contract holds for it."""

    name: str
    open: Callable[[Path], Store]
    """A store in a folder that is its own, with `ROOM`."""
    is_bounded: bool = True
    """It has a limit of its own; else others decide what stays."""
    refuses_limits: bool = False
    """Nobody can set one from here."""
    knows_ages: bool = True
    """Of records, to erase the old ones."""
    survives: bool = False
    """Records are found at the next open."""
    failing: Callable[[int], AbstractContextManager[Callable[[], int]]] | None = None
    """Within it the k-th call to the medium fails; it gives how many there were so far."""
    counts_errors: bool = True
    """It hears of every call that fails; a pool goes on without a page and says nothing."""
    before_visible: Callable[[Callable[[], None]], AbstractContextManager[None]] | None = None
    """Within it a call is made after a record's bytes are on their way, before a put has ended."""

    def __str__(self) -> str:
        return self.name


@dataclass
class Bench:
    """A store under test."""

    kind: Kind
    store: Store
    folder: Path

    def put(self, *names: int, world: Namespace = WORLD, chain: bool = False) -> list[bool]:
        keys = keys_of(names, world)
        return self.store.put(keys, records_of(keys), chain_after=NO_KEY if chain else None)

    def get(self, *names: int, world: Namespace = WORLD) -> list[bool]:
        return read(self.store, keys_of(names, world))

    def has(self, *names: int, world: Namespace = WORLD) -> list[bool]:
        return self.store.has(keys_of(names, world))


def key_of(name: int, world: Namespace = WORLD) -> bytes:
    return world.key_of(name.to_bytes(8, "little"))


def keys_of(names: Iterable[int], world: Namespace = WORLD) -> bytes:
    return b"".join(key_of(name, world) for name in names)


def split(keys: bytes) -> list[bytes]:
    return [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]


def records_of(keys: bytes) -> list[memoryview]:
    return [memoryview(key * (RECORD_BYTES // KEY_BYTES)) for key in split(keys)]


def buffers(count: int, fill: int = 0xEE) -> list[memoryview]:
    return [memoryview(bytearray([fill]) * RECORD_BYTES) for _ in range(count)]


def read(store: Store, keys: bytes) -> list[bool]:
    """`get`, and that every record it calls whole is the record of its key."""
    into = buffers(len(keys) // KEY_BYTES)
    found = store.get(keys, into)
    for key, view, whole in zip(split(keys), into, found, strict=True):
        assert not whole or bytes(view) == key * (RECORD_BYTES // KEY_BYTES), "a wrong record"
    return found


# --- records ----------------------------------------------------------------------------------


def stored_objects_can_be_read(bench: Bench) -> None:
    assert bench.put(1, 2, 3) == [True] * 3
    assert bench.has(1, 2, 3) == [True] * 3
    assert bench.get(3, 1, 2) == [True] * 3
    done = bench.store.statistics()
    assert (done.puts, done.hits, done.misses, done.refused) == (3, 3, 0, 0)
    assert done.bytes_written >= 3 * RECORD_BYTES
    assert done.bytes_read >= 3 * RECORD_BYTES
    assert bench.store.capacity().records == 3


def missing_object_is_a_miss(bench: Bench) -> None:
    bench.put(1)
    assert bench.has(1, 2) == [True, False]
    assert bench.get(2, 1, 3) == [False, True, False]
    done = bench.store.statistics()
    assert (done.hits, done.misses) == (1, 2)


def empty_key_lists_do_nothing(bench: Bench) -> None:
    assert bench.store.put(b"", []) == []
    assert bench.store.get(b"", []) == []
    assert bench.store.has(b"") == []
    assert bench.store.erase(b"") == 0
    with bench.store.hold(b"") as hold:
        assert hold.count == 0


def existing_object_is_not_stored_again(bench: Bench) -> None:
    assert bench.put(1, 2) == [True, True]
    assert bench.put(2, 3) == [True, True]
    done = bench.store.statistics()
    assert (done.puts, done.refused) == (3, 0)
    assert bench.store.capacity().records == 3


def repeated_key_is_stored_once(bench: Bench) -> None:
    assert bench.put(1, 1, 2) == [True] * 3
    assert bench.store.capacity().records == 2
    assert bench.get(1, 1) == [True, True]


def object_is_invisible_until_complete(bench: Bench) -> None:
    if bench.kind.before_visible is None:
        pytest.skip("nothing tells of its writes")
    seen: list[bool] = []
    with bench.kind.before_visible(lambda: seen.extend(bench.has(1))):
        assert bench.put(1) == [True]
    assert seen
    assert not any(seen)
    assert bench.has(1) == [True]


# --- holds ---------------------------------------------------------------------------------------


def hold_covers_the_leading_keys(bench: Bench) -> None:
    bench.put(0, 1, 3)
    with bench.store.hold(keys_of([0, 1, 2, 3])) as hold:
        assert hold.count == 2
        assert bench.get(0, 1) == [True, True]
    hold.release()
    with bench.store.hold(keys_of([7, 0])) as none:
        assert none.count == 0
    assert bench.get(0, 1, 3) == [True] * 3


def held_records_are_not_displaced(bench: Bench) -> None:
    bench.put(0, 1)
    first = bench.store.hold(keys_of([0, 1]))
    second = bench.store.hold(keys_of([1]))
    for name in range(10, 10 + 3 * ROOM):
        bench.put(name)
    assert bench.get(0, 1) == [True, True]
    first.release()
    for name in range(100, 100 + 3 * ROOM):
        bench.put(name)
    assert bench.get(1) == [True]
    second.release()
    bench.store.set_limit(0)
    assert bench.has(0, 1) == [False, False]


def held_records_survive_a_lower_limit(bench: Bench) -> None:
    bench.put(*range(ROOM))
    hold = bench.store.hold(keys_of([3, 4]))
    bench.store.set_limit(0)
    assert bench.get(3, 4) == [True, True]
    assert not any(bench.has(*(name for name in range(ROOM) if name not in (3, 4))))
    assert bench.put(50) == [False]
    hold.release()
    assert bench.store.capacity().used_bytes == 0
    assert bench.has(3, 4) == [False, False]


def leased_objects_are_erased_on_release(bench: Bench) -> None:
    bench.put(0, 1)
    hold = bench.store.hold(keys_of([0]))
    assert bench.store.erase(keys_of([0, 1])) == 2
    assert bench.has(1) == [False]
    bench.get(0)  # either way, but never another record
    hold.release()
    assert bench.has(0) == [False]
    assert bench.store.capacity().records == 0
    assert bench.put(0) == [True]
    assert bench.get(0) == [True]


# --- forgetting -----------------------------------------------------------------------------------


def erased_objects_are_gone(bench: Bench) -> None:
    bench.put(0, 1, 2)
    assert bench.store.erase(keys_of([1, 5])) == 1
    assert bench.has(0, 1, 2) == [True, False, True]
    assert bench.store.erase(keys_of([1])) == 0
    assert bench.put(1) == [True]
    assert bench.get(0, 1, 2) == [True] * 3


def erase_by_model_namespace_and_age(bench: Bench) -> None:
    bench.put(0, 1)
    bench.store.enter(OTHER)
    bench.put(0, 1, 2, world=OTHER)
    raised = OTHER.next_generation()
    bench.store.enter(raised)
    bench.put(0, world=raised)
    assert bench.store.erase_matching(Selection(model="nobody")) == 0
    assert bench.store.erase_matching(Selection(older_than_s=3600.0)) == 0
    assert bench.store.erase_matching(Selection(namespace=WORLD, model="qwen")) == 0
    assert bench.store.erase_matching(Selection(namespace=OTHER)) == 3
    assert bench.has(0, 1, 2, world=OTHER) == [False] * 3
    assert bench.get(0, 1) == [True, True]
    assert bench.store.erase_matching(Selection(model="qwen", older_than_s=0.0)) == 1
    assert bench.has(0, world=raised) == [False]
    assert bench.store.erase_matching(Selection()) == 2
    assert bench.store.capacity().records == 0


def erase_covers_all_generations(bench: Bench) -> None:
    bench.put(0, 1)
    generations = [OTHER, OTHER.next_generation(), OTHER.next_generation().next_generation()]
    for world in generations:
        bench.store.enter(world)
        bench.put(0, 1, world=world)
    selection = Selection(namespace=generations[1], every_generation=True)
    assert bench.store.erase_matching(replace(selection, model="nobody")) == 0
    assert bench.store.erase_matching(selection) == 6
    for world in generations:
        bench.store.enter(world)
        assert bench.has(0, 1, world=world) == [False, False]
    bench.store.enter(WORLD)
    assert bench.get(0, 1) == [True, True]
    assert bench.store.capacity().records == 2


def namespaces_share_no_objects(bench: Bench) -> None:
    bench.put(0, 1)
    bench.store.enter(OTHER)
    assert bench.has(0, 1, world=OTHER) == [False, False]
    assert bench.get(0, world=OTHER) == [False]
    assert bench.put(0, world=OTHER) == [True]
    assert bench.get(0, world=OTHER) == [True]


# --- room -----------------------------------------------------------------------------------------


def usage_stays_within_the_limit(bench: Bench) -> None:
    store = bench.store
    limit_bytes = store.capacity().limit_bytes
    assert limit_bytes is not None
    for name in range(3 * ROOM):
        bench.put(name)
        have = store.capacity()
        assert have.records * RECORD_BYTES <= have.used_bytes <= limit_bytes
    assert store.capacity().records >= ROOM
    assert store.statistics().evicted > 0
    for share in (0.5, 0.25, 0.8, 1.0, 0.0, 1.0):
        store.set_limit(int(limit_bytes * share))
        have = store.capacity()
        assert have.records * RECORD_BYTES <= have.used_bytes <= int(limit_bytes * share)
        store.check_integrity()
        for name in range(ROOM):
            bench.put(name)
            assert store.capacity().used_bytes <= int(limit_bytes * share)
    assert store.capacity().records >= ROOM
    assert bench.get(*range(ROOM)) == [True] * ROOM


def chain_ends_are_displaced_first(bench: Bench) -> None:
    bench.put(*range(8), chain=True)
    for name in range(100, 100 + ROOM + 40):
        bench.put(name, chain=True)
        kept = bench.has(*range(8))
        assert kept == sorted(kept, reverse=True), "a beginning went before its continuation"
        if sum(kept) in (1, 2, 3):
            break
    else:
        assert not any(kept)


def used_object_is_kept(bench: Bench) -> None:
    room = 0
    while bench.store.statistics().evicted == 0:
        bench.store.hold(keys_of([0])).release()
        bench.put(room)
        room += 1
    assert bench.has(0) == [True]
    assert not all(bench.has(*range(room)))


# --- mistakes -------------------------------------------------------------------------------------


def invalid_calls_are_rejected_and_change_nothing(bench: Bench) -> None:
    store = bench.store
    bench.put(0)
    before = store.statistics()
    key, (record,) = key_of(1), records_of(key_of(1))
    short, long = memoryview(bytes(16)), memoryview(bytes(RECORD_BYTES + 1))
    calls: list[Callable[[], object]] = [
        lambda: store.has(key[:-1]),
        lambda: store.hold(key + b"x"),
        lambda: store.erase(key[:3]),
        lambda: store.put(key[:-1], [record]),
        lambda: store.put(key, []),
        lambda: store.put(key, [record, record]),
        lambda: store.put(key, [short]),
        lambda: store.put(key, [long]),
        lambda: store.put(key, [record], chain_after=b"short"),
        lambda: store.get(key[:-1], buffers(1)),
        lambda: store.get(key, buffers(2)),
        lambda: store.get(key, [memoryview(bytearray(16))]),
        lambda: store.set_limit(-1),
    ]
    for call in calls:
        with pytest.raises(InvalidArgumentError):
            call()
    assert store.statistics() == before
    assert store.capacity().records == 1
    assert bench.get(0) == [True]


def unsupported_limit_is_rejected(bench: Bench) -> None:
    with pytest.raises(InvalidArgumentError):
        bench.store.set_limit(1 << 30)
    assert bench.store.capacity().limit_bytes is None


# --- counts ---------------------------------------------------------------------------------------


def statistics_add_up(bench: Bench) -> None:
    asked = stored_before = read_asked = erased = 0
    for name in range(2 * ROOM):
        names = (name, name + 1)
        stored_before += sum(bench.has(*names))
        bench.put(*names)
        asked += 2
        if name % 5 == 0:
            erased += bench.store.erase(keys_of([name]))
        bench.get(name, name + 500)
        read_asked += 2
    done = bench.store.statistics()
    assert done.puts + done.refused + stored_before == asked
    assert done.hits + done.misses == read_asked
    assert done.puts - done.evicted - erased == bench.store.capacity().records
    assert (done.torn, done.errors) == (0, 0)


# --- many at once ---------------------------------------------------------------------------------


def threads_use_the_store_concurrently(bench: Bench) -> None:
    """Each does all there is to do with a few shared keys; nobody reads a wrong record."""
    rounds, threads = 60, 4
    begin = threading.Barrier(threads)
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        state = seed
        try:
            begin.wait(DEADLINE_S)
            for _ in range(rounds):
                state = (state * 6364136223846793005 + 1442695040888963407) % (1 << 64)
                names = [(state >> shift) % (2 * ROOM) for shift in (13, 23, 33)]
                match (state >> 50) % 8:
                    case 0 | 1 | 2:
                        bench.put(*names, chain=state >> 40 & 1 == 1)
                    case 3 | 4:
                        bench.get(*names)
                    case 5:
                        with bench.store.hold(keys_of(names)) as hold:
                            bench.get(*names[: hold.count])
                    case 6:
                        bench.has(*names)
                    case _:
                        bench.store.erase(keys_of(names[:1]))
        except BaseException as error:
            failures.append(error)

    workers = [threading.Thread(target=work, args=(seed + 1,)) for seed in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures, failures


def holds_last_during_concurrent_puts(bench: Bench) -> None:
    """With nobody who erases, every held record is read, whatever is put meanwhile."""
    bench.put(*range(4), chain=True)
    stop = threading.Event()
    failures: list[BaseException] = []

    def displace() -> None:
        try:
            for name in range(1000, 1000 + 4 * ROOM):
                bench.put(name)
        except BaseException as error:
            failures.append(error)
        finally:
            stop.set()

    other = threading.Thread(target=displace)
    other.start()
    looks = 0
    while not stop.is_set() or looks == 0:
        with bench.store.hold(keys_of(range(4))) as hold:
            assert all(bench.get(*range(hold.count)))
        bench.put(*range(4), chain=True)
        looks += 1
    other.join()
    assert not failures, failures


# --- the medium fails -----------------------------------------------------------------------------


def medium_failures_are_misses(bench: Bench) -> None:
    """Each call of the medium fails in turn: no exception, no wrong record, all of it counted."""
    if bench.kind.failing is None:
        pytest.skip("its medium cannot be made to fail")
    store, name, turn = bench.store, 0, 0
    while True:
        turn += 1
        before = store.statistics()
        with bench.kind.failing(turn) as calls:
            names = range(name, name + FEW)
            name += FEW
            stored = bench.put(*names)
            bench.has(*names)
            with store.hold(keys_of(names)) as hold:
                bench.get(*names[: hold.count])
            bench.get(*names)
            reached = calls() >= turn
        after = store.statistics()
        if reached and bench.kind.counts_errors:
            assert after.errors > before.errors
        assert after.puts - before.puts == sum(stored)
        assert after.refused - before.refused == FEW - sum(stored)
        store.check_integrity()
        assert store.erase(keys_of(names)) <= FEW
        if not reached:
            break
    assert turn > 1, "the medium was never called"
    assert bench.put(name + 1) == [True]
    assert bench.get(name + 1) == [True]


# --- life -----------------------------------------------------------------------------------------


def close_is_idempotent(bench: Bench) -> None:
    bench.put(0, 1)
    hold = bench.store.hold(keys_of([0]))
    bench.store.close()
    bench.store.close()
    hold.release()


def objects_are_found_after_reopening(bench: Bench) -> None:
    bench.put(*range(4), chain=True)
    bench.store.erase(keys_of([3]))
    bench.store.close()
    again = bench.kind.open(bench.folder)
    try:
        again.enter(WORLD)
        assert again.has(keys_of(range(4))) == [True, True, True, False]
        assert read(again, keys_of(range(4))) == [True, True, True, False]
        again.check_integrity()
    finally:
        again.close()


Case = Callable[[Bench], None]

ALL: Sequence[Case] = (
    stored_objects_can_be_read,
    missing_object_is_a_miss,
    empty_key_lists_do_nothing,
    existing_object_is_not_stored_again,
    repeated_key_is_stored_once,
    object_is_invisible_until_complete,
    hold_covers_the_leading_keys,
    erased_objects_are_gone,
    erase_covers_all_generations,
    namespaces_share_no_objects,
    invalid_calls_are_rejected_and_change_nothing,
    threads_use_the_store_concurrently,
    medium_failures_are_misses,
    close_is_idempotent,
)
"""What holds of every store."""

BOUNDED: Sequence[Case] = (
    held_records_are_not_displaced,
    held_records_survive_a_lower_limit,
    leased_objects_are_erased_on_release,
    holds_last_during_concurrent_puts,
    usage_stays_within_the_limit,
    chain_ends_are_displaced_first,
    used_object_is_kept,
    statistics_add_up,
)
"""What holds where the store itself decides who stays."""


def cases_of(kind: Kind) -> list[Case]:
    """Everything that this kind has to do."""
    return [
        *ALL,
        *(BOUNDED if kind.is_bounded else ()),
        *([unsupported_limit_is_rejected] if kind.refuses_limits else ()),
        *([erase_by_model_namespace_and_age] if kind.knows_ages else ()),
        *([objects_are_found_after_reopening] if kind.survives else ()),
    ]
