"""Which sequences compute in a step, and whose blocks go when there are not enough: plain values.

The one that came first is never preempted for another one, so it always gets to its end; whoever is
preempted begins again with its first token.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field


@dataclass
class Sequence:
    """A prompt and what is generated behind it."""

    index: int
    prompt_tokens: int
    tokens: int
    """With the prompt."""
    slot: int = -1
    position: int = 0
    """Of the token that is computed next; what it yields is the token behind it."""
    ids: list[int] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        return self.position == self.tokens - 1


def draw(
    new_tokens: int, prompt: tuple[int, int], generated: tuple[int, int], seed: int = 3
) -> list[Sequence]:
    """Sequences of random lengths that generate at least `new_tokens` together."""
    dice = random.Random(seed)
    made: list[Sequence] = []
    while sum(each.tokens - each.prompt_tokens for each in made) < new_tokens:
        prompt_tokens = dice.randint(*prompt)
        made.append(Sequence(len(made), prompt_tokens, prompt_tokens + dice.randint(*generated)))
    return made


class Schedule:
    """Slots for sequences. `alloc` answers n ids or None; `release` takes ids back."""

    def __init__(
        self,
        sequences: Iterable[Sequence],
        slots: int,
        tokens_per_block: int,
        alloc: Callable[[int], list[int] | None],
        release: Callable[[list[int]], None],
    ) -> None:
        self._waiting = deque(sequences)
        self._free_slots = list(range(slots))
        self._tokens_per_block = tokens_per_block
        self._alloc, self._release = alloc, release
        self.running: list[Sequence] = []
        """The one that came first is first."""
        self.preemptions = 0

    @property
    def is_done(self) -> bool:
        return not self.running and not self._waiting

    def plan(self, *, over_limit: bool) -> list[Sequence]:
        """Who computes in this step, each with a block for its token; nobody: there is no memory.

        Over the limit one is preempted, and nobody comes as long as somebody is there.
        """
        if over_limit and len(self.running) > 1:
            self._preempt(self.running[-1])
        for each in list(self.running):
            self._grow(each)
        while self._waiting and self._free_slots and not (over_limit and self.running):
            ids = self._alloc(1)
            if ids is None:
                break
            coming = self._waiting.popleft()
            coming.slot, coming.ids = self._free_slots.pop(), ids
            self.running.append(coming)
        return self.running

    def _grow(self, sequence: Sequence) -> None:
        while sequence in self.running and self._lacks_block(sequence):
            ids = self._alloc(1)
            if ids is None:
                self._preempt(self.running[-1])
            else:
                sequence.ids += ids

    def _lacks_block(self, sequence: Sequence) -> bool:
        return sequence.position // self._tokens_per_block == len(sequence.ids)

    def _preempt(self, sequence: Sequence) -> None:
        self.preemptions += 1
        self._leave(sequence)
        sequence.position = 0
        self._waiting.appendleft(sequence)

    def _leave(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._free_slots.append(sequence.slot)
        ids, sequence.ids, sequence.slot = sequence.ids, [], -1
        self._release(ids)

    def advance(self) -> None:
        """Every running one has computed its token; who is done goes."""
        for each in list(self.running):
            each.position += 1
            if each.is_done:
                self._leave(each)
