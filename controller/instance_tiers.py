"""Tiers of instances, as the controller changes them: requests in their status files, nothing else.

What tiers keep is in the rows of `instance_memory`. A store may hang, so an answer is waited for on
the loop: threads are few, and the end of the controller waits for them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from kvelastic import segment, tier_status
from kvelastic.controller.refusal import Refusal
from kvelastic.status_file import POLL_S, Asked
from kvelastic.tier_status import TierAnswer, TierRequest


async def ask(
    name: str, request: TierRequest, wait_s: float, is_over: Callable[[], bool]
) -> dict[str, Any]:
    """Ask something of an instance's tiers; wait for an answer for `wait_s`, or until `is_over`.

    `state` is done, refused, failed or pending (no answer yet; the request stays), and `records`
    how many were erased (clear, erase) or are held (the others), by tier. Raises `Refusal` (404)
    for a tier that it does not have, and as `tier_status.ask`.
    """
    tiers, asked = await asyncio.to_thread(_post, name, request)
    deadline_s = time.monotonic() + wait_s
    with asked:
        while True:
            answer = asked.look()
            if answer is not None or asked.is_lost:
                break
            if time.monotonic() >= deadline_s or is_over():
                break
            await asyncio.sleep(POLL_S)
    if answer is None:
        return {"state": "pending", "records": {}, "reason": ""}
    return {
        "state": answer.state,
        "records": dict(zip(tiers, answer.counts, strict=False)),
        "reason": answer.reason,
    }


def _post(name: str, request: TierRequest) -> tuple[list[str], Asked[TierAnswer]]:
    info = segment.inspect(name)
    shown = tier_status.read(info)
    tiers = [] if shown is None else [one.tier for one in shown.tiers]
    if shown is not None and request.tier and request.tier not in tiers:
        raise Refusal(
            404,
            "tier_not_found",
            f"{name!r} has no tier {request.tier[:100]!r}; it has {', '.join(tiers)}.",
            param="tier",
        )
    return tiers, tier_status.post(info, request)
