"""Findings: what is wrong with this machine, and why an instance holds what it holds.

    facts = gather()                 # the effects: /proc, /sys, packages, a child for the GPUs
    for finding in judge(facts):     # pure
        print(finding.state, finding.check, finding.what, finding.do)

`kvctl doctor` and `kvctl explain` are the commands (docs/doctor.md lists every check). Nothing is
changed: dead segments are named, not removed.
"""
