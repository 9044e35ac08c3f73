"""From facts to findings: pure, in the order in which they are shown.

Every check gives at least one finding, also where all is well; docs/doctor.md lists them.
"""

from __future__ import annotations

from itertools import chain

from kvelastic.doctor.facts import Facts
from kvelastic.doctor.finding import Finding
from kvelastic.doctor.judge_config import config_findings
from kvelastic.doctor.judge_engines import engine_findings, python_findings
from kvelastic.doctor.judge_gpu import gpu_findings
from kvelastic.doctor.judge_host import host_findings, limit_findings
from kvelastic.doctor.judge_instances import instance_findings
from kvelastic.doctor.judge_shm import (
    ledger_findings,
    permission_findings,
    segment_findings,
    shm_findings,
)


def judge(facts: Facts) -> list[Finding]:
    """What there is to say of `facts`."""
    return list(
        chain(
            gpu_findings(facts),
            host_findings(facts),
            limit_findings(facts),
            shm_findings(facts),
            segment_findings(facts),
            ledger_findings(facts),
            instance_findings(facts),
            permission_findings(facts),
            config_findings(facts),
            engine_findings(facts),
            python_findings(facts),
        )
    )
