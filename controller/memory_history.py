"""Memory of the devices over the last ten minutes, in state whose size has a bound.

history.add(time.monotonic(), instance_memory.devices())     # every INTERVAL_S, in the loop
history.window(60.0, now_s=..., wall_s=...)                   # columns of plain values, for JSON

A sample has a number; its place in every column is that number modulo `SAMPLES`:

    number   ... 299  300 | 301  302  303 ...
    slot     ... 299  300 |   0    1    2 ...     slot 0 held sample 0 until 301 came
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any, Final

from kvelastic.errors import IntegrityError
from kvelastic.sizes import MAX_SIZE_BYTES

INTERVAL_S: Final = 2.0
"""Between two samples."""
SAMPLES: Final = 301
"""Ten minutes, both ends included."""
MAX_WINDOW_S: Final = INTERVAL_S * (SAMPLES - 1)
MOST_DEVICES: Final = 64
"""Further devices are left out; so are further instances (of all devices together)."""
MOST_INSTANCES: Final = 512

_ABSENT: Final = -1
_DEVICE_KEYS: Final = (
    "capacity_bytes",
    "others_bytes",
    "others_of_capacity_bytes",
    "reserved_bytes",
    "reserved_of_capacity_bytes",
    "free_bytes",
)
_INSTANCE_KEYS: Final = (
    "granted_bytes",
    "in_use_bytes",
    "cached_bytes",
    "parked_bytes",
    "pledged_bytes",
)


class _Columns:
    """One ring a key; a slot is whole or absent."""

    def __init__(self, keys: tuple[str, ...]) -> None:
        self.newest = -1
        """The number of the last sample that has it."""
        self._columns = {key: array("q", [_ABSENT]) * SAMPLES for key in keys}

    def clear(self, number: int) -> None:
        for column in self._columns.values():
            column[number % SAMPLES] = _ABSENT

    def put(self, number: int, facts: dict[str, Any]) -> None:
        """Two facts of one name and sample are added up: a dead instance, and its successor."""
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
    """See the module. Owned by the loop; blocks on nothing."""

    def __init__(self) -> None:
        self._count = 0
        """Samples ever taken; the next one's number."""
        self._times_s = array("d", [0.0]) * SAMPLES
        self._devices: dict[tuple[str, str], _Device] = {}
        self._instances = 0
        """Of all devices together."""

    @property
    def _present(self) -> range:
        """Numbers of the samples that are still there."""
        return range(max(0, self._count - SAMPLES), self._count)

    def add(self, at_s: float, devices: list[dict[str, Any]]) -> None:
        """Take a sample: what `instance_memory.devices` returned, at a time that never goes back.

        Devices that could not be read are left out, as if they were not there.
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
        """The samples of the last `seconds`, oldest first, at most `MAX_WINDOW_S` of them.

        `now_s` is of the clock that `add` was given, `wall_s` the same moment in seconds since
        1970. Every column has a value a sample, None where the device or instance was not there.
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
        """Raise `IntegrityError` if what is kept contradicts itself."""
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
        """Whoever is in no sample any more, so that names that come and go do not add up."""
        oldest = self._present.start
        for key, device in list(self._devices.items()):
            # A device is as young as its youngest instance: it goes after all of them.
            for name, columns in list(device.instances.items()):
                if columns.newest < oldest:
                    del device.instances[name]
                    self._instances -= 1
            if device.columns.newest < oldest:
                del self._devices[key]
