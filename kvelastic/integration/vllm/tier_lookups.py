"""Holds what the requests of one step find in the tiers, until they load it or the step ends.

vLLM asks block by block, and again in every step while a request waits. So the first question of a
step looks up all blocks of the request that may follow::

    lookups.find("req", b"k3", read_chain)   # returns k2, and k3 with its successors
    ...                                       # k4, k5: taken from the first result
    load = lookups.take("req", [b"k3", b"k4"])    # it loads: the found records stay held
    lookups.end_step()                        # releases all that no request has taken

Between lookup and load, vLLM evicts blocks to make room. Their demotion displaces records. Without
a hold it could displace the records just found.

Keys here are the engine's own; `key_of` converts them to the tiers' keys. Used by the scheduler's
thread only.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice, takewhile
from typing import TYPE_CHECKING, Final, NamedTuple

from kvelastic.tiers.base import NO_KEY, each_key
from kvelastic.tiers.load import Load, merged

if TYPE_CHECKING:
    from kvelastic.tiers.manager import Tiers

_GROUP_BYTES: Final = 4
"""vLLM's key of a block ends with the number of its group."""


class Chain(NamedTuple):
    """Consecutive blocks of one sequence, by the engine's keys."""

    before: bytes | None
    """The block before the first one; None at the start of a prompt, or if unknown."""
    keys: Iterable[bytes]


class Chains:
    """The blocks of one request, for each group in the order of its tokens."""

    def __init__(self, positions: Mapping[bytes, int]) -> None:
        """`positions` has the ends of blocks by key, in the order in which vLLM adds them."""
        self.positions = positions
        self._read = 0
        self._groups: dict[bytes, tuple[list[bytes], list[int]]] = {}
        """Keys and ends, both ascending by end."""

    def of(self, key: bytes) -> Chain:
        """Return a block with its successors in its group, read only as the caller iterates."""
        end = self.positions.get(key)
        if end is None:
            return Chain(None, [key])
        self._read_new()
        keys, ends = self._groups[key[-_GROUP_BYTES:]]
        at, after = bisect_left(ends, end), bisect_right(ends, end)
        following = (keys[place] for place in range(after, len(keys)))
        return Chain(keys[at - 1] if at else None, chain([key], following))

    def _read_new(self) -> None:
        if self._read == len(self.positions):
            return
        for key, end in islice(self.positions.items(), self._read, None):
            keys, ends = self._groups.setdefault(key[-_GROUP_BYTES:], ([], []))
            if not ends or end > ends[-1]:  # else vLLM has looked up a part of a block
                keys.append(key)
                ends.append(end)
        self._read = len(self.positions)


@dataclass
class _OfRequest:
    """The records that one request has found in this step."""

    held: list[Load] = field(default_factory=list)
    answers: dict[bytes, bool] = field(default_factory=dict)


class Lookups:
    """Lookups of the requests of an engine, by request id."""

    def __init__(self, tiers: Tiers | None, key_of: Callable[[bytes], bytes]) -> None:
        """Without `tiers`, nothing is found."""
        self._tiers = tiers
        self._key_of = key_of
        self._in_step: dict[str, _OfRequest] = {}
        self._keys: dict[str, dict[bytes, bytes]] = {}
        self._without: set[str] = set()

    def find(self, request: str, key: bytes, read_chain: Callable[[], Chain]) -> bool:
        """Return True if a block is in the tiers; it is then held for this request.

        `read_chain` returns the blocks from this one on. They are looked up together, up to one
        that this step has looked up before. Called only if this step has no result yet.
        """
        if request in self._without:
            return False
        here = self._in_step.setdefault(request, _OfRequest())
        answer = here.answers.get(key)
        if answer is not None:
            return answer
        before, keys = read_chain()
        wanted = list(takewhile(lambda each: each not in here.answers, keys))
        found = self._match(request, before, wanted)
        if found.count:
            here.held.append(found)
        for place, each in enumerate(wanted):
            here.answers[each] = place < found.count
        return here.answers[key]

    def take(self, request: str, keys: Sequence[bytes]) -> Load:
        """Return a load of exactly these keys, as far as the leading ones are in the tiers.

        Takes over what this step has found. Looks up only the keys that it has not found.
        """
        here = self._in_step.pop(request, None) or _OfRequest()
        known = self._keys.get(request, {})
        found = {each for load in here.held for each in each_key(load.keys)}
        if missing := [each for each in keys if known.get(each) not in found]:
            here.held.append(self._match(request, None, missing))
        known = self._keys.get(request, {})
        return merged(b"".join(known.get(each, NO_KEY) for each in keys), here.held)

    def _match(self, request: str, before: bytes | None, keys: Sequence[bytes]) -> Load:
        if self._tiers is None:
            return Load()
        known = self._keys.setdefault(request, {})
        for each in keys if before is None else [before, *keys]:
            if each not in known:
                known[each] = self._key_of(each)
        chain_after = NO_KEY if before is None else known[before]
        return self._tiers.match(b"".join([known[each] for each in keys]), chain_after=chain_after)

    def end_step(self) -> None:
        """Release what no request has taken."""
        for here in self._in_step.values():
            _release(here)
        self._in_step.clear()

    def find_nothing_more(self, request: str) -> None:
        """A load of this request has failed: the rest is computed."""
        self._without.add(request)

    def forget(self, request: str) -> None:
        """The request has ended."""
        self._keys.pop(request, None)
        self._without.discard(request)

    def forget_keys(self) -> None:
        """Drop cached keys after a change of namespace. Not while a step is being scheduled."""
        self.end_step()
        self._keys.clear()


def _release(here: _OfRequest) -> None:
    for found in here.held:
        found.release()
