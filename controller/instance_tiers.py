"""Tiers of instances, as the controller changes them: requests on their boards, nothing else.

What tiers keep is in the rows of `instance_memory`. `ask` waits for an answer, so it runs in a
thread.
"""

from __future__ import annotations

from typing import Any

from kvelastic import segment, tier_board
from kvelastic.controller.refusal import Refusal
from kvelastic.tier_board_format import TierRequest


def ask(name: str, request: TierRequest, wait_s: float) -> dict[str, Any]:
    """Ask something of an instance's tiers; blocks for up to `wait_s`.

    `state` is done, refused, failed or pending (no answer yet; the request stays), and `records`
    how many were erased (clear, erase) or are held (the others), by tier. Raises `Refusal` (404)
    for a tier that it does not have, and as `tier_board.ask`.
    """
    info = segment.inspect(name)
    board = tier_board.read(info)
    tiers = [] if board is None else [one.tier for one in board.tiers]
    if board is not None and request.tier and request.tier not in tiers:
        raise Refusal(
            404,
            "tier_not_found",
            f"{name!r} has no tier {request.tier[:100]!r}; it has {', '.join(tiers)}.",
            param="tier",
        )
    answer = tier_board.ask(info, request, wait_s)
    if answer is None:
        return {"state": "pending", "records": {}, "reason": ""}
    return {
        "state": answer.state,
        "records": dict(zip(tiers, answer.counts, strict=False)),
        "reason": answer.reason,
    }
