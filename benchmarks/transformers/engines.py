"""The engines of a comparison: stock transformers, the same once more, and one with kvelastic.

    with started(folder, {name: arguments for name in NAMES}) as engines:
        engines[STOCK].burst(prompts, new_tokens)

All three are `tests/programs/transformers_engine.py`. What makes one of them elastic is its
environment alone. Leaving the block ends all of them, whatever has happened.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from transformers_process import TransformersEngine

from benchmarks.transformers.comparison import ELASTIC, NAMES
from benchmarks.transformers.turns import Answered, Ask
from kvelastic.errors import SegmentNotFoundError
from kvelastic.shared import segment

SERIES = "5.19"
"""Of transformers, as it comes with the environment."""
INSTANCE = f"bench_transformers_{os.getpid()}"
LEDGER = f"bench-transformers-{os.getpid()}"
BLOCK_TOKENS = 32
_TURN_DEADLINE_S = 500.0


class NotElasticError(Exception):
    """An engine that was to be elastic is not: its figures would be stock's."""


def environment(name: str) -> dict[str, str]:
    """Of one engine. The elastic one has a name to be found by, and a ledger of its own."""
    if name != ELASTIC:
        return {}
    return {
        "ENABLE_KVELASTIC": "true",
        "KVELASTIC_IPC_NAME": INSTANCE,
        "KVELASTIC_LEDGER": LEDGER,
    }


@contextmanager
def started(
    folder: Path, arguments: Mapping[str, Sequence[str]]
) -> Iterator[dict[str, TransformersEngine]]:
    """The engines that have `arguments`, each ready for requests.

    Raises `AssertionError` with the end of its log for one that does not start, and
    `NotElasticError`.
    """
    with ExitStack() as stack:
        engines = {
            name: stack.enter_context(
                TransformersEngine(
                    SERIES, folder / f"{name.replace(' ', '_')}.log", own, environment(name)
                )
            )
            for name, own in arguments.items()
        }
        for engine in engines.values():
            engine.wait_until_ready()
        if ELASTIC in engines:
            check_is_elastic()
        yield engines
        for engine in engines.values():
            engine.stop()


@contextmanager
def all_ready(folder: Path, num_blocks: int, arguments: Sequence[str]) -> Iterator[dict[str, Ask]]:
    """All three with the same capacity, for turns. Raises as `started`."""
    shape = ["--block-tokens", str(BLOCK_TOKENS), "--num-blocks", str(num_blocks), *arguments]
    with started(folder, dict.fromkeys(NAMES, shape)) as engines:
        yield {name: partial(_ask, engine) for name, engine in engines.items()}


def _ask(engine: TransformersEngine, prompts: list[list[int]], new_tokens: list[int]) -> Answered:
    """Raises `AssertionError` where a prompt was not answered."""
    answer = engine.ask(
        "timed",
        _TURN_DEADLINE_S + 30,
        prompts=prompts,
        max_new_tokens=new_tokens,
        timeout_s=_TURN_DEADLINE_S,
    )
    failed = answer["refused"] or answer["errors"] or answer["unfinished"]
    assert not failed, f"{failed}\n{engine.tail()}"
    tokens = [answer["tokens"][each] for each in answer["ids"]]
    return Answered(answer["total_s"], answer["cpu_s"], tokens)


def check_is_elastic() -> None:
    """Raise `NotElasticError` if no instance of kvelastic came with the engine."""
    try:
        segment.inspect(INSTANCE)
    except SegmentNotFoundError as error:
        raise NotElasticError(
            "transformers runs without kvelastic although ENABLE_KVELASTIC=true is set;"
            " `kvctl doctor` says why, and scripts/setup installs what loads it"
        ) from error
