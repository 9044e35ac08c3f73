"""Quotas of models in a disk store, and the choice of records to remove at the quota."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from kvelastic.errors import InvalidArgumentError


class Quotas:
    """Records of models with a quota, in order of use. The store's lock guards it.

    A model is identified by the hash in its records. Of one put, report the ends of chains first,
    so that they are removed first.
    """

    def __init__(self, shares: Mapping[bytes, float]) -> None:
        """Raises `InvalidArgumentError` for a share outside 0 to 1."""
        for share in shares.values():
            if not 0 <= share <= 1:
                raise InvalidArgumentError(f"a quota of {share}; give a part of the limit, 0 to 1")
        self._shares = dict(shares)
        self._used: dict[bytes, OrderedDict[bytes, None]] = {m: OrderedDict() for m in shares}

    def room(self, model: bytes, slots: int) -> int | None:
        """Return how many of `slots` records a model may have; None if it has no quota."""
        share = self._shares.get(model)
        return None if share is None else int(share * slots)

    def over(self, model: bytes, new: int, slots: int) -> list[bytes]:
        """Return the keys to remove before `new` records of the model are stored."""
        room = self.room(model, slots)
        if room is None:
            return []
        used = self._used[model]
        count = min(len(used), max(0, len(used) + new - room))
        return [key for key, _ in zip(used, range(count), strict=False)]

    def stored(self, model: bytes, key: bytes) -> None:
        """Report that a record of the model was stored."""
        if model in self._used:
            self._used[model][key] = None

    def used(self, model: bytes, key: bytes) -> None:
        """Report that a record of the model was read."""
        used = self._used.get(model)
        if used is not None and key in used:
            used.move_to_end(key)

    def gone(self, model: bytes, key: bytes) -> None:
        """Report that a record of the model was removed."""
        if model in self._used:
            self._used[model].pop(key, None)
