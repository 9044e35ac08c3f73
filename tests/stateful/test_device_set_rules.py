"""Instances over two devices against a model: whatever they do, each account adds up.

And on all of its devices an instance has the same pages, or none.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from device_ledgers import Machine
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from native_pools import HUGE

from kvelastic.errors import GuaranteeError, ReserveError
from kvelastic.shared.device_set import JoinedDevices

pytestmark = pytest.mark.slow


PAGES = {"a": 12, "b": 9}
RANKS = ("a", "b", "ab", "ba", "aab", "abbb")
who = st.integers(0, 3)
pages = st.integers(0, 8)


@dataclass
class Model:
    """What one instance has; in pages, and by device where that differs."""

    joined: JoinedDevices
    ranks: str
    least: int = 0
    reserve: dict[str, int] = field(default_factory=dict)
    held: int = 0
    awake: bool = True

    def held_of(self, device: str) -> int:
        return self.held * self.ranks.count(device)

    def least_of(self, device: str, least: int) -> int:
        """Of a guarantee for all devices together, what counts on one of them: whole pages."""
        pages = max(least // len(self.ranks), 1) if least else 0
        return pages * self.ranks.count(device)


class DeviceSet(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.machine = Machine(PAGES)
        self.members: dict[int, Model] = {}

    def teardown(self) -> None:
        self.machine.close()

    # --- the rules, device by device --------------------------------------------------------------

    def others(self, key: int) -> list[Model]:
        return [one for other, one in self.members.items() if other != key and one.awake]

    def sums_allow(self, key: int, ranks: str, least: int, reserve: dict[str, int]) -> bool:
        mine = Model(None, ranks)  # type: ignore[arg-type]
        return all(
            sum(one.reserve.get(device, 0) for one in self.others(key))
            + reserve.get(device, 0)
            + sum(one.least_of(device, one.least) for one in self.others(key))
            + mine.least_of(device, least)
            <= PAGES[device]
            for device in set(ranks)
        )

    def is_there(self, key: int, ranks: str, reserve: dict[str, int]) -> bool:
        return all(self.left(device, key) >= reserve.get(device, 0) for device in set(ranks))

    def left(self, device: str, key: int = -1) -> int:
        """What neither is granted nor reserved by others than `key`."""
        return PAGES[device] - sum(
            one.held_of(device) + (one.reserve.get(device, 0) if one.awake and other != key else 0)
            for other, one in self.members.items()
        )

    # --- what instances do ------------------------------------------------------------------------

    @rule(key=who, ranks=st.sampled_from(RANKS), least=pages, reserve=pages)
    def join(self, key: int, ranks: str, least: int, reserve: int) -> None:
        wanted = dict.fromkeys(sorted(set(ranks))[-1:], reserve)  # on the last device
        allowed = self.sums_allow(key, ranks, least, wanted)
        if key in self.members or (allowed and not self.is_there(key, ranks, wanted)):
            return  # nobody gives here: it would wait for five seconds
        try:
            joined = self.machine.join(
                ranks,
                f"m{key}",
                min_bytes=least * HUGE,
                reserve_bytes={device: count * HUGE for device, count in wanted.items()},
            )
        except GuaranteeError:
            assert not allowed
        else:
            assert allowed
            self.members[key] = Model(joined, ranks, least, wanted)

    @rule(key=who)
    def leave(self, key: int) -> None:
        if one := self.members.pop(key, None):
            one.joined.close()

    @rule(key=who, count=pages)
    def grant(self, key: int, count: int) -> None:
        one = self.members.get(key)
        if one is None or not one.awake:
            return
        room = min(self.left(device) // one.ranks.count(device) for device in set(one.ranks))
        got = one.joined.device_set.grant(count)
        assert got == min(count, max(0, room))
        one.held += got

    @rule(key=who, count=pages)
    def give_back(self, key: int, count: int) -> None:
        if one := self.members.get(key):
            one.joined.device_set.give_back(min(count, one.held))
            one.held -= min(count, one.held)

    @rule(key=who)
    def sleep(self, key: int) -> None:
        if one := self.members.get(key):
            one.joined.device_set.fall_asleep()
            one.awake = False

    @rule(key=who)
    def wake(self, key: int) -> None:
        one = self.members.get(key)
        if one is None or one.awake:
            return
        allowed = self.sums_allow(key, one.ranks, one.least, one.reserve)
        there = self.is_there(key, one.ranks, one.reserve)
        try:
            one.joined.device_set.wake(0.0)
        except GuaranteeError:
            assert not allowed
        except ReserveError:
            assert allowed
            assert not there
        else:
            assert allowed
            assert there
            one.awake = True

    @rule(key=who, least=pages)
    def guarantee(self, key: int, least: int) -> None:
        one = self.members.get(key)
        if one is None or not one.awake:
            return
        allowed = least <= one.least or self.sums_allow(key, one.ranks, least, one.reserve)
        try:
            one.joined.device_set.set_min(least * HUGE)
        except GuaranteeError:
            assert not allowed
        else:
            assert allowed
            one.least = least

    @rule(key=who, on_a=pages, on_b=pages)
    def reserve(self, key: int, on_a: int, on_b: int) -> None:
        one = self.members.get(key)
        if one is None or not one.awake:
            return
        wanted = {device: {"a": on_a, "b": on_b}[device] for device in set(one.ranks)}
        # While it claims, what shrinks is still as it was.
        most = {device: max(count, one.reserve.get(device, 0)) for device, count in wanted.items()}
        grows = {device for device in wanted if wanted[device] > one.reserve.get(device, 0)}
        allowed = not grows or self.sums_allow(key, one.ranks, one.least, most)
        if allowed and not all(self.left(device, key) >= wanted[device] for device in grows):
            return  # as in join
        try:
            one.joined.reserve({device: count * HUGE for device, count in wanted.items()})
        except GuaranteeError:
            assert not allowed
        else:
            assert allowed
            one.reserve = wanted

    # --- what is always so ------------------------------------------------------------------------

    @invariant()
    def adds_up(self) -> None:
        self.machine.check()
        for device in PAGES:
            found = self.machine.members(device)
            assert set(found) == {
                f"m{key}" for key, one in self.members.items() if device in one.ranks
            }
            for key, one in self.members.items():
                if device not in one.ranks:
                    continue
                member = found[f"m{key}"]
                assert member.granted_bytes == one.held_of(device) * HUGE
                reserved = one.reserve.get(device, 0) * HUGE
                assert member.reserve_bytes == reserved
                assert member.pledged_bytes == (reserved if one.awake else 0)
                assert member.asleep is not one.awake
                assert member.min_bytes == one.least_of(device, one.least) * HUGE
        for one in self.members.values():
            one.joined.device_set.check_integrity(one.held)


TestDeviceSet = DeviceSet.TestCase
TestDeviceSet.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
