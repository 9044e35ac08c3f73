"""The history over several reads: rates of counters, and the latest amounts of each instance.

    model = Model()
    scene = model.add(scene_of(...))      # the same scene, with rates and history
    model.ended                           # the labels of instances that have ended since then

The state is bounded: an instance has at most `HISTORY_LOOKS` amounts, and is removed when a read
does not find it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import Final

from kvelastic.cli.kvtop.scene import Instance, Scene

HISTORY_LOOKS: Final = 120
"""More than the cells of the widest sparkline."""


@dataclass
class _Past:
    """The history of one instance."""

    at_s: float
    instance: Instance
    history_bytes: deque[int] = field(default_factory=lambda: deque(maxlen=HISTORY_LOOKS))


class Model:
    """The history of all instances. It does no input or output, and reads no clock."""

    def __init__(self) -> None:
        self.ended: tuple[str, ...] = ()
        self._past: dict[str, _Past] = {}

    def add(self, scene: Scene) -> Scene:
        """Add the next read, and return it with rates and history.

        A rate is None without an earlier read, if no time has passed, or if a counter decreased.
        """
        before, self._past = self._past, {}
        instances = tuple(
            self._compare(one, before.get(one.key), scene.at_s) for one in scene.instances
        )
        self.ended = tuple(
            sorted(past.instance.label for key, past in before.items() if key not in self._past)
        )
        return replace(scene, instances=instances)

    def _compare(self, now: Instance, past: _Past | None, at_s: float) -> Instance:
        passed_s = at_s - past.at_s if past else 0.0
        history = past.history_bytes if past else deque[int](maxlen=HISTORY_LOOKS)
        if now.mapped_bytes is not None:
            history.append(now.mapped_bytes)
        self._past[now.key] = _Past(at_s, now, history)
        then = past.instance if past else None
        if then is None:
            return replace(now, history_bytes=tuple(history))
        return replace(
            now,
            pages_in_per_s=_rate(then.pages_in, now.pages_in, passed_s),
            pages_out_per_s=_rate(then.pages_out, now.pages_out, passed_s),
            evicted_per_s=_rate(then.blocks_evicted, now.blocks_evicted, passed_s),
            history_bytes=tuple(history),
        )


def _rate(before: int | None, now: int | None, passed_s: float) -> float | None:
    if before is None or now is None or passed_s <= 0 or now < before:
        return None
    return (now - before) / passed_s
