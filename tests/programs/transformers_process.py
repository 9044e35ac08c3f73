"""`transformers_engine.py` in a process of its own, and what tests ask of it.

with TransformersEngine("5.17", log, ["--num-blocks", "64"]) as engine:
    engine.wait_until_ready()
    tokens = engine.burst(make_prompts(16, seed=1), 24)
"""

from __future__ import annotations

import json
import os
import random
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import needs
from killed_engines import kill_group
from waiting import DEADLINE_S

PROGRAM = Path(__file__).with_name("transformers_engine.py")


def make_prompts(
    count: int, seed: int, *, shortest: int = 8, longest: int = 120, shared_tokens: int = 48
) -> list[list[int]]:
    """Random prompts; every second one begins with the same tokens."""
    pick = random.Random(seed)
    shared = [pick.randrange(3, 512) for _ in range(shared_tokens)]
    return [
        (shared if index % 2 else [])
        + [pick.randrange(3, 512) for _ in range(pick.randrange(shortest, longest))]
        for index in range(count)
    ]


def environment_of(series: str, **extra: str) -> dict[str, str]:
    """The tests' own environment without kvelastic's variables, for that series."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name == "KVELASTIC_LEDGER"  # the run's own
        or not name.startswith(("KVELASTIC_", "KVCACHED_", "ENABLE_KV"))
    }
    folder = needs.TRANSFORMERS[series]
    if folder is not None:
        kept["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), kept.get("PYTHONPATH")]))
    offline = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    return {**kept, **offline, **extra}


class TransformersEngine:
    """Ends with its `with` block, however that ends; what it says is in `log`."""

    def __init__(
        self,
        series: str,
        log: Path,
        arguments: Sequence[str] = (),
        environment: dict[str, str] | None = None,
    ) -> None:
        self.log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, PROGRAM, *arguments],
                env=environment_of(series, **(environment or {})),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                start_new_session=True,
            )
        self._read = b""

    def __enter__(self) -> TransformersEngine:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
        kill_group(self.process)

    @property
    def pid(self) -> int:
        return self.process.pid

    def wait_until_ready(self) -> str:
        """The version that runs."""
        answer = self.first_answer()
        assert answer["is_ready"], f"{answer}\n{self.tail()}"
        return str(answer["version"])

    def first_answer(self) -> dict[str, Any]:
        """`is_ready`, and if not: `error` and `message`, after which the process ends."""
        return self._answer()

    def ask(self, do: str, deadline_s: float = DEADLINE_S, **values: Any) -> dict[str, Any]:
        """Send a command and return its answer."""
        self.tell(do, **values)
        return self._answer(deadline_s)

    def tell(self, do: str, **values: Any) -> None:
        """Send a command; `ask` and `tell` may not be mixed while an answer is due."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **values}).encode() + b"\n")
        self.process.stdin.flush()

    def submit(
        self, prompts: list[list[int]], max_new_tokens: int | Sequence[int], sequences: int = 1
    ) -> list[str]:
        """Hand prompts in, all for the same step, and return their ids.

        With several `sequences` of each: the ids of the prompts, and then those of their children.
        """
        counts = (
            [max_new_tokens] * len(prompts)
            if isinstance(max_new_tokens, int)
            else list(max_new_tokens)
        )
        answer = self.ask("submit", prompts=prompts, max_new_tokens=counts, sequences=sequences)
        assert not answer["refused"], f"{answer}\n{self.tail()}"
        return list(answer["ids"])

    def wait(self, ids: Sequence[str], timeout_s: float = DEADLINE_S) -> list[list[int]]:
        """The tokens of each, in the order of `ids`; fails if any failed or did not end in time."""
        answer = self.ask("wait", timeout_s + 30, ids=list(ids), timeout_s=timeout_s)
        assert not answer["errors"], f"{answer['errors']}\n{self.tail()}"
        assert not answer["unfinished"], f"{answer['unfinished']}\n{self.tail()}"
        return [answer["tokens"][name] for name in ids]

    def burst(
        self, prompts: list[list[int]], max_new_tokens: int | Sequence[int]
    ) -> list[list[int]]:
        """Submit and wait."""
        return self.wait(self.submit(prompts, max_new_tokens))

    def cancel(self, name: str, timeout_s: float = DEADLINE_S) -> None:
        """Returns once the engine has taken the request out of its queues."""
        answer = self.ask("cancel", timeout_s + 30, id=name, timeout_s=timeout_s)
        assert answer["cancelled"], f"{name} is still there\n{self.tail()}"

    def counters(self) -> dict[str, Any]:
        """See `transformers_engine.py`."""
        return self.ask("counters")

    def stop(self) -> int:
        """Stop the engine; the process's exit status."""
        self.ask("stop")
        return self.process.wait(DEADLINE_S)

    def tail(self) -> str:
        """The end of what it logged."""
        return self.log.read_text(errors="replace")[-4000:]

    def _answer(self, deadline_s: float = DEADLINE_S) -> dict[str, Any]:
        assert self.process.stdout is not None
        end_s = time.monotonic() + deadline_s
        while b"\n" not in self._read:
            left_s = end_s - time.monotonic()
            assert left_s > 0, f"no answer in {deadline_s} s\n{self.tail()}"
            if not select.select([self.process.stdout], [], [], left_s)[0]:
                continue
            piece = os.read(self.process.stdout.fileno(), 1 << 20)
            assert piece, f"it ended with {self.process.wait(DEADLINE_S)}\n{self.tail()}"
            self._read += piece
        line, _, self._read = self._read.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer
