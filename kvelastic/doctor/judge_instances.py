"""The instances that run here: requests that can never run, and tiers that fail."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from kvelastic.doctor.facts import Facts
from kvelastic.doctor.finding import Finding

_NONE: Final = {
    "instances.waiting": "no request needs more than its limit allows",
    "instances.tiers": "no tier of an instance fails",
}


def instance_findings(facts: Facts) -> Iterator[Finding]:
    """`instances.*`; one finding for each instance, or tier, that is not well."""
    for check, nothing in _NONE.items():
        troubles = [trouble for trouble in facts.troubles if trouble.check == check]
        if not troubles:
            yield Finding(check, "ok", nothing, "")
        for trouble in troubles:
            yield Finding(check, "problem", f"{trouble.name}: {trouble.what}", trouble.do)
