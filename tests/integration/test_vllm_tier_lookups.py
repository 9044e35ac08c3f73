"""Lookups and loads beside vLLM's steps: what is held is let go, and nothing is told twice."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import pytest

from kvelastic.errors import InvalidArgumentError
from kvelastic.integration.vllm.tier_lookups import Chain, Chains, Lookups
from kvelastic.tiers.base import KEY_BYTES, NO_KEY, Hold, each_key
from kvelastic.tiers.load import Load, Loads, is_too_slow
from kvelastic.tiers.lookup import Segment

if TYPE_CHECKING:
    from kvelastic.tiers.manager import Tiers
    from kvelastic.tiers.transfer_run import Run


def key(name: str) -> bytes:
    """The tiers' key of a block."""
    return name.encode().ljust(KEY_BYTES, b".")


class Held(Hold):
    """Keys that fake tiers hold for a load."""

    def __init__(self, tiers: FakeTiers, count: int) -> None:
        self.count = count
        self._tiers = tiers
        tiers.held.append(self)

    def release(self) -> None:
        self._tiers.held.remove(self)


class FakeRun:
    """A transfer that ends when the test says so."""

    def __init__(self, load: Load, ids: Sequence[int]) -> None:
        self.load = load
        self.ids = ids
        self.is_complete = False
        self.staged = [True] * len(ids)
        self.loaded = [True] * len(ids)
        self.is_cancelled = False

    def end(self) -> None:
        self.is_complete = True
        self.load.end()

    def wait(self, timeout_s: float | None = None) -> bool:
        return self.is_complete

    def cancel(self) -> None:
        self.is_cancelled = True
        self.loaded = [False] * len(self.ids)
        self.end()


class FakeTiers:
    """Has some keys; loads end when the test says so."""

    def __init__(self, *names: str) -> None:
        self.has = {key(name) for name in names}
        self.asked: list[tuple[bytes, list[bytes]]] = []
        self.held: list[Held] = []
        self.runs: list[FakeRun] = []
        self.refuses = False
        self.compute_s: float | None = 0.5

    def computed(self, blocks: int, seconds: float) -> None:
        self.compute_s = seconds / blocks

    def match(self, keys: bytes, *, chain_after: bytes = NO_KEY) -> Load:
        wanted = each_key(keys)
        self.asked.append((chain_after, wanted))
        missing = next((at for at, one in enumerate(wanted) if one not in self.has), len(wanted))
        segments = [Segment(0, 0, missing)] if missing else []
        holds = [Held(self, missing)] if missing else []
        return Load(keys, segments, holds, chain_after)

    def load(self, load: Load, ids: Sequence[int]) -> Load:
        assert not load._is_released, "what is loaded must be held"
        if self.refuses:
            raise InvalidArgumentError("no")
        load.starts(ids)
        self.runs.append(FakeRun(load, ids))
        load.runs(cast("Run", self.runs[-1]))
        return load


def loads_of(tiers: FakeTiers, **options: Any) -> Loads:
    return Loads(cast("Tiers", tiers), **options)


def lookups_of(tiers: FakeTiers) -> Lookups:
    return Lookups(cast("Tiers", tiers), lambda engine_key: key(engine_key.decode()))


def chain(before: str | None, *names: str) -> Chain:
    return Chain(before.encode() if before else None, [name.encode() for name in names])


def ask(lookups: Lookups, name: str, of: Chain, request: str = "r") -> bool:
    return lookups.find(request, name.encode(), lambda: of)


def test_following_blocks_are_looked_up_together() -> None:
    tiers = FakeTiers("b", "c")
    lookups = lookups_of(tiers)
    of = chain("a", "b", "c", "d", "e")
    assert [ask(lookups, name, of) for name in "bcde"] == [True, True, False, False]
    assert tiers.asked == [(key("a"), [key(name) for name in "bcde"])]
    assert len(tiers.held) == 1
    lookups.end_step()
    assert tiers.held == []
    assert ask(lookups, "b", chain(None, "b"))
    assert tiers.asked[1] == (NO_KEY, [key("b")]), "in another step it is asked again"


def test_sliding_windows_are_looked_up_from_their_end() -> None:
    tiers = FakeTiers("b", "c", "d")
    lookups = lookups_of(tiers)
    answers = [ask(lookups, name, chain(None, *"abcd"["abcd".index(name) :])) for name in "dcba"]
    assert answers == [True, True, True, False]
    assert [asked for _, asked in tiers.asked] == [[key(name)] for name in "dcba"]


def test_scan_from_the_end_reads_keys_once() -> None:
    reads = 0

    class Counted(bytes):
        """A key of a block, with the number of its group at its end."""

        def __hash__(self) -> int:
            nonlocal reads
            reads += 1
            return super().__hash__()

        def __getitem__(self, place: Any) -> Any:
            nonlocal reads
            reads += 1
            return super().__getitem__(place)

    blocks = 400
    keys = {
        group: [Counted(b"%012d%04d" % (at, group)) for at in range(blocks)] for group in (0, 1)
    }
    chains = Chains({each: at + 1 for group in keys for at, each in enumerate(keys[group])})
    tiers = FakeTiers()
    lookups = lookups_of(tiers)
    reads = 0
    for each in reversed(keys[1]):
        assert not lookups.find("r", each, partial(chains.of, each))
    assert len(tiers.asked) == blocks
    assert reads <= 20 * blocks


def test_chain_follows_the_group_of_its_key() -> None:
    positions = {b"a...1": 16, b"a...2": 32, b"b...1": 32, b"c...1": 48, b"b...2": 64}
    chains = Chains(positions)

    def read(name: bytes) -> tuple[bytes | None, list[bytes]]:
        before, keys = chains.of(name)
        return before, list(keys)

    assert read(b"b...1") == (b"a...1", [b"b...1", b"c...1"])
    assert read(b"a...2") == (None, [b"a...2", b"b...2"])
    positions[b"d...1"] = 64
    assert read(b"c...1") == (b"b...1", [b"c...1", b"d...1"])
    assert read(b"x...1") == (None, [b"x...1"]), "its place is not known"


def test_part_of_a_block_interrupts_no_chain() -> None:
    chains = Chains({b"a...1": 16, b"b...1": 32, b"p...1": 24})
    assert list(chains.of(b"a...1").keys) == [b"a...1", b"b...1"]
    before, keys = chains.of(b"p...1")
    assert (before, list(keys)) == (b"a...1", [b"p...1", b"b...1"])


def test_taken_blocks_stay_held_after_the_step() -> None:
    tiers = FakeTiers("a", "b")
    lookups = lookups_of(tiers)
    assert ask(lookups, "a", chain(None, "a", "b"))
    assert ask(lookups, "a", chain(None, "a", "b"), request="other")
    load = lookups.take("r", [b"a", b"b"])
    lookups.end_step()
    assert (load.count, load._is_released, len(tiers.held)) == (2, False, 1)
    assert len(tiers.asked) == 2, "what is loaded is not looked up again"
    load.release()
    assert tiers.held == []


def test_load_of_several_windows_has_all_parents() -> None:
    tiers = FakeTiers("b", "c", "x")
    lookups = lookups_of(tiers)
    assert ask(lookups, "b", chain("a", "b", "c", "d"))
    assert ask(lookups, "x", chain("w", "x"))
    load = lookups.take("r", [b"b", b"c", b"x"])
    assert load.keys == key("b") + key("c") + key("x")
    assert load.parents == [key("a"), key("b"), key("w")]
    assert load.segments == (Segment(0, 0, 3),)
    load.release()
    assert tiers.held == []


def test_load_ends_before_the_first_missing_key() -> None:
    tiers = FakeTiers("a", "c")
    lookups = lookups_of(tiers)
    assert [ask(lookups, name, chain(None, name)) for name in "abc"] == [True, False, True]
    assert lookups.take("r", [b"a", b"b", b"c"]).count == 1


def test_load_looks_up_keys_unknown_to_the_step() -> None:
    tiers = FakeTiers("a", "b", "c")
    lookups = lookups_of(tiers)
    assert ask(lookups, "b", chain("a", "b"))
    load = lookups.take("r", [b"a", b"b", b"c"])
    assert (load.keys, len(tiers.held)) == (key("a") + key("b") + key("c"), 2)
    assert tiers.asked[1:] == [(NO_KEY, [key("a"), key("c")])]
    load.release()
    assert tiers.held == []


def test_failed_load_disables_lookups_of_the_request() -> None:
    lookups = lookups_of(FakeTiers("a"))
    lookups.find_nothing_more("r")
    assert not ask(lookups, "a", chain(None, "a"))
    assert ask(lookups, "a", chain(None, "a"), request="other")
    lookups.forget("r")
    assert ask(lookups, "a", chain(None, "a"))


def test_keys_change_with_the_namespace() -> None:
    tiers, prefix = FakeTiers("1a"), ["0"]
    lookups = Lookups(cast("Tiers", tiers), lambda engine_key: key(prefix[0] + engine_key.decode()))
    assert not ask(lookups, "a", chain(None, "a"))
    prefix[0] = "1"
    lookups.forget_keys()
    assert ask(lookups, "a", chain(None, "a"))


def test_finished_load_is_reported_once_and_released() -> None:
    tiers = FakeTiers("a", "b")
    loads = loads_of(tiers)
    loads.begin(tiers.match(key("a") + key("b")).assign("r", 7, [4, 5]))
    assert len(tiers.held) == 1, "a load holds what it reads"
    assert (loads.open, loads.has_finished, loads.take_finished()) == (1, False, [])
    assert not loads.wait_for_any(0.0)
    tiers.runs[0].end()
    assert loads.wait_for_any(0.0)
    (load,) = loads.take_finished()
    assert (load.request, load.job, load.ids, load.leading) == ("r", 7, (4, 5), 2)
    assert tiers.held == []
    assert (loads.open, loads.take_finished()) == (0, [])


def test_missing_blocks_shorten_the_load() -> None:
    tiers = FakeTiers("a")
    loads = loads_of(tiers)
    loads.begin(tiers.match(key("a") + key("b")).assign("r", 1, [4, 5]))
    assert tiers.runs[0].ids == (4,)
    tiers.runs[0].end()
    (load,) = loads.take_finished()
    assert (len(load.ids), load.leading) == (2, 1)
    loads.begin(tiers.match(key("b")).assign("r", 2, [4]))
    (load,) = loads.take_finished()
    assert (len(load.ids), load.leading) == (1, 0)


def test_refused_load_finishes_with_nothing_loaded() -> None:
    loads = loads_of(FakeTiers())
    loads.refuse(Load().assign("r", 3, range(5)))
    assert loads.has_finished
    (load,) = loads.take_finished()
    assert (load.job, len(load.ids), load.leading) == (3, 5, 0)


def test_load_rejected_by_the_tiers_keeps_no_hold() -> None:
    tiers = FakeTiers("a")
    tiers.refuses = True
    with pytest.raises(InvalidArgumentError):
        loads_of(tiers).begin(tiers.match(key("a")).assign("r", 1, [4]))
    assert tiers.held == []


def test_all_loads_can_be_cancelled() -> None:
    tiers = FakeTiers("a", "b")
    loads = loads_of(tiers)
    for name in "ab":
        loads.begin(tiers.match(key(name)).assign(name, ord(name), [4]))
    assert loads.cancel_all(0.0)
    assert [load.leading for load in loads.take_finished()] == [0, 0]
    assert all(loading.is_cancelled for loading in tiers.runs)


@pytest.mark.parametrize(
    ("elapsed_s", "arrived", "compute_s", "expected"),
    [
        (0.01, 0, 0.1, False),  # too early to say, of ten blocks
        (0.09, 0, 0.1, True),  # nothing came in the time that most of a block takes
        (0.5, 8, 0.1, False),
        (0.5, 4, 0.1, True),  # would take 1.25 s where computing takes 1
        (0.5, 6, None, False),
        (0.5, 1, None, True),
    ],
)
def test_load_slower_than_computing_is_cancelled(
    elapsed_s: float, arrived: int, compute_s: float | None, expected: bool
) -> None:
    assert is_too_slow(elapsed_s, 10, arrived, compute_s=compute_s) is expected


def test_recently_fast_tier_gets_more_time() -> None:
    assert is_too_slow(0.3, 10, 0, compute_s=0.1)
    assert not is_too_slow(0.3, 10, 0, compute_s=0.1, load_s=0.01)
    assert is_too_slow(0.5, 10, 0, compute_s=0.1, load_s=0.01)


def test_slow_load_is_cancelled_and_finished_load_kept() -> None:
    now_s = [0.0]
    tiers = FakeTiers("a", "b")
    loads = loads_of(tiers, clock=lambda: now_s[0])
    loads.begin(tiers.match(key("a") + key("b")).assign("slow", 1, [4, 5]))
    loads.begin(tiers.match(key("a")).assign("quick", 2, [6]))
    slow, quick = tiers.runs
    slow.staged = [False, False]
    quick.end()
    loads.give_up_slow()
    assert not slow.is_cancelled
    now_s[0] = 0.4
    loads.give_up_slow()
    assert (slow.is_cancelled, quick.is_cancelled) == (True, False)


@pytest.mark.parametrize("compares", [True, False])
def test_slow_load_is_kept_without_cost_comparison(compares: bool) -> None:
    now_s = [0.0]
    tiers = FakeTiers("a")
    tiers.compute_s = None
    loads = loads_of(tiers, compares=compares, clock=lambda: now_s[0])
    loads.computed(10, 1.0)
    assert tiers.compute_s == (0.1 if compares else None)
    loads.begin(tiers.match(key("a")).assign("slow", 1, [4]))
    (loading,) = tiers.runs
    loading.staged = [False]
    now_s[0] = 60.0
    loads.give_up_slow()
    assert loading.is_cancelled is compares


def test_load_waiting_for_its_copies_is_not_cancelled() -> None:
    """They may stand behind pages that are being mapped: that says nothing of the tier."""
    now_s = [0.0]
    tiers = FakeTiers("a", "b")
    loads = loads_of(tiers, clock=lambda: now_s[0])
    loads.begin(tiers.match(key("a") + key("b")).assign("req", 1, [4, 5]))
    (loading,) = tiers.runs
    loading.loaded = [False, False]
    now_s[0] = 0.9
    loads.give_up_slow()
    assert not loading.is_cancelled
