"""What native threads log: requests from outside, and at DEBUG layouts, pages, grants and asks."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from contextlib import suppress
from typing import Any

import pytest
from processes import PROGRAMS
from segment_owner import until_replied
from waiting import wait_until

from kvelastic.shared import segment

PROGRAM = str(PROGRAMS / "ledger_instance.py")
ENVIRON = {
    "KVELASTIC_HOST_MEMORY": "64M",
    "KVELASTIC_PAGE_PREALLOC_ENABLED": "false",
    "KVELASTIC_IDLE_TRIM_SECONDS": "3600",
    "KVELASTIC_RECLAIM_WAIT": "300",
}
MIB = 1 << 20


class Logged:
    """An instance whose stderr is kept."""

    def __init__(self, level: str, **environ: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ
            | ENVIRON
            | environ
            | {"KVELASTIC_LOG_LEVEL": level, "KVELASTIC_LEDGER": f"debug_{os.getpid()}"},
        )
        self.name = self._read()["name"]

    def _read(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def ask(self, *command: Any) -> Any:
        assert self.process.stdin is not None
        print(json.dumps(command), file=self.process.stdin, flush=True)
        return self._read()

    def end(self) -> str:
        _, log = self.process.communicate()
        return log or ""

    def __enter__(self) -> Logged:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.communicate()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()


@pytest.mark.slow
def test_debug_log_reports_memory_events_as_single_lines() -> None:
    with Logged("DEBUG") as one, Logged("DEBUG", KVELASTIC_PRIORITY="1") as two:
        ids = one.ask("alloc", 100)
        one.ask("cache", ids)
        assert two.ask("alloc", 60)  # for which the first one has to give
        answer = until_replied(two.name, limit_bytes=2 * MIB, priority=3)
        assert answer["state"] == "shrinking"
        until_replied(two.name, limit_bytes=1 << 40, min_bytes=1 << 40)
        until_replied(two.name, asleep=True)
        until_replied(two.name, asleep=False)
        two.ask("clear")
        first, second = one.end(), two.end()
    head = r"(DEBUG|INFO) \d\d-\d\d \d\d:\d\d:\d\d \[kvelastic \d+\] \S"
    assert [line for line in (first + second).splitlines() if not re.match(head, line)] == []
    for said in (
        r"layout: PageLayout\(block_bytes=524288.*; 4096 pages of 2.00 MiB, 4 blocks in each",
        rf"instance {one.name}: on host, of which instances may hold 64.00 MiB; limit none",
        r"ledger: granted \d+.00 MiB of \d+.00 MiB; \d+.00 MiB are granted now",
        r"pages: mapped \d+ of 2.00 MiB; \d+ are mapped",
        r"ledger: reclaim request for .* MiB, released .* MiB",
        r"pages: unmapped \d+ of 2.00 MiB; \d+ are mapped",
    ):
        assert re.search(said, first), said
    for said in (
        r"ledger: requests \d+.00 MiB from others",
        rf"ledger: reclaim request to process {one.process.pid}: \d+.00 MiB",
        rf"request 1: limit 2.00 MiB, priority 3, by process {os.getpid()}\n",
        r"request 1: shrinking; keeps to 2.00 MiB, .* are mapped, .* over",
        r"request 2: limit 1.00 TiB, guarantee 1.00 TiB, by process \d+\n",
        r"request 2: refused; .*: .*1.00 TiB",
        r"request 3: sleep, by process \d+\n",
        r"request 4: wake, by process \d+\n",
    ):
        assert re.search(said, second), said


def test_info_log_reports_each_request_and_its_outcome() -> None:
    me = f"by process {os.getpid()}"
    with Logged("INFO") as one:
        ids = one.ask("alloc", 10)  # four in a page, and the null block: three pages
        until_replied(one.name, limit_bytes=5 * MIB)
        one.ask("free", ids)
        wait_until(lambda: segment.inspect(one.name).ack["state"] == "applied")
        until_replied(one.name, asleep=True)
        until_replied(one.name, asleep=False, trim=True)
        until_replied(one.name, limit_bytes=1 << 40, min_bytes=1 << 40)
        lines = one.end().splitlines()
    head = r"INFO \d\d-\d\d \d\d:\d\d:\d\d \[kvelastic \d+\] Request "
    ms = r"after \d+\.\d ms\. "
    allowed = r"4\.00 MiB allowed \(2 pages of 2\.00 MiB\), "
    expected = [
        rf"\(limit 5\.00 MiB, {me}\): shrinking {ms}{allowed}6\.00 MiB of KV cache held, of"
        r" which 2\.00 MiB are in use\.",
        rf"\(limit 5\.00 MiB, {me}\): applied {ms}{allowed}4\.00 MiB of KV cache held\.",
        rf"\(sleep, {me}\): applied {ms}0 B allowed \(0 pages of 2\.00 MiB\), 0 B of KV cache"
        r" held\.",
        rf"\(wake, trim, {me}\): applied {ms}{allowed}0 B of KV cache held\.",
        rf"\(limit 1\.00 TiB, guarantee 1\.00 TiB, {me}\): refused {ms}{allowed}.*: no room for"
        r" 1\.00 TiB guaranteed.*\.",
    ]
    assert len(lines) == len(expected), lines
    for line, wanted in zip(lines, expected, strict=True):
        assert re.fullmatch(head + wanted, line), (line, wanted)


def test_log_is_empty_at_warning_level() -> None:
    with Logged("WARNING") as one:
        ids = one.ask("alloc", 10)
        until_replied(one.name, limit_bytes=MIB)
        one.ask("free", ids)
        assert one.end() == ""


MAPS = """
import sys
from kvelastic import _vmm

_vmm.set_log_level(10)
PAGE = 2 << 20
memory = _vmm.Range.reserve(
    _vmm.HostDriver(),
    _vmm.Geometry(
        pages=8,
        extent_bytes=PAGE,
        block_bytes=PAGE,
        blocks_per_page=1,
        extents_per_page=1,
        extent_stride_bytes=8 * PAGE,
    ),
)
memory.map([0])
memory.map([1])
print("mapped", flush=True)
sys.stdin.read(1)
memory.map([2])
"""


def test_full_log_pipe_does_not_block_the_pool() -> None:
    read_end, write_end = os.pipe()
    filled = 0
    os.set_blocking(write_end, False)
    with suppress(BlockingIOError):
        while True:
            filled += os.write(write_end, bytes(4096))
    os.set_blocking(write_end, True)
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", MAPS],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=write_end,
        )
    finally:
        os.close(write_end)
    with process, os.fdopen(read_end, "rb") as log:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == b"mapped\n", "it waits for whoever reads its log"
        assert len(log.read(filled)) == filled
        process.stdin.write(b"x")
        process.stdin.close()
        rest = log.read()
    assert b"(2 lines dropped) pages: mapped 1 of 2.00 MiB; 3 are mapped" in rest
