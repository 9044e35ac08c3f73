"""What starts vLLM's engine core, and that, without vLLM: `started_core.py METHOD ENDS GRACE_S`.

METHOD is multiprocessing's, `spawn` or `fork`. Prints a line of JSON: the pids of the engine core,
of its worker and, where it forks, of a sibling that was started after it. Then it answers each line
of stdin with one of the engine core's. ENDS is `orderly` for an engine core that says "closed" on
stderr and ends at SIGTERM, `stuck` for one that ignores it, `finalizing` for one whose interpreter
never ends its finalization, `late` for an orderly one that begins to look after its starter has
ended. The thread that started the processes has ended by then.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import ForkContext, SpawnContext
from typing import Literal, cast

Method = Literal["spawn", "fork"]


def context_of(method: Method) -> SpawnContext | ForkContext:
    return get_context("spawn") if method == "spawn" else get_context("fork")


def sleep_for_ever() -> None:
    while True:
        time.sleep(60)


class Endless:
    """The interpreter waits for ever for its end."""

    def __del__(self, sleep: Callable[[float], None] = time.sleep) -> None:
        while True:  # the module's names are gone by now
            sleep(60)


def core(answers: Connection, method: Method, ends: str, grace_s: str) -> None:
    from kvelastic.integration.vllm.end_with_starter import end_with_starter

    worker = context_of(method).Process(target=sleep_for_ever)

    def close(*_: object) -> None:
        worker.kill()
        os.write(2, b"closed\n")
        if ends == "finalizing":
            globals()["endless"] = Endless()
            sys.exit(0)
        os._exit(0)

    signal.signal(signal.SIGTERM, signal.SIG_IGN if ends == "stuck" else close)
    worker.start()
    if ends == "late":
        starter = os.getppid()  # before the starter may be killed
        answers.send([os.getpid(), worker.pid])
        while os.getppid() == starter:
            time.sleep(0.001)
    end_with_starter(lambda: float(grace_s))
    answers.send([os.getpid(), worker.pid])
    while True:
        answers.send(answers.recv())


def main(method: Method, ends: str, grace_s: str) -> None:
    context = context_of(method)
    ours, its = context.Pipe()
    pids: list[int] = []

    def start() -> None:
        context.Process(target=core, args=(its, method, ends, grace_s)).start()
        pids.extend(ours.recv())
        if method == "fork":
            sibling = context.Process(target=sleep_for_ever)
            sibling.start()
            assert sibling.pid is not None
            pids.append(sibling.pid)

    starter = threading.Thread(target=start)
    starter.start()
    starter.join()
    print(json.dumps(pids), flush=True)
    for line in sys.stdin:
        ours.send(line)
        print(ours.recv().strip(), flush=True)


if __name__ == "__main__":
    main(cast(Method, sys.argv[1]), *sys.argv[2:])
