"""The outcome of a request as text, for kvctl and kvtop.

text = outcome_text("kvelastic_vLLM_4711", request, outcome_of(request, ack), ack)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvelastic.instance.outcome import Outcome, Verdict
from kvelastic.instance.row import printable
from kvelastic.instance.status import UNLIMITED_BYTES
from kvelastic.units import format_pages, format_size, whole_pages

if TYPE_CHECKING:
    from kvelastic.shared.segment import Ack, Request


ENGINE_SLEEPS: Final = (
    "but its engine sleeps, and requests wait until that is woken (vLLM's /wake_up, or the"
    " controller)"
)


def request_text(request: Request, *, exact: bool = True) -> str:
    """Return the request as text: `limit 8.00 GiB (8589934592 bytes), priority 3`.

    Without `exact` the bytes are omitted, for a narrow screen.
    """
    size = _exact if exact else format_size
    parts = []
    if request.limit_bytes == UNLIMITED_BYTES:
        parts.append("no limit")
    elif request.limit_bytes is not None:
        parts.append(f"limit {size(request.limit_bytes)}")
    if request.min_bytes is not None:
        parts.append(f"guarantee {size(request.min_bytes)}")
    if request.priority is not None:
        parts.append(f"priority {request.priority}")
    if request.asleep is not None:
        parts.append("sleep" if request.asleep else "wake")
    if request.trim:
        parts.append("trim")
    return ", ".join(parts)


def outcome_text(
    name: str, request: Request, outcome: Outcome, ack: Ack, *, exact: bool = True
) -> str:
    """Return one sentence without a full stop. The caller must make `name` printable."""
    if outcome.verdict is Verdict.FAILED:
        return f"{name} has failed: {printable(outcome.reason)}"
    beyond, in_force = _beyond(outcome, ack), _in_force(request, ack)
    beyond += _in_pages(request, ack)
    over, mapped = format_size(ack.over_bytes), format_size(ack.mapped_bytes)
    engine = f"; {ENGINE_SLEEPS}" if outcome.engine_asleep else ""
    also = "it is asleep, and " if ack.asleep and request.asleep is None else ""
    said = {
        Verdict.PENDING: "requested; no reply yet",
        Verdict.UNKNOWN: "requested; no reply yet, and whether its process lives cannot be asked"
        " here",
        Verdict.OVERTAKEN: f"was replaced by a later request; {in_force}",
        Verdict.REFUSED: f"refused: {printable(outcome.reason)}",
        Verdict.NOT_TAKEN: f"not taken by the instance; {in_force}",
        Verdict.SHRINKING: f"accepted{beyond}; {also}{over} are still to be given back",
        Verdict.ASLEEP: f"applied{beyond}; it is asleep{_until(name, ack)}",
        Verdict.APPLIED: f"applied{beyond}; {mapped} are mapped{engine}",
    }
    return f"{name}: {request_text(request, exact=exact)} {said[outcome.verdict]}"


def _beyond(outcome: Outcome, ack: Ack) -> str:
    if not outcome.beyond_device_bytes:
        return ""
    return f", but its device has only {format_size(ack.capacity_bytes)}"


def _until(name: str, ack: Ack) -> str:
    if not ack.engine_asleep:
        return f" until `kvctl wake {name}`"
    return (
        ", and so is its engine: waking that (the controller, or vLLM's /wake_up) wakes both, and"
        f" `kvctl wake {name}` alone is not enough"
    )


def _in_pages(request: Request, ack: Ack) -> str:
    """Return limit and guarantee in whole pages, if they differ from the request."""
    parts = []
    if request.limit_bytes is not None and request.limit_bytes <= ack.capacity_bytes:
        parts.append(_whole("the limit", request.limit_bytes, ack.page_bytes))
    if request.min_bytes:
        parts.append(_whole("the guarantee", request.min_bytes, ack.page_bytes))
    parts = [part for part in parts if part]
    return f"; in whole pages {', '.join(parts)}" if parts else ""


def _whole(what: str, asked_bytes: int, page_bytes: int) -> str:
    allowed_bytes = whole_pages(asked_bytes, page_bytes)
    if allowed_bytes > asked_bytes:
        return f"{what} is {format_size(allowed_bytes)} (1 page, which is the least)"
    if allowed_bytes < asked_bytes:
        return f"{what} is {format_pages(allowed_bytes, page_bytes)}"
    return ""


def _in_force(request: Request, ack: Ack) -> str:
    """Return the values in force for the requested settings."""
    parts = []
    if request.limit_bytes is not None:
        parts.append(f"the limit is {format_size(ack.limit_bytes)}")
    if request.min_bytes is not None:
        parts.append(f"the guarantee is {format_size(ack.min_bytes)}")
    if request.priority is not None:
        parts.append(f"the priority is {ack.priority}")
    if request.asleep is not None:
        parts.append(f"it is {'asleep' if ack.asleep else 'awake'}")
    return ", ".join(parts)


def _exact(size_bytes: int) -> str:
    return f"{format_size(size_bytes)} ({size_bytes} bytes)"
