"""Traces to look at with `python -m tools.reclaim_simulator --example NAME`.

Each is a document of the trace format (docs/reclaim.md), so that it can be printed, changed and
loaded again.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from tools.reclaim_simulator.trace import Trace, parse_trace

__all__ = ["EXAMPLES", "Example", "example_trace"]


@dataclass(frozen=True)
class Example:
    """One named trace."""

    what: str
    """What there is to see in it, in a line."""
    document: dict[str, Any]
    """Of the trace format."""


def example_trace(name: str, capacity_bytes: int | None = None) -> Trace:
    """Return the example of that name; `capacity_bytes` goes before its own capacity.

    Raises `InvalidArgumentError` where the capacity does not fit the example, `KeyError` for an
    unknown name.
    """
    return parse_trace(EXAMPLES[name].document, capacity_bytes)


def _bursts(model: str, first_ms: int, rounds: int, period_ms: int) -> list[dict[str, Any]]:
    """Return a burst of 24 requests a round; together they want three quarters of 8G."""
    return [
        {
            "at_ms": first_ms + i * period_ms,
            "model": model,
            "bytes": "256M",
            "hold_ms": 1500,
            "cached": "64M",
            "count": 24,
            "every_ms": 10,
        }
        for i in range(rounds)
    ]


EXAMPLES: Final = MappingProxyType(
    {
        "bursts": Example(
            "Two models take turns: each burst fits the whole device, and not a half of it.",
            {
                "capacity": "8G",
                "models": [{"name": "a"}, {"name": "b"}],
                "arrivals": _bursts("a", 0, 4, 8000) + _bursts("b", 4000, 4, 8000),
            },
        ),
        "priority": Example(
            "Batch work fills the device; a model of higher priority takes what it needs at once.",
            {
                "capacity": "8G",
                "models": [
                    {"name": "chat", "priority": 10},
                    {"name": "batch", "min": "1G"},
                ],
                "arrivals": [
                    {
                        "at_ms": 0,
                        "model": "batch",
                        "bytes": "1G",
                        "hold_ms": 3000,
                        "cached": "128M",
                        "deadline_ms": 60000,
                        "count": 24,
                        "every_ms": 50,
                    },
                    {
                        "at_ms": 2000,
                        "model": "chat",
                        "bytes": "512M",
                        "hold_ms": 800,
                        "cached": "256M",
                        "count": 20,
                        "every_ms": 200,
                    },
                ],
            },
        ),
        "two-busy": Example(
            "Two models are busy all the time and cache all they can: no page goes to and fro.",
            {
                "capacity": "4G",
                "models": [{"name": "a"}, {"name": "b"}],
                "arrivals": [
                    {
                        "at_ms": at_ms,
                        "model": model,
                        "bytes": "128M",
                        "hold_ms": 400,
                        "cached": "128M",
                        "count": 600,
                        "every_ms": 100,
                    }
                    for at_ms, model in ((0, "a"), (1000, "b"))
                ],
            },
        ),
        "equals": Example(
            "Four equals want twice the device for long: none starves.",
            {
                "capacity": "4G",
                "models": [{"name": name} for name in ("a", "b", "c", "d")],
                "arrivals": [
                    {
                        "at_ms": 250 * i,
                        "model": name,
                        "bytes": "512M",
                        "hold_ms": 1000,
                        "deadline_ms": 120000,
                        "count": 60,
                        "every_ms": 250,
                    }
                    for i, name in enumerate(("a", "b", "c", "d"))
                ],
            },
        ),
        "wakes": Example(
            "One of two models sleeps while the other one caches all it can; a request wakes it.",
            {
                "capacity": "8G",
                "models": [
                    {"name": "busy", "reserved": "1G"},
                    {"name": "rare", "reserved": "3G", "min": "1G", "asleep": True},
                ],
                "arrivals": [
                    {
                        "at_ms": 0,
                        "model": "busy",
                        "bytes": "256M",
                        "hold_ms": 400,
                        "cached": "192M",
                        "count": 200,
                        "every_ms": 150,
                    },
                    *(
                        {
                            "at_ms": at_ms,
                            "model": "rare",
                            "bytes": "512M",
                            "hold_ms": 800,
                            "count": 4,
                            "every_ms": 300,
                        }
                        for at_ms in (8000, 20000)
                    ),
                ],
                "sleeps": [{"at_ms": 10000, "model": "rare"}, {"at_ms": 23000, "model": "rare"}],
            },
        ),
        "slow-victim": Example(
            "The idlest instance is stopped and never answers in time: the next one is asked.",
            {
                "capacity": "6G",
                "models": [
                    {"name": "busy"},
                    {"name": "stopped", "give_back_ms": 10000},
                    {"name": "idle"},
                ],
                "arrivals": [
                    {"at_ms": 0, "model": "stopped", "bytes": "3G", "hold_ms": 50, "cached": "3G"},
                    {"at_ms": 100, "model": "idle", "bytes": "3G", "hold_ms": 50, "cached": "3G"},
                    {
                        "at_ms": 1000,
                        "model": "busy",
                        "bytes": "256M",
                        "hold_ms": 1000,
                        "count": 8,
                        "every_ms": 100,
                    },
                ],
            },
        ),
    }
)
"""By name."""
