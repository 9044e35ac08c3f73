"""Lookups and loads beside vLLM's steps: what is held is let go, and nothing is told twice."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvelastic.errors import InvalidArgumentError
from kvelastic.integration.vllm.tier_lookups import Chain, Lookups
from kvelastic.tiers.base import KEY_BYTES, NO_KEY
from kvelastic.tiers.loads import Loads, is_too_slow


def key(name: str) -> bytes:
    """The tiers' key of a block."""
    return name.encode().ljust(KEY_BYTES, b".")


class Match:
    def __init__(self, tiers: Tiers, keys: Sequence[bytes]) -> None:
        self.keys = keys
        self.count = len(keys)
        self._tiers = tiers
        tiers.held.append(self)

    def release(self) -> None:
        if self in self._tiers.held:
            self._tiers.held.remove(self)


class Loading:
    def __init__(self, ids: Sequence[int]) -> None:
        self.ids = ids
        self.done = False
        self.count = self.arrived = len(ids)
        self.is_cancelled = False

    def wait(self, timeout_s: float | None = None) -> bool:
        return self.done

    def cancel(self) -> None:
        self.is_cancelled = self.done = True
        self.count = 0


class Tiers:
    """Has some keys; loads end when the test says so."""

    def __init__(self, *names: str) -> None:
        self.has = {key(name) for name in names}
        self.asked: list[tuple[bytes, list[bytes]]] = []
        self.held: list[Match] = []
        self.loadings: list[Loading] = []
        self.refuses = False
        self.compute_s: float | None = 0.5

    def computed(self, blocks: int, seconds: float) -> None:
        self.compute_s = seconds / blocks

    def match(self, keys: bytes, *, chain_after: bytes = NO_KEY) -> Match:
        wanted = [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]
        self.asked.append((chain_after, wanted))
        missing = next((at for at, one in enumerate(wanted) if one not in self.has), len(wanted))
        return Match(self, wanted[:missing])

    def load(self, match: Match, ids: Sequence[int]) -> Loading:
        assert match in self.held, "what is loaded must be held"
        if self.refuses:
            raise InvalidArgumentError("no")
        self.loadings.append(Loading(ids))
        return self.loadings[-1]


def lookups_of(tiers: Tiers) -> Lookups:
    return Lookups(tiers, lambda engine_key: key(engine_key.decode()))


def chain(before: str | None, *names: str) -> Chain:
    return Chain(before.encode() if before else None, [name.encode() for name in names])


def ask(lookups: Lookups, name: str, of: Chain, request: str = "r") -> bool:
    return lookups.find(request, name.encode(), lambda: of)


def test_all_blocks_that_may_follow_are_asked_for_at_once() -> None:
    tiers = Tiers("b", "c")
    lookups = lookups_of(tiers)
    of = chain("a", "b", "c", "d", "e")
    assert [ask(lookups, name, of) for name in "bcde"] == [True, True, False, False]
    assert tiers.asked == [(key("a"), [key(name) for name in "bcde"])]
    assert len(tiers.held) == 1
    lookups.end_step()
    assert tiers.held == []
    assert ask(lookups, "b", chain(None, "b"))
    assert tiers.asked[1] == (NO_KEY, [key("b")]), "in another step it is asked again"


def test_windows_are_asked_from_their_end() -> None:
    tiers = Tiers("b", "c", "d")
    lookups = lookups_of(tiers)
    answers = [ask(lookups, name, chain(None, *"abcd"["abcd".index(name) :])) for name in "dcba"]
    assert answers == [True, True, True, False]
    assert [asked for _, asked in tiers.asked] == [[key(name)] for name in "dcba"]


def test_what_is_taken_stays_held_and_the_rest_of_the_step_goes() -> None:
    tiers = Tiers("a", "b")
    lookups = lookups_of(tiers)
    assert ask(lookups, "a", chain(None, "a", "b"))
    assert ask(lookups, "a", chain(None, "a", "b"), request="other")
    match = lookups.take("r", [b"a", b"b"])
    lookups.end_step()
    assert tiers.held == [match]
    assert match.count == 2


def test_after_a_failed_load_a_request_finds_nothing_more() -> None:
    lookups = lookups_of(Tiers("a"))
    lookups.find_nothing_more("r")
    assert not ask(lookups, "a", chain(None, "a"))
    assert ask(lookups, "a", chain(None, "a"), request="other")
    lookups.forget("r")
    assert ask(lookups, "a", chain(None, "a"))


def test_keys_are_made_anew_in_another_namespace() -> None:
    tiers, prefix = Tiers("1a"), ["0"]
    lookups = Lookups(tiers, lambda engine_key: key(prefix[0] + engine_key.decode()))
    assert not ask(lookups, "a", chain(None, "a"))
    prefix[0] = "1"
    lookups.forget_keys()
    assert ask(lookups, "a", chain(None, "a"))


def test_a_load_is_told_once_when_it_is_over_and_its_match_goes_at_once() -> None:
    tiers = Tiers("a", "b")
    loads = Loads(tiers)
    loads.begin("r", 7, tiers.match(key("a") + key("b")), [4, 5])
    assert tiers.held == [], "a load holds for itself what it reads"
    assert (loads.open, loads.has_finished, loads.take_finished()) == (1, False, [])
    assert not loads.wait_for_any(0.0)
    tiers.loadings[0].done = True
    assert loads.wait_for_any(0.0)
    (load,) = loads.take_finished()
    assert (load.request, load.job, load.blocks, load.leading) == ("r", 7, 2, 2)
    assert (loads.open, loads.take_finished()) == (0, [])


def test_what_is_not_there_any_more_is_no_part_of_the_load() -> None:
    tiers = Tiers("a")
    loads = Loads(tiers)
    loads.begin("r", 1, tiers.match(key("a") + key("b")), [4, 5])
    assert tiers.loadings[0].ids == [4]
    tiers.loadings[0].done = True
    (load,) = loads.take_finished()
    assert (load.blocks, load.leading) == (2, 1)
    loads.begin("r", 2, tiers.match(key("b")), [4])
    (load,) = loads.take_finished()
    assert (load.blocks, load.leading) == (1, 0)


def test_a_refused_load_is_over_with_nothing_loaded() -> None:
    loads = Loads(Tiers())
    loads.refuse("r", 3, 5)
    assert loads.has_finished
    (load,) = loads.take_finished()
    assert (load.job, load.blocks, load.leading) == (3, 5, 0)


def test_tiers_that_refuse_a_load_hold_nothing_for_it() -> None:
    tiers = Tiers("a")
    tiers.refuses = True
    with pytest.raises(InvalidArgumentError):
        Loads(tiers).begin("r", 1, tiers.match(key("a")), [4])
    assert tiers.held == []


def test_all_can_be_ended() -> None:
    tiers = Tiers("a", "b")
    loads = Loads(tiers)
    for name in "ab":
        loads.begin(name, ord(name), tiers.match(key(name)), [4])
    assert loads.cancel_all(0.0)
    assert [load.leading for load in loads.take_finished()] == [0, 0]
    assert all(loading.is_cancelled for loading in tiers.loadings)


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
def test_a_load_that_computing_would_overtake_is_given_up(
    elapsed_s: float, arrived: int, compute_s: float | None, expected: bool
) -> None:
    assert is_too_slow(elapsed_s, 10, arrived, compute_s=compute_s) is expected


def test_a_tier_that_was_quick_of_late_may_get_nowhere_a_little_longer() -> None:
    assert is_too_slow(0.3, 10, 0, compute_s=0.1)
    assert not is_too_slow(0.3, 10, 0, compute_s=0.1, load_s=0.01)
    assert is_too_slow(0.5, 10, 0, compute_s=0.1, load_s=0.01)


def test_what_a_slow_load_has_brought_stays() -> None:
    now_s = [0.0]
    tiers = Tiers("a", "b")
    loads = Loads(tiers, clock=lambda: now_s[0])
    loads.begin("slow", 1, tiers.match(key("a") + key("b")), [4, 5])
    loads.begin("quick", 2, tiers.match(key("a")), [6])
    slow, quick = tiers.loadings
    slow.arrived, quick.done = 0, True
    loads.give_up_slow()
    assert not slow.is_cancelled
    now_s[0] = 0.4
    loads.give_up_slow()
    assert (slow.is_cancelled, quick.is_cancelled) == (True, False)


@pytest.mark.parametrize("compares", [True, False])
def test_who_does_not_compare_waits_for_a_slow_load(compares: bool) -> None:
    now_s = [0.0]
    tiers = Tiers("a")
    tiers.compute_s = None
    loads = Loads(tiers, compares=compares, clock=lambda: now_s[0])
    loads.computed(10, 1.0)
    assert tiers.compute_s == (0.1 if compares else None)
    loads.begin("slow", 1, tiers.match(key("a")), [4])
    (loading,) = tiers.loadings
    loading.arrived = 0
    now_s[0] = 60.0
    loads.give_up_slow()
    assert loading.is_cancelled is compares


def test_a_load_whose_records_have_arrived_waits_for_its_copies() -> None:
    """They may stand behind pages that are being mapped: that says nothing of the tier."""
    now_s = [0.0]
    tiers = Tiers("a", "b")
    loads = Loads(tiers, clock=lambda: now_s[0])
    loads.begin("req", 1, tiers.match(key("a") + key("b")), [4, 5])
    (loading,) = tiers.loadings
    loading.count = 0
    now_s[0] = 0.9
    loads.give_up_slow()
    assert not loading.is_cancelled
