"""Findings about this machine and its instances.

    facts = gather()                 # I/O: /proc, /sys, packages, a child for the GPUs
    for finding in judge(facts):     # pure
        print(finding.state, finding.check, finding.what, finding.do)

The commands are `kvctl doctor` and `kvctl explain` (docs/doctor.md lists every check). They change
nothing: dead segments are reported, not removed.
"""
