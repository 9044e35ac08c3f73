"""What an instance cannot do, in words: the same for `kvctl explain` and `kvctl doctor`.

    waiting_trouble(status)      # None: no request waits, or the engine does not report it
    tier_trouble(tier)           # None: it works

Pure: it looks at nothing but its arguments.
"""

from __future__ import annotations

from typing import NamedTuple

from kvelastic.instance.status import InstanceStatus
from kvelastic.sizes import format_pages, format_size, size_argument, whole_pages
from kvelastic.tier_board_format import TierFigures


class Trouble(NamedTuple):
    """What is so, and what to do about it (may be empty)."""

    what: str
    do: str


def waiting_trouble(status: InstanceStatus) -> Trouble | None:
    """Say how many requests wait, what the first needs, what is allowed, and what helps."""
    count = status.requests_waiting
    if not count:
        return None
    requests = "1 request waits" if count == 1 else f"{count} requests wait"
    if status.asleep:
        return Trouble(f"{requests} until it is woken.", f"kvctl wake {status.name}")
    needs_bytes, page_bytes = status.first_needs_bytes, status.page_bytes
    if not needs_bytes:
        return Trouble(f"{requests} for memory until requests that run end.", "")
    needs = f"The first needs {format_pages(needs_bytes, page_bytes)}"
    if not status.is_limit_too_low:
        return Trouble(
            f"{requests} for memory. {needs}, which its limit allows: it runs when requests end, or"
            " other instances give memory back.",
            "",
        )
    allowed = format_pages(status.allowed_bytes, page_bytes)
    device_bytes = whole_pages(status.capacity_bytes, page_bytes)
    if needs_bytes > device_bytes:
        return Trouble(
            f"{requests} for memory. {needs}, and its device has"
            f" {format_size(status.capacity_bytes)}: no limit lets it run.",
            f"kvctl capacity {status.device} SIZE with {size_argument(needs_bytes)} or more, if the"
            " machine has it; or have the client shorten the prompt",
        )
    may_bytes = min(status.first_may_need_bytes, device_bytes)
    grows = ""
    if may_bytes > needs_bytes:
        grows = f" With the longest answer it needs {format_size(may_bytes)}."
    return Trouble(
        f"{requests} for memory. {needs}, and its limit allows {allowed}: it waits until the limit"
        f" is raised.{grows}",
        f"kvctl limit {status.name} {size_argument(max(needs_bytes, may_bytes))}",
    )


def tier_trouble(tier: TierFigures) -> Trouble | None:
    """Say why a tier does not do what it should."""
    failed = f"{tier.errors} call{'' if tier.errors == 1 else 's'} to it failed"
    if tier.state == "ok":
        return None
    if tier.state == "failing":
        return Trouble(
            f"{tier.tier} is failing: {tier.problem}. {failed}.",
            f"mend the medium of {tier.tier}; it is tried again by itself, after a minute at most",
        )
    return Trouble(
        f"{tier.tier} does not answer, and is not used until it does. {failed}.",
        f"look at the medium of {tier.tier}",
    )
