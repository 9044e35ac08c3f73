"""Nodes and links as objects for programs: the schema of `kvctl links --json` and of `/links`."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

import msgspec

from kvelastic.link_board_format import NodeFigures


def object_of(node: NodeFigures) -> dict[str, Any]:
    """The figures as they are, times as text (UTC), and the sums of bytes in and out.

    Ids have 64 bits; `name` and `peer_name` are the same as text, for readers whose numbers do not.
    """
    found: dict[str, Any] = {"name": str(node.node_id), **msgspec.structs.asdict(node)}
    del found["answered_revision"]
    found["addresses"] = list(node.addresses)
    for name in ("published", "started"):
        found[name] = utc(found.pop(f"{name}_realtime_ns"))
    found["links"] = [
        {
            **{
                name: value
                for name, value in msgspec.structs.asdict(link).items()
                if name != "since_realtime_ns"
            },
            "peer_name": str(link.peer_id),
            "since": utc(link.since_realtime_ns),
            "in_bytes": link.in_bytes,
            "out_bytes": link.out_bytes,
        }
        for link in node.links
    ]
    return found


def utc(realtime_ns: int) -> str | None:
    """A time as text; None for one that no calendar has."""
    try:
        return datetime.fromtimestamp(realtime_ns / 1e9, tz=timezone.utc).isoformat()
    except (OverflowError, ValueError, OSError):
        return None
