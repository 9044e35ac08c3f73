"""Memory of the devices over the last ten minutes, bounded in samples and in names.

history.add(time.monotonic(), instance_memory.devices())     # every INTERVAL_S, in the loop
history.window(60.0, now_s=..., wall_s=...)                   # columns of plain values, for JSON
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice, pairwise
from typing import Any, Final, NamedTuple

from kvelastic.errors import IntegrityError
from kvelastic.units import MAX_SIZE_BYTES

INTERVAL_S: Final = 2.0
"""Time between two samples."""
SAMPLES: Final = 301
"""Ten minutes, both ends included."""
MAX_WINDOW_S: Final = INTERVAL_S * (SAMPLES - 1)
MOST_DEVICES: Final = 64
"""Bound on the devices of a sample and of a window; `MOST_INSTANCES` bounds the instances of all
devices. Others are omitted."""
MOST_INSTANCES: Final = 512

_DEVICE_KEYS: Final = (
    "capacity_bytes", "others_bytes", "others_of_capacity_bytes", "reserved_bytes",
    "reserved_of_capacity_bytes", "free_bytes",
)  # fmt: skip
_INSTANCE_KEYS: Final = (
    "granted_bytes", "in_use_bytes", "cached_bytes", "parked_bytes", "pledged_bytes",
)  # fmt: skip


class _Device(NamedTuple):
    values: list[int]
    """In the order of `_DEVICE_KEYS`."""
    instances: dict[str, list[int]]
    """Values in the order of `_INSTANCE_KEYS`, by name."""


class _Sample(NamedTuple):
    at_s: float
    devices: dict[tuple[str, str], _Device]
    """By group and device."""


class MemoryHistory:
    """The samples of every device and instance. Use it in the event loop; never blocks."""

    def __init__(self) -> None:
        self._count = 0
        """Number of samples taken since the start; also the next sample's number."""
        self._samples: deque[_Sample] = deque(maxlen=SAMPLES)

    def add(self, at_s: float, devices: list[dict[str, Any]]) -> None:
        """Add a sample: the result of `instance_memory.devices` at the monotonic time `at_s`.

        Unreadable devices are omitted.
        """
        readable = (facts for facts in devices if facts["status"] == "readable")
        room = MOST_INSTANCES
        found = {}
        for facts in islice(readable, MOST_DEVICES):
            members = facts["members"][:room]
            room -= len(members)
            found[facts["group"], facts["device"]] = _Device(
                _values(facts, _DEVICE_KEYS), _by_name(members)
            )
        self._samples.append(_Sample(at_s, found))
        self._count += 1

    def window(self, seconds: float, *, now_s: float, wall_s: float) -> dict[str, Any]:
        """Return the samples of the last `seconds` (at most `MAX_WINDOW_S`), oldest first.

        `now_s` is the current time on the clock of `add`, `wall_s` the same moment in seconds since
        1970. Every column has one value per sample, None if the device or instance was absent.
        """
        samples = [sample for sample in self._samples if sample.at_s >= now_s - seconds]
        keys = sorted({key for sample in samples for key in sample.devices})
        room = MOST_INSTANCES
        devices = []
        for group, name in keys[:MOST_DEVICES]:
            present = [sample.devices.get((group, name)) for sample in samples]
            names = list(dict.fromkeys(one for each in present if each for one in each.instances))
            devices.append(
                {
                    "group": group,
                    "device": name,
                    **_columns(_DEVICE_KEYS, [each and each.values for each in present]),
                    "instances": [
                        {
                            "name": one,
                            **_columns(
                                _INSTANCE_KEYS,
                                [each and each.instances.get(one) for each in present],
                            ),
                        }
                        for one in names[:room]
                    ],
                }
            )
            room -= len(names[:room])
        return {
            "interval_seconds": INTERVAL_S,
            "first_sample": self._count - len(samples),
            "at": [round(wall_s - now_s + sample.at_s, 3) for sample in samples],
            "devices": devices,
        }

    def check_integrity(self) -> None:
        """Raise `IntegrityError` if the stored state is inconsistent."""
        if any(later.at_s < earlier.at_s for earlier, later in pairwise(self._samples)):
            raise IntegrityError("a sample is older than the one before it")


def _values(facts: dict[str, Any], keys: Iterable[str]) -> list[int]:
    return [min(max(facts[key], 0), MAX_SIZE_BYTES) for key in keys]


def _by_name(members: Iterable[dict[str, Any]]) -> dict[str, list[int]]:
    """Return the members' values. A dead instance and its successor of one name are summed."""
    found: dict[str, list[int]] = {}
    for member in members:
        values, name = _values(member, _INSTANCE_KEYS), member["name"]
        before = found.get(name, [0] * len(values))
        found[name] = [one + other for one, other in zip(values, before, strict=True)]
    return found


def _columns(keys: Iterable[str], rows: Sequence[list[int] | None]) -> dict[str, list[int | None]]:
    return {key: [None if row is None else row[at] for row in rows] for at, key in enumerate(keys)}
