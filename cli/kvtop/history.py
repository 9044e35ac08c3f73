"""The history over several reads: rates of counters, and the latest amounts of each instance.

    model = Model()
    scene = model.add(scene_of(...))      # the same scene, with rates and history
    model.ended                           # the labels of instances that have ended since then

The state is bounded: an instance has at most `HISTORY_LOOKS` amounts, and is removed when a read
does not find it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from kvelastic.cli.kvtop.scene import Instance, Scene

HISTORY_LOOKS: Final = 120
"""More than the cells of the widest sparkline."""


class Model:
    """The history of every instance. It does no input or output, and reads no clock."""

    def __init__(self) -> None:
        self.ended: tuple[str, ...] = ()
        self._last = Scene(at_s=0.0)

    def add(self, scene: Scene) -> Scene:
        """Add the next read, and return it with rates and history.

        A rate is None without an earlier read, if no time has passed, or if a counter decreased.
        """
        before = {one.key: one for one in self._last.instances}
        passed_s = scene.at_s - self._last.at_s
        instances = tuple(
            _compared(one, before.pop(one.key, None), passed_s) for one in scene.instances
        )
        self.ended = tuple(sorted(one.label for one in before.values()))
        self._last = replace(scene, instances=instances)
        return self._last


def _compared(now: Instance, then: Instance | None, passed_s: float) -> Instance:
    history = () if then is None else then.history_bytes
    if now.mapped_bytes is not None:
        history = (*history, now.mapped_bytes)[-HISTORY_LOOKS:]
    if then is None:
        return replace(now, history_bytes=history)
    return replace(
        now,
        pages_in_per_s=_rate(then.pages_in, now.pages_in, passed_s),
        pages_out_per_s=_rate(then.pages_out, now.pages_out, passed_s),
        evicted_per_s=_rate(then.blocks_evicted, now.blocks_evicted, passed_s),
        history_bytes=history,
    )


def _rate(before: int | None, now: int | None, passed_s: float) -> float | None:
    if before is None or now is None or passed_s <= 0 or now < before:
        return None
    return (now - before) / passed_s
