"""An instance with the values that a test wants to see on a screen, and no memory behind it.

As a program: `shown_instance.py NAME JSON`, with `engine`, `model`, `device`, `usage` (fields of
the record), and optionally `limit_bytes`, the limit in force, and `tiers` (fields of
`TierStatus`, each an object), for which it has a status file. Each line on stdin is JSON of the
same kind: `usage` is published, `counters` are added. It answers no request, prints a line for
each thing done, and lives until its stdin closes. As a module, for tests:

    with Shown("name", device="GPU-1", ...) as shown: shown.say(counters={"pages_mapped": 9})
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from processes import LineProgram


class Shown(LineProgram):
    """Such a process under the control of a test."""

    def __init__(self, name: str, **facts: object) -> None:
        self.name = name
        super().__init__(__file__, name, json.dumps(facts))
        assert self.read() == "ready"

    def say(self, **facts: object) -> None:
        """Have it publish, and return when it has."""
        assert self.ask(json.dumps(facts)) == "done"

    def __exit__(self, *_: object) -> None:
        self.kill()
        from kvelastic.shared import segment

        segment.reap()  # the status file of its tiers, too
        (Path("/dev/shm") / self.name).unlink(missing_ok=True)


def main() -> None:
    from kvelastic.shared import segment

    name, facts = sys.argv[1], json.loads(sys.argv[2])
    mine = segment.create(
        name, engine=facts["engine"], model=facts["model"], device=facts["device"]
    )
    record = mine.control_block
    usage = dict(facts["usage"])
    usage.setdefault("limit_bytes", facts.get("limit_bytes", usage["capacity_bytes"]))
    record.publish_usage(**usage)
    record.publish_ack(
        0,
        "applied",
        effective_limit_bytes=facts.get("limit_bytes", usage["capacity_bytes"]),
        mapped_bytes=usage["mapped_bytes"],
    )
    if "tiers" in facts:
        from kvelastic.shared.segment_listing import tier_status_name
        from kvelastic.shared.status_file import StatusFile
        from kvelastic.shared.tier_status import KIND, BlockCounts, TiersStatus, TierStatus

        tiers = tuple(TierStatus(**tier) for tier in facts["tiers"])
        name = tier_status_name(record.read_header()["uuid"])
        status = StatusFile.create(name, KIND)
        status.publish(TiersStatus(1, 0, "write_back", BlockCounts(*range(11)), tiers))
    print("ready", flush=True)
    for line in sys.stdin:
        more = json.loads(line)
        usage |= more.get("usage", {})
        record.publish_usage(**usage)
        for counter, amount in more.get("counters", {}).items():
            record.add_counter(counter, amount)
        print("done", flush=True)


if __name__ == "__main__":
    main()
