"""Traces for the reclaim simulator: which models share a device, and what arrives when.

    trace = load_trace(Path("trace.json"))
    trace = parse_trace({"capacity": "8G", "models": [...], "arrivals": [...]})

The format is one JSON document; docs/reclaim.md has every key and an example.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from kvelastic import _vmm
from kvelastic.errors import InvalidArgumentError
from kvelastic.units import MAX_PRIORITY, MIB_BYTES, format_size, parse_size

MAX_REQUESTS: Final = 100_000
"""Requests in one trace; more would take minutes to replay."""
MAX_MODELS: Final = _vmm.LEDGER_SLOTS
MAX_MS: Final = 30 * 24 * 3600 * 1000
"""The longest time in a trace: a month."""
NS_PER_MS: Final = 1_000_000
MIN_GIVE_BACK_NS: Final = 100_000
"""No victim is faster: two that take from each other at once would never get on in time."""

_TOO_MANY: Final = f"there are more than {MAX_REQUESTS} requests"


@dataclass(frozen=True)
class ModelSpec:
    """One model that shares the device."""

    name: str
    min_bytes: int = 0
    limit_bytes: int | None = None
    """None: the device's capacity."""
    priority: int = 0
    page_bytes: int = 2 * MIB_BYTES
    give_back_ns: int = NS_PER_MS
    """How long it takes as a victim, from a request until the memory is free."""
    preempt_ns: int = 50 * NS_PER_MS
    """Under pressure for so long, its engine preempts the newest request."""
    reserved_bytes: int = 0
    """What it holds besides its cache while it is awake: weights, activations."""
    is_asleep: bool = False
    """At the start; its first request wakes it."""


@dataclass(frozen=True)
class Arrival:
    """One request."""

    at_ns: int
    model: int
    """Its index among the models."""
    bytes: int
    """What it holds while it is in use."""
    hold_ns: int
    cached_bytes: int = 0
    """How much of that stays cached afterwards."""
    deadline_ns: int = 30_000 * NS_PER_MS
    """Waiting for so long, it is refused."""


@dataclass(frozen=True)
class Sleep:
    """A model is put to sleep: at once, or when its requests are done with."""

    at_ns: int
    model: int
    """Its index among the models."""


@dataclass(frozen=True)
class Trace:
    """Everything that a simulation replays; arrivals in the order of their times."""

    capacity_bytes: int
    models: tuple[ModelSpec, ...]
    arrivals: tuple[Arrival, ...]
    alloc_wait_ns: int = 50 * NS_PER_MS
    """How long an alloc waits before it evicts its own cache: `KVELASTIC_RECLAIM_WAIT`."""
    late_ns: int = 200 * NS_PER_MS
    """A request that waited for longer than this is late."""
    total_bytes: int = 0
    """All memory of the device, where that is more than the capacity: reserves lie in the rest of
    it first. 0: they come out of the capacity."""
    sleeps: tuple[Sleep, ...] = ()

    def __post_init__(self) -> None:
        """Check what only the whole can say. Raises `InvalidArgumentError`."""
        if self.capacity_bytes <= 0:
            raise InvalidArgumentError("the capacity must be more than 0.")
        if not 1 <= len(self.models) <= MAX_MODELS:
            raise InvalidArgumentError(f"there must be 1 to {MAX_MODELS} models.")
        names = [model.name for model in self.models]
        for name in names:
            if names.count(name) > 1:
                raise InvalidArgumentError(f"two models are called {name!r}.")
        if 0 < self.total_bytes < self.capacity_bytes:
            raise InvalidArgumentError("the total must not be less than the capacity.")
        awake = [model for model in self.models if not model.is_asleep]
        guaranteed_bytes = sum(model.min_bytes for model in awake)
        reserved_bytes = sum(model.reserved_bytes for model in awake)
        if not _vmm.has_room_for(
            self.capacity_bytes, self.total_bytes, guaranteed_bytes, reserved_bytes
        ):
            what = f"the models' min add up to {format_size(guaranteed_bytes)}"
            if reserved_bytes:
                what += f" and what they have reserved to {format_size(reserved_bytes)}"
            raise InvalidArgumentError(
                f"{what}, more than the capacity of {format_size(self.capacity_bytes)} allows."
            )
        if len(self.arrivals) > MAX_REQUESTS:
            raise InvalidArgumentError(f"{_TOO_MANY}.")

    def limit_bytes(self, model: int) -> int:
        """Return how much that model may hold."""
        limit_bytes = self.models[model].limit_bytes
        return self.capacity_bytes if limit_bytes is None else limit_bytes

    def split_evenly(self) -> Trace:
        """Return the same with an equal, fixed part of the device for every model.

        The part holds its reserve, too; there nobody sleeps.
        """
        share_bytes = self.capacity_bytes // len(self.models)
        whole_bytes = max(self.total_bytes, self.capacity_bytes) // len(self.models)
        models = tuple(
            replace(
                model,
                min_bytes=0,
                reserved_bytes=0,
                is_asleep=False,
                limit_bytes=min(
                    share_bytes,
                    max(0, whole_bytes - model.reserved_bytes),
                    self.limit_bytes(i),
                ),
            )
            for i, model in enumerate(self.models)
        )
        return replace(self, models=models, sleeps=(), total_bytes=0)


def load_trace(path: Path, capacity_bytes: int | None = None) -> Trace:
    """Read a trace from a file; `capacity_bytes` goes before what the file says.

    Raises `InvalidArgumentError`, with the path and the place in it, for whatever is no trace.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidArgumentError(f"{path}: {error.strerror}.") from error
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        raise InvalidArgumentError(f"{path}: no JSON: {error.msg} at {where}.") from error
    except (ValueError, RecursionError) as error:  # not UTF-8, a huge number, too deeply nested
        raise InvalidArgumentError(f"{path}: no JSON: {error}.") from error
    try:
        return parse_trace(document, capacity_bytes)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"{path}: {error}") from error


def parse_trace(document: object, capacity_bytes: int | None = None) -> Trace:
    """Make a trace of a decoded JSON document. Raises `InvalidArgumentError`, with the place."""
    top = _Reader(document, "the trace")
    own_capacity_bytes = top.size("capacity", capacity_bytes)
    models = tuple(_model(item, at) for item, at in top.items("models"))
    names = {model.name: i for i, model in enumerate(models)}
    arrivals: list[Arrival] = []
    for item, at in top.items("arrivals"):
        arrivals.extend(_arrivals(item, at, names, MAX_REQUESTS - len(arrivals)))
    trace = Trace(
        capacity_bytes=own_capacity_bytes if capacity_bytes is None else capacity_bytes,
        models=models,
        arrivals=tuple(sorted(arrivals, key=lambda arrival: arrival.at_ns)),
        alloc_wait_ns=top.time_ns("alloc_wait_ms", Trace.alloc_wait_ns),
        late_ns=top.time_ns("late_ms", Trace.late_ns),
        total_bytes=top.size("total", 0),
        sleeps=tuple(
            sorted(
                (_sleep(item, at, names) for item, at in top.items("sleeps", [])),
                key=lambda sleep: sleep.at_ns,
            )
        ),
    )
    top.done()
    return trace


def _model(item: object, at: str) -> ModelSpec:
    read = _Reader(item, at)
    spec = ModelSpec(
        name=read.text("name"),
        min_bytes=read.size("min", 0),
        limit_bytes=read.size("limit") if "limit" in read else None,
        priority=read.whole("priority", 0, -MAX_PRIORITY, MAX_PRIORITY),
        page_bytes=read.size("page", ModelSpec.page_bytes),
        give_back_ns=read.time_ns("give_back_ms", ModelSpec.give_back_ns),
        preempt_ns=read.time_ns("preempt_ms", ModelSpec.preempt_ns),
        reserved_bytes=read.size("reserved", 0),
        is_asleep=read.flag("asleep"),
    )
    unit_bytes = _vmm.GRANT_UNIT_BYTES
    if spec.page_bytes == 0 or spec.page_bytes % unit_bytes != 0:
        raise read.wrong("page", f"must be a multiple of {format_size(unit_bytes)}")
    if spec.give_back_ns < MIN_GIVE_BACK_NS:
        raise read.wrong("give_back_ms", f"must be at least {MIN_GIVE_BACK_NS / NS_PER_MS:g}")
    read.done()
    return spec


def _sleep(item: object, at: str, names: Mapping[str, int]) -> Sleep:
    read = _Reader(item, at)
    sleep = Sleep(at_ns=read.time_ns("at_ms"), model=read.model(names))
    read.done()
    return sleep


def _arrivals(item: object, at: str, names: Mapping[str, int], most: int) -> Iterator[Arrival]:
    """Yield one, or `count` of them, `every_ms` apart."""
    read = _Reader(item, at)
    first = Arrival(
        at_ns=read.time_ns("at_ms"),
        model=read.model(names),
        bytes=read.size("bytes"),
        hold_ns=read.time_ns("hold_ms"),
        cached_bytes=read.size("cached", 0),
        deadline_ns=read.time_ns("deadline_ms", Arrival.deadline_ns),
    )
    if first.bytes == 0:
        raise read.wrong("bytes", "must be more than 0")
    if first.cached_bytes > first.bytes:
        raise read.wrong("cached", "must not be more than bytes")
    count = read.whole("count", 1, 1, MAX_REQUESTS)
    every_ns = read.time_ns("every_ms", 0)
    read.done()
    if count > most:
        raise InvalidArgumentError(f"{at}: {_TOO_MANY}.")
    for i in range(count):
        yield replace(first, at_ns=first.at_ns + i * every_ns)


class _Reader:
    """One object of the document; every key of it must be asked for before `done()`."""

    def __init__(self, value: object, at: str) -> None:
        if not isinstance(value, dict):
            raise InvalidArgumentError(f"{at}: must be an object.")
        self._values: dict[str, Any] = value
        self._at = at
        self._known: set[str] = set()

    def __contains__(self, key: str) -> bool:
        self._known.add(key)
        return key in self._values

    def wrong(self, key: str, why: str) -> InvalidArgumentError:
        return InvalidArgumentError(f"{self._at}: {key}: {why}.")

    def done(self) -> None:
        for key in self._values:
            if key not in self._known:
                known = ", ".join(sorted(self._known))
                raise InvalidArgumentError(f"{self._at}: unknown key {key!r}; known are {known}.")

    def text(self, key: str) -> str:
        value = self._get(key)
        if not isinstance(value, str) or not value or not value.isprintable():
            raise self.wrong(key, "must be a printable text")
        return value

    def model(self, names: Mapping[str, int]) -> int:
        """The index of the model that `model` names."""
        name = self.text("model")
        if name not in names:
            raise self.wrong("model", f"no model is called {name!r}")
        return names[name]

    def flag(self, key: str) -> bool:
        """False unless given."""
        value = self._get(key, False)
        if not isinstance(value, bool):
            raise self.wrong(key, "must be true or false")
        return value

    def size(self, key: str, default: int | None = None) -> int:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise self.wrong(key, 'must be a size: a whole number of bytes, or a text like "512M"')
        try:
            return parse_size(str(value))
        except ValueError as error:
            raise InvalidArgumentError(f"{self._at}: {key}: {error}") from error

    def time_ns(self, key: str, default_ns: int | None = None) -> int:
        if default_ns is not None and key not in self:
            return default_ns
        value = self._get(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(key, "must be a number of milliseconds")
        if not 0 <= value <= MAX_MS:  # neither is nan
            raise self.wrong(key, f"must be 0 to {MAX_MS} milliseconds")
        return round(value * NS_PER_MS)

    def whole(self, key: str, default: int, least: int, most: int) -> int:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.wrong(key, f"must be a whole number from {least} to {most}")
        return value

    def items(self, key: str, default: object = None) -> list[tuple[object, str]]:
        value = self._get(key, default)
        if not isinstance(value, list):
            raise self.wrong(key, "must be a list")
        return [(item, f"{key}[{i}]") for i, item in enumerate(value)]

    def _get(self, key: str, default: object = None) -> Any:
        if key in self:
            return self._values[key]
        if default is None:
            raise InvalidArgumentError(f"{self._at}: the key {key!r} is missing.")
        return default
