"""The remote tier when its server is gone, hangs, is full or holds what nobody of us put there."""

from __future__ import annotations

import builtins
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from mooncake_stand_in import Server, StandIn
from store_battery import (
    OTHER,
    RECORD_BYTES,
    WORLD,
    Bench,
    key_of,
    keys_of,
    read,
    records_of,
)
from store_kinds import MOONCAKE, Clock
from waiting import DEADLINE_S, wait_until

from kvelastic.errors import InvalidArgumentError, UnsupportedError
from kvelastic.tiers.base import Selection
from kvelastic.tiers.stores.mooncake.client import check_address
from kvelastic.tiers.stores.mooncake.format import HEADER_BYTES, server_key
from kvelastic.tiers.stores.mooncake.store import STAGED_RECORDS, MooncakeStore

LATE_S = 0.05
"""After it a call that hangs is left to itself."""


class FrozenClock:
    """A clock that goes only when it is told to."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def make(server: Server, clock: Any, timeout_s: float = DEADLINE_S) -> MooncakeStore:
    store = MooncakeStore(
        "nowhere:1",
        RECORD_BYTES,
        timeout_s=timeout_s,
        setup_timeout_s=timeout_s,
        make_client=lambda: StandIn(server),
        clock=clock,
    )
    store.enter(WORLD)
    return store


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def bench(server: Server) -> Iterator[Bench]:
    store = make(server, Clock())
    yield Bench(MOONCAKE, store, None)  # type: ignore[arg-type]
    store.check_integrity()
    store.close()


def stored(server: Server, name: int) -> str:
    key = server_key(WORLD.fingerprint, key_of(name))
    assert key in server.records
    return key


def test_batches_larger_than_the_staging_are_split(bench: Bench) -> None:
    names = range(2 * STAGED_RECORDS + 3)
    assert all(bench.put(*names))
    assert all(bench.get(*reversed(names)))


def test_objects_are_shared_between_machines(bench: Bench, server: Server) -> None:
    bench.put(0, 1)
    other = make(server, Clock())
    try:
        assert other.has(keys_of(range(3))) == [True, True, False]
        assert read(other, keys_of([0, 1])) == [True, True]
        assert other.erase(keys_of([0])) == 1
    finally:
        other.close()
    assert bench.has(0, 1) == [False, True]


@pytest.mark.parametrize("at", [0, 8, 16, 40, 48, 55, HEADER_BYTES, -1])
def test_object_with_flipped_byte_misses_and_is_replaceable(
    bench: Bench, server: Server, at: int
) -> None:
    bench.put(0)
    key = stored(server, 0)
    damaged = bytearray(server.records[key])
    damaged[at] ^= 0x10
    server.records[key] = bytes(damaged)
    assert bench.has(0) == [True]
    assert bench.get(0) == [False]
    done = bench.store.statistics()
    assert (done.torn, done.misses, done.hits) == (1, 1, 0)
    assert bench.has(0) == [False]
    assert bench.put(0) == [True]
    assert bench.get(0) == [True]


@pytest.mark.parametrize("length", [0, 1, HEADER_BYTES, HEADER_BYTES + RECORD_BYTES - 1])
def test_short_object_is_a_miss(bench: Bench, server: Server, length: int) -> None:
    bench.put(0)
    key = stored(server, 0)
    server.records[key] = server.records[key][:length]
    assert bench.get(0) == [False]
    assert bench.store.statistics().torn == 1


def test_object_of_another_key_or_namespace_misses(bench: Bench, server: Server) -> None:
    bench.put(0, 1)
    bench.store.enter(OTHER)
    bench.put(0, world=OTHER)
    bench.store.enter(WORLD)
    (foreign,) = (key for key in server.records if key.startswith(OTHER.fingerprint.hex()))
    server.records[stored(server, 0)] = server.records[stored(server, 1)]
    assert bench.get(0, 1) == [False, True]
    server.records[stored(server, 1)] = server.records[foreign]
    assert bench.get(1) == [False]
    assert bench.store.statistics().torn == 2


def test_full_server_refuses_objects(bench: Bench, server: Server) -> None:
    server.room = 3
    assert bench.put(*range(5)) == [True, True, True, False, False]
    done = bench.store.statistics()
    assert (done.puts, done.refused, done.errors) == (3, 2, 0)
    assert bench.put(9) == [False]
    assert bench.store.statistics().errors == 0


def test_failed_server_is_bypassed_and_retried_later(server: Server) -> None:
    clock = FrozenClock()
    store = make(server, clock)
    bench = Bench(MOONCAKE, store, None)  # type: ignore[arg-type]
    bench.put(0, 1)
    server.is_gone = True
    assert bench.get(0, 1) == [False, False]
    calls = server.calls
    assert bench.has(0, 1) == [False, False]
    assert bench.put(2) == [False]
    assert store.erase(keys_of([0])) == 0
    assert server.calls == calls, "a server that has just failed was called again"
    done = store.statistics()
    assert (done.misses, done.refused, done.errors) == (2, 1, 2)
    assert "refuses every record" in store.problem()
    server.is_gone = False
    clock.now_s += 3600.0
    assert bench.get(0, 1) == [True, True]
    assert store.problem() == ""
    assert bench.put(2) == [True]
    store.close()


@pytest.mark.parametrize("codes", [None, [0], ["0", "0"]])
def test_client_returning_nonsense_is_a_failure(
    codes: object, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make(server, FrozenClock())
    bench = Bench(MOONCAKE, store, None)  # type: ignore[arg-type]
    monkeypatch.setattr(StandIn, "batch_put_from", lambda *_: codes)
    assert bench.put(0, 1) == [False, False]
    assert store.statistics().errors == 1
    assert store.problem()
    store.close()


def test_server_starting_later_is_used(server: Server) -> None:
    clock = FrozenClock()
    server.is_gone = True
    store = make(server, clock)
    bench = Bench(MOONCAKE, store, None)  # type: ignore[arg-type]
    assert bench.put(0) == [False]
    assert bench.has(0) == [False]
    server.is_gone = False
    assert bench.put(0) == [False], "it is left alone for a while"
    clock.now_s += 3600.0
    assert bench.put(0) == [True]
    assert bench.get(0) == [True]
    store.close()


def test_hanging_server_blocks_no_caller(server: Server) -> None:
    """A late call goes on alone; until it ends its buffers are nobody's, and nothing is served."""
    store = make(server, Clock(), timeout_s=LATE_S)
    bench = Bench(MOONCAKE, store, None)  # type: ignore[arg-type]
    wait_until(lambda: bench.put(0, 1) == [True, True], "the first put is never in time")
    server.hangs = threading.Event()
    assert bench.get(0) == [False]
    assert bench.get(1, 0) == [False, False]
    assert bench.has(0) == [False]
    assert bench.put(2) == [False]
    assert store.statistics().errors > 0
    hangs, server.hangs = server.hangs, None
    hangs.set()
    wait_until(lambda: bench.get(0, 1) == [True, True], "it never answers again")
    store.close()


def test_hanging_setup_blocks_no_caller(server: Server) -> None:
    server.hangs = threading.Event()
    store = make(server, Clock(), timeout_s=LATE_S)
    bench = Bench(MOONCAKE, store, None)  # type: ignore[arg-type]
    assert bench.put(0) == [False]
    assert bench.get(0) == [False]
    hangs, server.hangs = server.hangs, None
    hangs.set()
    wait_until(lambda: bench.put(0) == [True], "it never answers")
    wait_until(lambda: bench.get(0) == [True], "it never answers")
    store.close()


def test_closed_store_misses_and_refuses(server: Server) -> None:
    store = make(server, Clock())
    bench = Bench(MOONCAKE, store, None)  # type: ignore[arg-type]
    bench.put(0)
    store.close()
    assert bench.has(0) == [False]
    assert bench.get(0) == [False]
    assert bench.put(1) == [False]
    assert store.erase(keys_of([0])) == 0
    assert not [thread for thread in threading.enumerate() if "mooncake" in thread.name]


def test_erase_reaches_only_namespaces_entered_here(bench: Bench, server: Server) -> None:
    foreign = OTHER.next_generation()
    other = make(server, Clock())
    other.enter(foreign)
    other.put(keys_of([0], foreign), records_of(keys_of([0], foreign)))
    other.close()
    bench.put(0, 1)
    bench.store.enter(OTHER)
    bench.put(0, 1, 2, world=OTHER)
    assert bench.store.erase_matching(Selection(model="nobody")) == 0
    assert bench.store.erase_matching(Selection(model=OTHER.model)) == 3
    bench.store.enter(WORLD)
    assert bench.get(0, 1) == [True, True]
    assert bench.store.erase_matching(Selection()) == 2
    assert len(server.records) == 1, "a record of a world that was never entered"
    assert bench.store.erase_matching(Selection(namespace=foreign)) == 1


def test_erase_by_age_is_reported_as_impossible(bench: Bench, server: Server) -> None:
    bench.put(0)
    assert bench.store.erase_matching(Selection(older_than_s=1.0)) == 0
    assert bench.store.unerased().failed == (
        "the server does not know the age of records; erase by model alone"
    )
    assert len(server.records) == 1
    assert bench.store.erase_matching(Selection(model=WORLD.model)) == 1
    assert bench.store.unerased() == ("", "")


def test_failed_erase_is_reported(bench: Bench, server: Server) -> None:
    bench.put(0, 1)
    server.is_gone = True
    assert bench.store.erase_matching(Selection(namespace=WORLD)) == 0
    assert bench.store.unerased().failed
    server.is_gone = False
    wait_until(lambda: bench.store.erase_matching(Selection(namespace=WORLD)) == 2)
    assert bench.store.unerased() == ("", "")
    assert not server.records


def test_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    imports = builtins.__import__

    def without(name: str, *arguments: Any, **more: Any) -> Any:
        if name.startswith("mooncake"):
            raise ImportError("libibverbs.so.1: cannot open shared object file")
        return imports(name, *arguments, **more)

    for name in [name for name in sys.modules if name.split(".")[0] == "mooncake"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UnsupportedError, match=r"kvelastic\[remote\].*libibverbs1"):
        MooncakeStore("10.0.0.1:50051", RECORD_BYTES)


@pytest.mark.parametrize("address", ["", "host", "host:", "host:0", "host:65536", "a b:1", ":1"])
def test_invalid_address_is_rejected(address: str) -> None:
    with pytest.raises(InvalidArgumentError):
        MooncakeStore(address, RECORD_BYTES)


def test_addresses_are_parsed() -> None:
    assert check_address("master-0.cluster:50051") == ("master-0.cluster", 50051)
    assert check_address("[fe80::1]:1") == ("fe80::1", 1)


def test_invalid_sizes_are_rejected() -> None:
    for record_bytes, segment_bytes in ((0, 0), (-1, 0), (True, 0), (1, -1)):
        with pytest.raises(InvalidArgumentError):
            MooncakeStore("a:1", record_bytes, segment_bytes=segment_bytes)
