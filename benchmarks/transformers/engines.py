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
from pathlib import Path

from transformers_process import TransformersEngine

from kvelastic import segment
from kvelastic.errors import SegmentNotFoundError

STOCK, AGAIN, ELASTIC = NAMES = ("stock", "stock again", "kvelastic")
SERIES = "5.19"
"""Of transformers, as it comes with the environment."""
INSTANCE = f"bench_transformers_{os.getpid()}"
LEDGER = f"bench-transformers-{os.getpid()}"
BLOCK_TOKENS = 32


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


def check_is_elastic() -> None:
    """Raise `NotElasticError` if no instance of kvelastic came with the engine."""
    try:
        segment.inspect(INSTANCE)
    except SegmentNotFoundError as error:
        raise NotElasticError(
            "transformers runs without kvelastic although ENABLE_KVELASTIC=true is set;"
            " `kvctl doctor` says why, and scripts/setup installs what loads it"
        ) from error
