"""Requests recorded to a file, and replayed from it.

    CacheConfig(trace_path="/tmp/requests.jsonl")          # records
    for step in replay(path, manager): assert step.found == step.recorded

A line of JSON for each call: a header with the version, then matches with their tokens and what was
found, launches and cancels. **The tokens are prompts in clear**; the file is this user's alone
(0600). What cannot be written stops the recording, with a warning, and nothing else.
"""

from __future__ import annotations

import json
import logging
import os
import stat
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np

from kvelastic.errors import InvalidArgumentError
from kvelastic.flexkv.common.hash_utils import Tokens
from kvelastic.flexkv.common.request import KVRequestType, KVResponse, Mask

_log = logging.getLogger("kvelastic")

VERSION: Final = 1
MOST_LINE_BYTES: Final = 64 << 20
"""A prompt of five million tokens."""
REPLAY_S: Final = 60.0


class Tracer:
    """Writes the file. Any thread; blocks as long as a write to the page cache."""

    def __init__(self, path: str | os.PathLike[str], **header: Any) -> None:
        """Begins the file anew. Raises OSError where it cannot be made."""
        self._lock = threading.Lock()
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        self._fd: int | None = os.open(path, flags, 0o600)
        if stat.S_ISREG(os.fstat(self._fd).st_mode):  # a device's mode is everybody's
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
        """A match: the span of True tokens that was asked for, and first token and count found."""
        self._write(
            {
                "call": request_type.value,
                "task": task_id,
                "tokens": tokens.tolist(),
                "wanted": list(wanted),
                "namespace": list(namespace) if namespace else None,
                "found": list(found),
            }
        )

    def launch(self, task_ids: Sequence[int]) -> None:
        """Tasks were launched."""
        self._write({"call": "launch", "tasks": list(task_ids)})

    def cancel(self, task_ids: Sequence[int]) -> None:
        """Tasks were cancelled."""
        self._write({"call": "cancel", "tasks": list(task_ids)})

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
        """End the file. Repeatable."""
        with self._lock:
            self._close()


class Manager(Protocol):
    """As much of a KVManager as a replay needs."""

    def get_match(
        self, token_ids: Any, token_mask: Any = None, *, namespace: Any = None
    ) -> tuple[int, Mask]:
        """As KVManager's."""

    def put_match(
        self, token_ids: Any, token_mask: Any = None, *, namespace: Any = None
    ) -> tuple[int, Mask]:
        """As KVManager's."""

    def prefetch_async(self, token_ids: Any, namespace: Any = None) -> int:
        """As KVManager's."""

    def launch(self, task_ids: Any, slot_mappings: Any) -> Any:
        """As KVManager's."""

    def cancel(self, task_ids: Any) -> None:
        """As KVManager's."""

    def wait(
        self, task_ids: Any, timeout: float = 20.0, completely: bool = False
    ) -> dict[int, KVResponse]:
        """As KVManager's."""


@dataclass(frozen=True)
class Step:
    """One match of a replay: first token and count, as they were recorded and as they are now."""

    request_type: KVRequestType
    task_id: int
    """The recorded one."""
    recorded: tuple[int, int]
    found: tuple[int, int]


def replay(path: str | os.PathLike[str], manager: Manager) -> Iterator[Step]:
    """Make the recorded calls of a manager with tensors; answers a step for each match.

    Launches use the engine's first blocks and are waited for completely, so that every get finds
    what the puts before it have brought. Raises `InvalidArgumentError` for a line that is no
    record, by its number; OSError for the file.
    """
    task_of: dict[int, int] = {}
    tokens_of: dict[int, int] = {}
    for number, line in enumerate(read(path), 1):
        if line.get("call") is None:
            continue
        try:
            step = _replay_one(line, manager, task_of, tokens_of)
        except InvalidArgumentError:
            raise
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise InvalidArgumentError(
                f"line {number} of {os.fspath(path)} is no record of a call: {error!r}"
            ) from None
        if step is not None:
            yield step


def _replay_one(
    line: dict[str, Any], manager: Manager, task_of: dict[int, int], tokens_of: dict[int, int]
) -> Step | None:
    call = line["call"]
    if call in ("launch", "cancel"):
        tasks = [task for task in line["tasks"] if task in task_of]
        if call == "cancel":
            manager.cancel([task_of[task] for task in tasks])
        for task in tasks if call == "launch" else ():
            manager.launch(task_of[task], np.arange(tokens_of[task]))
            manager.wait(task_of[task], REPLAY_S, completely=True)
        return None
    request_type = KVRequestType(call)
    tokens = np.array(line["tokens"], np.int64)
    first, end = line["wanted"]
    wanted = np.zeros(len(tokens), np.bool_)
    wanted[first:end] = True
    if request_type is KVRequestType.PREFETCH:
        task = manager.prefetch_async(tokens, line["namespace"])
        mask = manager.wait(task, REPLAY_S)[task].return_mask
    else:
        match = manager.get_match if request_type is KVRequestType.GET else manager.put_match
        task, mask = match(tokens, wanted, namespace=line["namespace"])
    task_of[line["task"]] = task
    count = 0 if mask is None else int(mask.sum())
    tokens_of[line["task"]] = count
    found = (int(mask.argmax()), count) if mask is not None and count else (0, 0)
    recorded_first, recorded_count = line["found"]
    return Step(request_type, line["task"], (recorded_first, recorded_count), found)


def read(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """The lines of a file. A last one that is not whole (a crash) ends it.

    Raises `InvalidArgumentError` for another version, for a line that is not an object.
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
