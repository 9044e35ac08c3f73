"""Turns facts into findings, in display order. Pure functions.

Each check returns at least one finding, even if there is no problem; docs/doctor.md lists them.
"""

from __future__ import annotations

from kvelastic.doctor import (
    judge_config,
    judge_engines,
    judge_gpu,
    judge_host,
    judge_instance,
    judge_shm,
)
from kvelastic.doctor.facts import Facts
from kvelastic.doctor.finding import Finding


def judge(facts: Facts) -> list[Finding]:
    """Return the findings for `facts`."""
    checks = (
        *judge_gpu.CHECKS,
        *judge_host.CHECKS,
        *judge_shm.CHECKS,
        *judge_instance.CHECKS,
        *judge_shm.PERMISSIONS,
        *judge_config.CHECKS,
        *judge_engines.CHECKS,
    )
    return [finding for check in checks for finding in check(facts)]
