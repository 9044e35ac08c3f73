"""What is wrong with this machine, for kvelastic: look, judge, advise.

    facts = gather()                 # the effects: /proc, /sys, packages, a child for the GPUs
    for finding in judge(facts):     # pure
        print(finding.state, finding.check, finding.what, finding.do)

`kvctl doctor` is the command (docs/doctor.md lists every check). Nothing is changed: dead segments
are named, not removed.
"""

from __future__ import annotations

from kvelastic.doctor.finding import Finding
from kvelastic.doctor.gather import gather
from kvelastic.doctor.judge import judge

__all__ = ["Finding", "gather", "judge"]
