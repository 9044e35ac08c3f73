"""Memory of the devices over the last ten minutes, in a structure of bounded size.

history.add(time.monotonic(), instance_memory.devices())     # every INTERVAL_S, in the loop
history.window(60.0, now_s=..., wall_s=...)                   # columns of plain values, for JSON

A sample has a number. Its slot in every column is that number modulo `SAMPLES`:

    number   ... 299  300 | 301  302  303 ...
    slot     ... 299  300 |   0    1    2 ...     sample 301 replaces sample 0 in slot 0
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any, Final

from kvelastic.errors import IntegrityError
from kvelastic.units import MAX_SIZE_BYTES

INTERVAL_S: Final = 2.0
"""Time between two samples."""
SAMPLES: Final = 301
"""Ten minutes, both ends included."""
MAX_WINDOW_S: Final = INTERVAL_S * (SAMPLES - 1)
MOST_DEVICES: Final = 64
"""Bound on devices; `MOST_INSTANCES` bounds the instances of all devices. Others are omitted."""
MOST_INSTANCES: Final = 512

_ABSENT: Final = -1
_DEVICE_KEYS: Final = (
    "capacity_bytes", "others_bytes", "others_of_capacity_bytes", "reserved_bytes",
    "reserved_of_capacity_bytes", "free_bytes",
)  # fmt: skip
_INSTANCE_KEYS: Final = (
    "granted_bytes", "in_use_bytes", "cached_bytes", "parked_bytes", "pledged_bytes",
)  # fmt: skip


class _Columns:
    """One ring per key. A slot has a value in every ring, or in none."""

    def __init__(self, keys: tuple[str, ...]) -> None:
        self.newest = -1
        """The number of the last sample with a value."""
        self._columns = {key: array("q", [_ABSENT]) * SAMPLES for key in keys}

    def clear(self, number: int) -> None:
        for column in self._columns.values():
            column[number % SAMPLES] = _ABSENT

    def put(self, number: int, facts: dict[str, Any]) -> None:
        """Add the values to a sample. A dead instance and its successor of one name are summed."""
        slot = number % SAMPLES
        self.newest = number
        for key, column in self._columns.items():
            column[slot] = min(max(column[slot], 0) + max(facts[key], 0), MAX_SIZE_BYTES)

    def window(self, numbers: range) -> dict[str, list[int | None]]:
        return {
            key: [None if column[n % SAMPLES] == _ABSENT else column[n % SAMPLES] for n in numbers]
            for key, column in self._columns.items()
        }

    def is_in(self, numbers: range) -> bool:
        column = next(iter(self._columns.values()))
        return any(column[n % SAMPLES] != _ABSENT for n in numbers)

    def check(self, present: range) -> None:
        for slot in range(SAMPLES):
            values = [column[slot] for column in self._columns.values()]
            if min(values) < _ABSENT or (_ABSENT in values and set(values) != {_ABSENT}):
                raise IntegrityError(f"slot {slot} is neither whole nor absent: {values}")
        if self.newest not in present:
            raise IntegrityError(f"last seen in sample {self.newest}, which is gone: {present}")


@dataclass
class _Device:
    columns: _Columns = field(default_factory=lambda: _Columns(_DEVICE_KEYS))
    instances: dict[str, _Columns] = field(default_factory=dict)


class MemoryHistory:
    """A ring of samples for every device and instance. Use it in the event loop; never blocks."""

    def __init__(self) -> None:
        self._count = 0
        """Number of samples taken since the start; also the next sample's number."""
        self._times_s = array("d", [0.0]) * SAMPLES
        self._devices: dict[tuple[str, str], _Device] = {}
        self._instances = 0
        """Number of instances on all devices."""

    @property
    def _present(self) -> range:
        """The numbers of the stored samples."""
        return range(max(0, self._count - SAMPLES), self._count)

    def add(self, at_s: float, devices: list[dict[str, Any]]) -> None:
        """Add a sample: the result of `instance_memory.devices` at the monotonic time `at_s`.

        Unreadable devices are omitted.
        """
        number = self._count
        self._count += 1
        self._times_s[number % SAMPLES] = at_s
        for device in self._devices.values():
            device.columns.clear(number)
            for columns in device.instances.values():
                columns.clear(number)
        for facts in devices:
            if facts["status"] == "readable":
                self._put(number, facts)
        self._forget()

    def window(self, seconds: float, *, now_s: float, wall_s: float) -> dict[str, Any]:
        """Return the samples of the last `seconds` (at most `MAX_WINDOW_S`), oldest first.

        `now_s` is the current time on the clock of `add`, `wall_s` the same moment in seconds since
        1970. Every column has one value per sample, None if the device or instance was absent.
        """
        since_s = now_s - seconds
        numbers = self._present
        while len(numbers) and self._times_s[numbers[0] % SAMPLES] < since_s:
            numbers = numbers[1:]
        return {
            "interval_seconds": INTERVAL_S,
            "first_sample": numbers.start,
            "at": [round(wall_s - now_s + self._times_s[n % SAMPLES], 3) for n in numbers],
            "devices": [
                {
                    "group": group,
                    "device": name,
                    **device.columns.window(numbers),
                    "instances": [
                        {"name": instance, **columns.window(numbers)}
                        for instance, columns in device.instances.items()
                        if columns.is_in(numbers)
                    ],
                }
                for (group, name), device in sorted(self._devices.items())
                if device.columns.is_in(numbers)
            ],
        }

    def check_integrity(self) -> None:
        """Raise `IntegrityError` if the stored state is inconsistent."""
        present = self._present
        times_s = [self._times_s[n % SAMPLES] for n in present]
        if times_s != sorted(times_s):
            raise IntegrityError("a sample is older than the one before it")
        instances = sum(len(device.instances) for device in self._devices.values())
        if instances != self._instances:
            raise IntegrityError(f"{instances} instances are counted as {self._instances}")
        if len(self._devices) > MOST_DEVICES or instances > MOST_INSTANCES:
            raise IntegrityError(f"{len(self._devices)} devices, {instances} instances: too many")
        for device in self._devices.values():
            device.columns.check(present)
            for columns in device.instances.values():
                columns.check(present)

    def _put(self, number: int, facts: dict[str, Any]) -> None:
        key = (facts["group"], facts["device"])
        device = self._devices.get(key)
        if device is None:
            if len(self._devices) >= MOST_DEVICES:
                return
            device = self._devices[key] = _Device()
        device.columns.put(number, facts)
        for member in facts["members"]:
            columns = device.instances.get(member["name"])
            if columns is None:
                if self._instances >= MOST_INSTANCES:
                    continue
                columns = device.instances[member["name"]] = _Columns(_INSTANCE_KEYS)
                self._instances += 1
            columns.put(number, member)

    def _forget(self) -> None:
        """Remove devices and instances that are in no stored sample, so that names stay bounded."""
        oldest = self._present.start
        for key, device in list(self._devices.items()):
            # A device is in every sample that its instances are in, so they are removed first.
            for name, columns in list(device.instances.items()):
                if columns.newest < oldest:
                    del device.instances[name]
                    self._instances -= 1
            if device.columns.newest < oldest:
                del self._devices[key]
