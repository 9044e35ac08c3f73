"""The outcome of a request to an instance: one verdict for all user interfaces.

    ack = segment.request("kvelastic_vLLM_4711", limit_bytes=8 << 30, wait_s=5.0)
    outcome_of(Request(limit_bytes=8 << 30), ack).verdict     # Verdict.APPLIED

Pure: the result depends only on the arguments. How a verdict follows from an acknowledgement::

    no reply ------------------------------------> PENDING, or UNKNOWN
    the memory behind it has failed -------------> FAILED
    a reply to a later request ------------------> OVERTAKEN
    refused -------------------------------------> REFUSED
    replied, but another value is in force ------> NOT_TAKEN
    memory must still be released ---------------> SHRINKING
    in force when it wakes ----------------------> ASLEEP
    in force ------------------------------------> APPLIED
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

from kvelastic.instance.status import UNLIMITED_BYTES
from kvelastic.shared.segment import Ack, Request


class Verdict(str, Enum):
    """The verdict on a request; the values are used by the REST interface."""

    APPLIED = "applied"
    ASLEEP = "asleep"
    SHRINKING = "shrinking"
    PENDING = "pending"
    UNKNOWN = "unknown"
    OVERTAKEN = "overtaken"
    REFUSED = "refused"
    NOT_TAKEN = "not_taken"
    FAILED = "failed"


HOLDS: Final = frozenset({Verdict.APPLIED, Verdict.ASLEEP})
"""The request holds, now or when the instance wakes."""
MAY_HOLD: Final = frozenset({Verdict.SHRINKING, Verdict.PENDING, Verdict.UNKNOWN})
"""The request may still come to hold. With every other verdict it never will."""


@dataclass(frozen=True)
class Outcome:
    """A verdict and the values it is based on."""

    verdict: Verdict
    reason: str = ""
    """Why the request was refused or the memory has failed."""
    beyond_device_bytes: int = 0
    """Excess of the requested limit over the device's capacity; 0 if it is within."""
    engine_asleep: bool = False
    """True if the instance was woken but its engine still sleeps, so its requests wait."""


def outcome_of(request: Request, ack: Ack) -> Outcome:
    """Return the outcome of a request, from the instance's acknowledgement."""
    beyond_bytes = 0
    if request.limit_bytes is not None and request.limit_bytes != UNLIMITED_BYTES:
        beyond_bytes = max(0, request.limit_bytes - ack.capacity_bytes)
    return Outcome(
        _verdict(request, ack),
        ack.reason,
        beyond_bytes if ack.capacity_bytes else 0,
        request.asleep is False and bool(ack.engine_asleep),
    )


def _verdict(request: Request, ack: Ack) -> Verdict:
    if ack.state == "none":
        return Verdict.UNKNOWN if ack.is_unknown else Verdict.PENDING
    # The sleep state is visible even if another request came later.
    is_sleep_so = request.asleep is not None and request.asleep == ack.asleep
    verdict = Verdict.APPLIED
    if ack.state == "failed":
        verdict = Verdict.FAILED
    elif not (ack.is_of_the_request or is_sleep_so or request.trim):
        verdict = Verdict.OVERTAKEN
    elif ack.state == "refused" and ack.is_of_the_request and not is_sleep_so:
        verdict = Verdict.REFUSED
    elif not _is_taken(request, ack):
        verdict = Verdict.NOT_TAKEN
    elif ack.state == "shrinking":
        verdict = Verdict.SHRINKING
    elif ack.asleep and request.asleep is None:
        verdict = Verdict.ASLEEP
    return verdict


def _is_taken(request: Request, ack: Ack) -> bool:
    """Return True if guarantee, priority and sleep are as requested.

    The state `applied` covers the limit only.
    """
    return (
        request.min_bytes in {None, ack.min_bytes}
        and request.priority in {None, ack.priority}
        and request.asleep in {None, ack.asleep}
    )
