"""Records requests to a file, and replays them.

    CacheConfig(trace_path="/tmp/requests.jsonl")          # records
    for step in replay(path, manager): assert step.found == step.recorded

Each call is a line of JSON: a header with the version, then matches with their tokens and result,
launches and cancels. **The file contains prompts unencrypted**; only this user can read it (0600).
A failed write ends the recording with a warning.
"""

from __future__ import annotations

import json
import logging
import os
import stat
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from kvelastic.errors import InvalidArgumentError
from kvelastic.flexkv.common.calls import Calls
from kvelastic.flexkv.common.hash_utils import Tokens
from kvelastic.flexkv.common.request import KVRequestType

_log = logging.getLogger("kvelastic")

VERSION: Final = 1
MOST_LINE_BYTES: Final = 64 << 20
"""Enough for a prompt of five million tokens."""
REPLAY_S: Final = 60.0


class Tracer:
    """Writes the file. Any thread may call; blocks for a write to the page cache."""

    def __init__(self, path: str | os.PathLike[str], **header: Any) -> None:
        """Overwrites the file. Raises OSError if it cannot be opened."""
        self._lock = threading.Lock()
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        self._fd: int | None = os.open(path, flags, 0o600)
        if stat.S_ISREG(os.fstat(self._fd).st_mode):  # a device's mode affects all users
            os.fchmod(self._fd, 0o600)
        self._write({"kvelastic_flexkv_trace": VERSION, **header})

    def match(
        self,
        request_type: KVRequestType,
        task_id: int,
        tokens: Tokens,
        wanted: tuple[int, int],
        namespace: Sequence[str] | None,
        found: tuple[int, int],
    ) -> None:
        """Record a match: the requested span, and the first token and count found."""
        line = {"call": request_type.value, "task": task_id, "tokens": tokens.tolist()}
        names = list(namespace) if namespace else None
        self._write({**line, "wanted": wanted, "namespace": names, "found": found})

    def tasks(self, call: str, task_ids: Sequence[int]) -> None:
        """Record a launch or a cancel."""
        self._write({"call": call, "tasks": list(task_ids)})

    def _write(self, line: dict[str, Any]) -> None:
        raw = json.dumps(line, separators=(",", ":")).encode() + b"\n"
        with self._lock:
            try:
                while raw and self._fd is not None:
                    raw = raw[os.write(self._fd, raw) :]
            except OSError as error:
                _log.warning("requests are not recorded any more: %s", error)
                self._close()

    def _close(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def close(self) -> None:
        """End the file. Idempotent."""
        with self._lock:
            self._close()


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
