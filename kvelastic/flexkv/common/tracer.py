"""Records requests to a file: `CacheConfig(trace_path="/tmp/requests.jsonl")`.

Each call is a line of JSON: a header with the version, then matches with their tokens and result,
launches and cancels. **The file contains prompts unencrypted**; only this user can read it (0600).
A failed write ends the recording with a warning. `tools/flexkv_replay.py` replays a file.
"""

from __future__ import annotations

import json
import logging
import os
import stat
import threading
from collections.abc import Sequence
from typing import Any, Final

from kvelastic.flexkv.common.hash_utils import Tokens
from kvelastic.flexkv.common.request import KVRequestType

_log = logging.getLogger("kvelastic")

VERSION: Final = 1


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
