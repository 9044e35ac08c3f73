"""Replays a trace of FlexKV's interface on a manager with registered tensors.

for step in replay("/tmp/requests.jsonl", manager): assert step.found == step.recorded
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from kvelastic.errors import InvalidArgumentError
from kvelastic.flexkv.common.calls import Calls
from kvelastic.flexkv.common.request import KVRequestType
from kvelastic.flexkv.common.tracer import VERSION

MOST_LINE_BYTES: Final = 64 << 20
"""Enough for a prompt of five million tokens."""
REPLAY_S: Final = 60.0


class Step(NamedTuple):
    """A replayed match: first token and count, as recorded and as found now."""

    request_type: KVRequestType
    task_id: int
    """The recorded task id."""
    recorded: tuple[int, int]
    found: tuple[int, int]


def replay(path: str | os.PathLike[str], manager: Calls) -> Iterator[Step]:
    """Repeat the recorded calls on a manager with registered tensors; yields a step per match.

    Launches use the engine's first blocks and are waited for completely. Raises
    `InvalidArgumentError` with the number of an invalid line, and OSError.
    """
    tasks: dict[int, tuple[int, int]] = {}
    for number, line in enumerate(read(path), 1):
        if line.get("call") is None:
            continue
        try:
            step = _replay_one(line, manager, tasks)
        except InvalidArgumentError:
            raise
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise InvalidArgumentError(
                f"line {number} of {os.fspath(path)} is no record of a call: {error!r}"
            ) from None
        if step is not None:
            yield step


def _replay_one(
    line: dict[str, Any], manager: Calls, tasks: dict[int, tuple[int, int]]
) -> Step | None:
    """`tasks` maps each recorded task to the new one and its number of tokens."""
    if line["call"] in ("launch", "cancel"):
        for task, count in [tasks[one] for one in line["tasks"] if one in tasks]:
            if line["call"] == "cancel":
                manager.cancel(task)
            else:
                manager.launch(task, np.arange(count))
                manager.wait(task, REPLAY_S, completely=True)
        return None
    kind = KVRequestType(line["call"])
    tokens = np.array(line["tokens"], np.int64)
    first, end = line["wanted"]
    wanted = np.zeros(len(tokens), np.bool_)
    wanted[first:end] = True
    if kind is KVRequestType.PREFETCH:
        task = manager.prefetch_async(tokens, line["namespace"])
        mask = manager.wait(task, REPLAY_S)[task].return_mask
    else:
        match = manager.get_match if kind is KVRequestType.GET else manager.put_match
        task, mask = match(tokens, wanted, namespace=line["namespace"])
    count = 0 if mask is None else int(mask.sum())
    tasks[line["task"]] = (task, count)
    found = (int(mask.argmax()), count) if mask is not None and count else (0, 0)
    recorded_first, recorded_count = line["found"]
    return Step(kind, line["task"], (recorded_first, recorded_count), found)


def read(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """Yield the lines of a file. An incomplete last line (after a crash) is skipped.

    Raises `InvalidArgumentError` for another version and for a line that is not an object.
    """
    with Path(path).open("rb") as file:
        number = 0
        while raw := file.readline(MOST_LINE_BYTES):
            number += 1
            if not raw.endswith(b"\n"):
                if len(raw) < MOST_LINE_BYTES:
                    return
                raise InvalidArgumentError(f"line {number} is longer than {MOST_LINE_BYTES} bytes")
            try:
                line = json.loads(raw)
            except (ValueError, RecursionError) as error:
                raise InvalidArgumentError(f"line {number} is no JSON: {error}") from None
            if not isinstance(line, dict):
                raise InvalidArgumentError(f"line {number} is no object of JSON")
            if number == 1 and line.get("kvelastic_flexkv_trace") != VERSION:
                raise InvalidArgumentError(
                    f"{os.fspath(path)} is no trace of version {VERSION}; record it anew"
                )
            yield line
