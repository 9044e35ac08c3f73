"""Models that have a part of a disk store, and which of their records go when it is full."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from kvelastic.errors import InvalidArgumentError


class Quotas:
    """Records of models with a quota, by when they were used. The store's lock guards it.

    Models are named by the hash that their records carry. Of one put the ends of chains are to be
    told first: they go first.
    """

    def __init__(self, shares: Mapping[bytes, float]) -> None:
        """Raises `InvalidArgumentError` for a share outside of 0 to 1."""
        for share in shares.values():
            if not 0 <= share <= 1:
                raise InvalidArgumentError(f"a quota of {share}; give a part of the limit, 0 to 1")
        self._shares = dict(shares)
        self._used: dict[bytes, OrderedDict[bytes, None]] = {m: OrderedDict() for m in shares}

    def room(self, model: bytes, slots: int) -> int | None:
        """How many records a model may have of so many slots; None: it has no quota."""
        share = self._shares.get(model)
        return None if share is None else int(share * slots)

    def over(self, model: bytes, new: int, slots: int) -> list[bytes]:
        """Keys that must go before `new` records of the model come."""
        room = self.room(model, slots)
        if room is None:
            return []
        used = self._used[model]
        count = min(len(used), max(0, len(used) + new - room))
        return [key for key, _ in zip(used, range(count), strict=False)]

    def stored(self, model: bytes, key: bytes) -> None:
        """A record of the model came."""
        if model in self._used:
            self._used[model][key] = None

    def used(self, model: bytes, key: bytes) -> None:
        """It was read."""
        used = self._used.get(model)
        if used is not None and key in used:
            used.move_to_end(key)

    def gone(self, model: bytes, key: bytes) -> None:
        """It is not there any more."""
        if model in self._used:
            self._used[model].pop(key, None)
