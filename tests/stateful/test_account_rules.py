"""The account of a device against a model that keeps its rules: joins, sleeps, wakes, reserves."""

from __future__ import annotations

import mmap
import os
from typing import Final

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvelastic import _vmm
from kvelastic.errors import GuaranteeError, ReserveError
from kvelastic.shared import ledger

pytestmark = pytest.mark.slow


PAGE: Final = 2 << 20
CAPACITY_PAGES: Final = 20
MEMBERS: Final = 4

pages = st.integers(0, CAPACITY_PAGES + 4)
who = st.integers(0, MEMBERS - 1)


class Model:
    """What one member has; in pages."""

    def __init__(self, joined: ledger.JoinedLedger, least: int, reserve: int) -> None:
        self.joined = joined
        self.least = least
        self.reserve = reserve
        self.granted = 0
        self.awake = True


class Account(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.members: dict[int, Model] = {}
        self.capacity = CAPACITY_PAGES

    @initialize(outside=st.integers(0, 6))
    def make(self, outside: int) -> None:
        self.total = CAPACITY_PAGES + outside
        self.group = f"kvrules-{os.getpid()}"
        # It keeps the ledger there, and counts for nothing.
        self.holder = self.enter("holder", 0, 0)

    def enter(self, name: str, least: int, reserve: int) -> ledger.JoinedLedger:
        return ledger.join(
            "host",
            group=self.group,
            capacity_bytes=CAPACITY_PAGES * PAGE,
            total_bytes=self.total * PAGE,
            name=name,
            uuid=name.encode().ljust(16),
            min_bytes=least * PAGE,
            reserve_bytes=reserve * PAGE,
        )

    def teardown(self) -> None:
        for model in self.members.values():
            model.joined.close()
        if hasattr(self, "holder"):
            self.holder.close()

    # --- the rules, in other words than the native code's ---------------------------------------

    def awake(self, but: int | None = None) -> list[Model]:
        return [one for key, one in self.members.items() if one.awake and key != but]

    def left(self, reserved: int) -> int:
        """For caches."""
        return min(self.capacity, max(self.total, self.capacity) - reserved)

    def sums_allow(self, key: int, least: int, reserve: int) -> bool:
        others = self.awake(but=key)
        left = self.left(sum(one.reserve for one in others) + reserve)
        return left >= 0 and sum(one.least for one in others) + least <= left

    def granted(self) -> int:
        return sum(one.granted for one in self.members.values())

    def is_there(self, key: int, reserve: int) -> bool:
        return self.granted() <= self.left(
            sum(one.reserve for one in self.awake(but=key)) + reserve
        )

    # --- what members do ------------------------------------------------------------------------

    @rule(key=who, least=pages, reserve=pages)
    def join(self, key: int, least: int, reserve: int) -> None:
        allowed = self.sums_allow(key, least, reserve)
        if key in self.members or (allowed and not self.is_there(key, reserve)):
            return  # nobody gives here: it would wait for five seconds
        try:
            joined = self.enter(f"m{key}", least, reserve)
        except GuaranteeError:
            assert not allowed
        else:
            assert allowed
            self.members[key] = Model(joined, least, reserve)

    @rule(key=who)
    def leave(self, key: int) -> None:
        if key in self.members:
            self.members.pop(key).joined.close()

    @rule(key=who, count=pages)
    def grant(self, key: int, count: int) -> None:
        one = self.members.get(key)
        if one is None or not one.awake:
            return
        room = max(0, self.left(sum(x.reserve for x in self.awake())) - self.granted())
        got = one.joined.member.grant(count, PAGE)
        assert got == min(count, room)
        one.granted += got

    @rule(key=who, count=pages)
    def give_back(self, key: int, count: int) -> None:
        if one := self.members.get(key):
            given = min(count, one.granted)
            one.joined.member.give_back(given, PAGE)
            one.granted -= given

    @rule(key=who)
    def sleep(self, key: int) -> None:
        if one := self.members.get(key):
            one.joined.member.fall_asleep()
            one.awake = False

    @rule(key=who)
    def wake(self, key: int) -> None:
        one = self.members.get(key)
        if one is None or one.awake:
            return
        try:
            one.joined.member.wake(0.0)
        except GuaranteeError:
            assert not self.sums_allow(key, one.least, one.reserve)
        except ReserveError:
            assert not self.is_there(key, one.reserve)
        else:
            assert self.sums_allow(key, one.least, one.reserve)
            assert self.is_there(key, one.reserve)
            one.awake = True

    @rule(key=who, least=pages)
    def guarantee(self, key: int, least: int) -> None:
        one = self.members.get(key)
        if one is None or not one.awake:
            return
        try:
            one.joined.member.set_min(least * PAGE)
        except GuaranteeError:
            assert least > one.least
            assert not self.sums_allow(key, least, one.reserve)
        else:
            one.least = least

    @rule(key=who, reserve=pages)
    def reserve(self, key: int, reserve: int) -> None:
        one = self.members.get(key)
        if one is None or not one.awake:
            return
        allowed = self.sums_allow(key, one.least, reserve)
        if reserve > one.reserve and allowed and not self.is_there(key, reserve):
            return  # as in join
        try:
            one.joined.member.reserve(reserve * PAGE)
        except GuaranteeError:
            assert not allowed
        else:
            one.reserve = reserve

    @rule(count=st.integers(1, CAPACITY_PAGES + 8))
    def change_capacity(self, count: int) -> None:
        before, self.capacity = self.capacity, count
        allowed = self.sums_allow(-1, 0, 0)
        try:
            ledger.set_capacity("host", group=self.group, capacity_bytes=count * PAGE)
        except GuaranteeError:
            assert not allowed
            self.capacity = before
        else:
            assert allowed

    # --- what is always so ------------------------------------------------------------------------

    @invariant()
    def adds_up(self) -> None:
        if not hasattr(self, "holder"):
            return
        with (
            self.holder.path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as memory,
        ):
            _vmm.ledger_check_integrity(memory)
        (info,) = [one for one in ledger.list_ledgers() if one.group == self.group]
        assert info.granted_bytes == self.granted() * PAGE
        assert info.reserved_bytes == sum(one.reserve for one in self.awake()) * PAGE
        assert info.guaranteed_bytes == sum(one.least for one in self.awake()) * PAGE


TestAccount = Account.TestCase
TestAccount.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
