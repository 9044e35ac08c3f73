"""What a simulation of reclaim comes to: figures of each model, and every move of memory.

result.moved_bytes, result.models[0].wait_ns(99), result.as_dict()
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from tools.reclaim_simulator import Depth


@dataclass
class ModelResult:
    """What became of one model's requests and memory."""

    name: str
    requests: int = 0
    served: int = 0
    """All that were served, the late ones among them."""
    late: int = 0
    """Served, after more than the trace's `late_ns`."""
    refused: int = 0
    """Never served: the deadline passed, or the limit is too small."""
    preempted: int = 0
    """How often a request was preempted and had to begin again."""
    waits_ns: list[int] = field(default_factory=list)
    """Of the served ones, in the order in which they ended."""
    got_bytes_from: dict[str, int] = field(default_factory=dict)
    """By victim: what that one gave back because this model had asked."""
    peak_granted_bytes: int = 0
    cached_lost_bytes: int = 0
    """Evicted because others asked."""
    cached_evicted_bytes: int = 0
    """Evicted for its own requests."""
    wakes_ns: list[int] = field(default_factory=list)
    """How long each wake took: until its guarantee and reserve were there."""
    wakes_refused: int = 0
    """The sums did not allow it, or others did not give its reserve in time."""

    def wait_ns(self, percent: int) -> int | None:
        """Return the wait that `percent` of the served requests did not exceed; None: none was."""
        waits_ns = sorted(self.waits_ns)
        if not waits_ns:
            return None
        return waits_ns[max(0, -(-len(waits_ns) * percent // 100) - 1)]


@dataclass
class Move:
    """Memory that one instance gave back for another."""

    at_ns: int
    victim: int
    requester: int
    bytes: int
    depth: Depth


@dataclass
class SimulationResult:
    """What became of all."""

    models: list[ModelResult]
    moves: list[Move]
    end_ns: int = 0
    """When the last request was done with."""

    @property
    def moved_bytes(self) -> int:
        """All that was given back because somebody asked."""
        return sum(move.bytes for move in self.moves)

    def as_dict(self) -> dict[str, Any]:
        """Return the figures as plain values for JSON (docs/reclaim.md); waits as percentiles."""
        models = []
        for model in self.models:
            values = asdict(model)
            del values["waits_ns"], values["wakes_ns"]
            derived = {
                "wait_p50_ns": model.wait_ns(50),
                "wait_p99_ns": model.wait_ns(99),
                "wakes": len(model.wakes_ns),
                "wake_longest_ns": max(model.wakes_ns, default=None),
            }
            models.append(values | derived)
        return {"end_ns": self.end_ns, "moved_bytes": self.moved_bytes, "models": models}
