"""A tiny instance: owns a segment and answers requests by the binding, with no memory behind it.

As a program: `segment_owner.py NAME MODE`, NAME `-` for the automatic one. It prints `ready NAME`
and lives until its stdin closes. As a module, for tests:

    with Owner("some_name", "apply") as owner: owner.kill(); segment.reap()
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from processes import LineProgram
from waiting import DEADLINE_S

CAPACITY_BYTES = 4 << 30
MAPPED_BYTES = 96 << 20
MODES = {
    "apply": "answers every request: applied",
    "late": "shrinking at first, applied at the next look",
    "shrink": "shrinking for ever",
    "refuse": "refuses every request",
    "mute": "never answers",
    "publish": "never answers, and publishes usage as fast as it can",
    "fork": "forks a child that closes the segment and exits, then behaves as apply",
}


_ENGINE_CORE = """
import sys
from kvelastic.shared import segment
with segment.create(sys.argv[1], engine="vLLM"):
    print("ready", flush=True)
    sys.stdin.read()
"""


def engine_core(name: str, *, has_server: bool) -> LineProgram:
    """A process that is called as vLLM's engine core and has the segment, until its stdin closes.

    Without a server its parent is a shell, in the place of init: another program than it.
    """
    if has_server:
        core = LineProgram("-c", _ENGINE_CORE, name, "VLLM::EngineCore")
    else:
        command = ("-c", '"$0" -c "$@"; exit $?', sys.executable, _ENGINE_CORE)
        core = LineProgram(*command, name, "VLLM::EngineCore", python="/bin/sh")
    assert core.read() == "ready"
    return core


def until_replied(name: str, **wanted: Any) -> dict[str, Any]:
    """Make a request of an instance, wait for the first answer to it and return that."""
    from kvelastic.shared import segment

    revision = segment.request(name, wait_s=0, **wanted).requested_revision
    with segment.open_readonly(name) as seen:
        assert seen.control_block.wait_ack(revision, DEADLINE_S)
        return seen.control_block.read_ack()


class Owner(LineProgram):
    """An owner process under the control of a test."""

    def __init__(self, name: str, mode: str = "apply") -> None:
        super().__init__(__file__, name, mode)
        word, self.name = self.read().split()
        assert word == "ready"
        self.path = Path("/dev/shm") / self.name

    end = LineProgram.finish

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.path.unlink(missing_ok=True)


def main() -> None:
    import threading

    from kvelastic.shared import segment

    name, mode = sys.argv[1:]
    assert mode in MODES, mode
    mine = segment.create(None if name == "-" else name, engine="test", model="none", device="host")
    control_block = mine.control_block
    usage = {
        "capacity_bytes": CAPACITY_BYTES,
        "mapped_bytes": MAPPED_BYTES,
        "in_use_bytes": 64 << 20,
        "cached_bytes": 16 << 20,
        "parked_bytes": 16 << 20,
        "page_bytes": 2 << 20,
        "limit_bytes": CAPACITY_BYTES,
    }
    control_block.publish_usage(**usage)
    control_block.publish_ack(
        0, "applied", effective_limit_bytes=CAPACITY_BYTES, mapped_bytes=MAPPED_BYTES
    )
    if mode == "fork":
        child = os.fork()
        if child == 0:
            mine.close()
            sys.exit(0)  # with atexit handlers, as an engine's child may
        os.waitpid(child, 0)

    def serve() -> None:
        answered, limit_bytes = 0, CAPACITY_BYTES
        while True:
            seen = control_block.bell
            request = control_block.owner_request()
            if mode not in {"mute", "publish"} and request and request["revision"] != answered:
                answered, requested = request["revision"], request["limit_bytes"]
                states = {"late": ["shrinking", "applied"], "shrink": ["shrinking"]}.get(
                    mode, ["refused"] if mode == "refuse" else ["applied"]
                )
                if mode != "refuse" and requested is not None:
                    limit_bytes = requested
                    control_block.publish_usage(**usage | {"limit_bytes": requested})
                for state in states:
                    over_bytes = max(0, MAPPED_BYTES - limit_bytes) if state == "shrinking" else 0
                    mapped_bytes = MAPPED_BYTES if over_bytes else min(MAPPED_BYTES, limit_bytes)
                    control_block.publish_ack(
                        answered,
                        state,
                        effective_limit_bytes=limit_bytes,
                        mapped_bytes=mapped_bytes,
                        over_bytes=over_bytes,
                        reason="it is only a test" if state == "refused" else "",
                    )
            if mode == "publish":
                control_block.measure_publish_ns(100_000)
            else:
                control_block.wait_bell(seen, None)

    threading.Thread(target=serve, daemon=True).start()
    print("ready", mine.name, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
