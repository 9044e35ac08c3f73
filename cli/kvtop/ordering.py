"""Which instances are shown, and in what order.

ordered(scene.instances, "mapped", is_reversed=False, wanted="llama")
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from kvelastic.cli.kvtop.scene import Instance

_Value = Callable[[Instance], "int | float | None"]

_NUMBERS: Final[dict[str, _Value]] = {
    "mapped": lambda one: one.mapped_bytes,
    "in use": lambda one: one.in_use_bytes,
    "limit": lambda one: one.limit_bytes,
    "min": lambda one: one.min_bytes,
    "prio": lambda one: one.priority,
    "in/s": lambda one: one.pages_in_per_s,
    "out/s": lambda one: one.pages_out_per_s,
    "evict/s": lambda one: one.evicted_per_s,
}
ORDERS: Final = ("name", "state", *_NUMBERS)
"""What one can sort by; numbers come largest first, and an unknown one last."""


def ordered(
    instances: Iterable[Instance], by: str, *, is_reversed: bool = False, wanted: str = ""
) -> list[Instance]:
    """The instances in which `wanted` occurs, sorted; equal ones by name."""
    shown = sorted((one for one in instances if _has(one, wanted)), key=lambda one: one.label)
    if by == "name":
        return shown[::-1] if is_reversed else shown
    if by == "state":
        return sorted(shown, key=lambda one: one.state, reverse=is_reversed)
    value = _NUMBERS[by]
    known = [(number, one) for one in shown if (number := value(one)) is not None]
    known.sort(key=lambda each: each[0], reverse=not is_reversed)
    return [one for _, one in known] + [one for one in shown if value(one) is None]


def _has(instance: Instance, wanted: str) -> bool:
    texts = (instance.label, instance.model, instance.engine, instance.device, instance.state)
    return any(wanted.casefold() in text.casefold() for text in texts)
