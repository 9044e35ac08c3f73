"""A worker process: serves a segment's ring on a range of its own, under the control of a test.

    with Worker(segment_name, "paged", pages=8, rank=1) as worker:
        worker.ask("arm 3 1"); worker.kill()

As a program: `ring_worker.py SEGMENT LAYOUT PAGES [RANK]`. It prints `ready`, or `refused CODE` and
why, and then answers each line of its stdin with one line:

    arm FIRST COUNT   fail the FIRST-th driver call from now on and COUNT-1 more      -> done
    calls             driver calls since the last arm                                 -> 7
    mapped            page indices that are mapped                                    -> 0 1 2
    held              bytes that the range holds                                      -> 4194304
    write ID TAG      put a tag into a block                                          -> done
    read ID           the tag in a block                                              -> 7
    fork              fork a child that drops everything it inherited, and ends       -> done
    stop              stop serving                                                    -> done
"""

from __future__ import annotations

import gc
import os
import sys
from functools import cached_property

from processes import LineProgram


class Worker(LineProgram):
    """The process, from outside."""

    def __init__(
        self,
        segment: str,
        layout: str,
        pages: int,
        rank: int = 0,
        *,
        program: str = __file__,
        environment: dict[str, str] | None = None,
    ) -> None:
        self.rank = rank
        super().__init__(program, segment, layout, str(pages), str(rank), environment=environment)

    @cached_property
    def first_words(self) -> list[str]:
        """What it said of its start; waits for that."""
        return self.read().split()

    @cached_property
    def refusal(self) -> str:
        """Why it was refused."""
        assert self.first_words[0] == "refused"
        return self.read()

    def ask(self, line: str, /) -> str:
        assert self.first_words == ["ready"]
        return super().ask(line)

    def mapped(self) -> list[int]:
        return [int(page) for page in self.ask("mapped").split()]

    pause = LineProgram.stop


def main() -> None:
    from native_pools import LAYOUTS, Memory

    from kvelastic import _vmm, errors
    from kvelastic.shared import segment

    name, layout, pages = sys.argv[1:4]
    rank = int(sys.argv[4]) if len(sys.argv) > 4 else 0
    memory = Memory(LAYOUTS[layout], int(pages))
    opened = segment.open_writable(name)
    try:
        worker = _vmm.RingWorker.start(opened.control_block, memory.range, rank)
    except errors.KvelasticError as error:
        print(f"refused {error.code}\n{error}", flush=True)
        return
    print("ready", flush=True)
    for line in sys.stdin:
        command, *arguments = line.split()
        numbers = [int(argument) for argument in arguments]
        answer = "done"
        if command == "arm":
            memory.driver.arm(*numbers)
        elif command == "calls":
            answer = str(memory.driver.calls)
        elif command == "mapped":
            answer = " ".join(str(p) for p in range(memory.pages) if memory.range.is_mapped(p))
        elif command == "held":
            answer = str(memory.range.held_bytes)
        elif command == "write":
            memory.write(*numbers)
        elif command == "read":
            (tag,) = memory.read(*numbers)
            answer = str(tag)
        elif command == "fork":
            child = os.fork()
            if child == 0:
                try:
                    del worker
                    memory.range = memory.driver = memory.host = None  # type: ignore[assignment]
                    gc.collect()
                finally:
                    os._exit(0)
            answer = f"done {os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}"
        elif command == "stop":
            worker.stop()
        print(answer, flush=True)


if __name__ == "__main__":
    main()
