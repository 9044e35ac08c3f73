"""What the requests of one step find in the tiers, and hold until they load it or the step ends.

vLLM asks block by block, and again in every step in which a request still waits. So all blocks of
a request that may follow are looked up at its first question of a step::

    lookups.find("req", b"k3", chain)        # chain: k2, and k3 with what comes after it
    ...                                       # k4, k5: answered from what was found
    match = lookups.take("req", [b"k3", b"k4"])   # it loads: what was found stays held
    lookups.end_step()                        # nobody else does: let go

Between the question and the load vLLM evicts blocks to have room for it. Their demotion displaces
records, and without a hold those that were just found.

Keys here are the engine's own; `key_of` makes those of the tiers from them. Used by the scheduler's
thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from kvelastic.tiers.base import NO_KEY


class Found(Protocol):
    """Leading keys that are there, held until `release`."""

    count: int
    """How many of those asked for."""

    def release(self) -> None:
        """Let go. Repeatable."""


class MatchingTiers(Protocol):
    """What looking up needs of the tiers."""

    def match(self, keys: bytes, *, chain_after: bytes = NO_KEY) -> Found:
        """Hold the leading keys that are there. Never blocks."""


class Chain(NamedTuple):
    """Blocks that continue one another, by the engine's keys."""

    before: bytes | None
    """The one that the first of them continues; None: it begins a prompt, or nobody knows."""
    keys: Sequence[bytes]


@dataclass
class _OfRequest:
    """What one request has found in this step."""

    held: list[Found] = field(default_factory=list)
    answers: dict[bytes, bool] = field(default_factory=dict)


class Lookups:
    """See the module."""

    def __init__(self, tiers: MatchingTiers, key_of: Callable[[bytes], bytes]) -> None:
        self._tiers = tiers
        self._key_of = key_of
        self._in_step: dict[str, _OfRequest] = {}
        self._keys: dict[str, dict[bytes, bytes]] = {}
        self._without: set[str] = set()

    def find(self, request: str, key: bytes, chain: Callable[[], Chain]) -> bool:
        """Whether a block is in the tiers, and held for this request.

        `chain` gives the blocks that begin with this one, where it was not looked up in this step.
        """
        if request in self._without:
            return False
        here = self._in_step.setdefault(request, _OfRequest())
        answer = here.answers.get(key)
        if answer is not None:
            return answer
        before, keys = chain()
        wanted = [each for each in keys if each not in here.answers]
        found = self._match(request, before, wanted)
        if found.count:
            here.held.append(found)
        for place, each in enumerate(wanted):
            here.answers[each] = place < found.count
        return here.answers[key]

    def take(self, request: str, keys: Sequence[bytes]) -> Found:
        """Hold exactly these, which were found in this step, for a load: the caller releases."""
        match = self._match(request, None, keys)
        here = self._in_step.pop(request, None)
        if here is not None:
            _release(here)
        return match

    def _match(self, request: str, before: bytes | None, keys: Sequence[bytes]) -> Found:
        known = self._keys.setdefault(request, {})
        for each in keys if before is None else [before, *keys]:
            if each not in known:
                known[each] = self._key_of(each)
        chain_after = NO_KEY if before is None else known[before]
        return self._tiers.match(b"".join([known[each] for each in keys]), chain_after=chain_after)

    def end_step(self) -> None:
        """What nobody has taken goes."""
        for here in self._in_step.values():
            _release(here)
        self._in_step.clear()

    def find_nothing_more(self, request: str) -> None:
        """A load of it has failed: the rest is computed."""
        self._without.add(request)

    def forget(self, request: str) -> None:
        """The request has ended."""
        self._keys.pop(request, None)
        self._without.discard(request)

    def forget_keys(self) -> None:
        """Another namespace: keys are made anew. No step is being made."""
        self.end_step()
        self._keys.clear()


def _release(here: _OfRequest) -> None:
    for found in here.held:
        found.release()
