"""Raises the limit of open files at the start, and handles shortages of file descriptors.

files = OpenFiles.raised()            # before anything is opened
files.most_connections                # clients' connections; each may need one to an engine too
if is_out_of_descriptors(error): raise files.refusal("connecting to an engine")

Each client's connection is one open file, the connection to its engine another. The bound on
connections keeps the controller below the limit. It can still run out of descriptors if the limit
is lowered or the whole machine is out of them. The refusal then names that cause, not the engine.
"""

from __future__ import annotations

import logging
import os
import resource
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from kvelastic.controller.http.refusal import Refusal
from kvelastic.errors import is_out_of_descriptors

_log = logging.getLogger("kvelastic.controller")

LOG_EVERY_S: Final = 10.0
_LEAST_OTHERS: Final = 96
"""Files other than connections: listeners, logs, segments, pipes of engines."""
_MOST_OTHERS: Final = 8192
_MOST_BACKLOG: Final = 2048
_UNLIMITED: Final = 1 << 20


@dataclass
class OpenFiles:
    """The limit of open files, and the bounds derived from it. Use it in the event loop."""

    limit: int
    """Maximum number of open files of this process."""
    limit_at_start: int
    """The limit before it was raised. Launched engines run with this limit."""
    shortages: int = 0
    """How often a file or connection could not be opened for lack of a descriptor."""
    _logged_s: float = field(default=float("-inf"))
    _logged: int = 0

    @classmethod
    def raised(cls) -> OpenFiles:
        """Raise this process's soft limit to its hard limit if the system allows it."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with suppress(OSError, ValueError):  # the hard one may be beyond fs.nr_open
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return cls(_finite(limit), _finite(soft))

    @property
    def _others(self) -> int:
        return max(_LEAST_OTHERS, min(_MOST_OTHERS, self.limit // 4))

    @property
    def most_connections(self) -> int:
        """Maximum number of clients' connections served at the same time."""
        return max(1, (self.limit - self._others) // 2)

    @property
    def most_refused(self) -> int:
        """Maximum number of excess connections that get a 503; more are closed immediately."""
        return self._others // 4

    @property
    def backlog(self) -> int:
        """The listen backlog: connections that may wait to be accepted."""
        return min(_MOST_BACKLOG, self._others // 4)

    def give_back(self, pid: int) -> None:
        """Give a child the original limit: `select` fails with descriptors of 1,024 and above."""
        with suppress(OSError, ValueError):  # it has ended, or runs as another user
            hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)[1]
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (self.limit_at_start, hard))

    def refusal(self, doing: str) -> Refusal:
        """Count a shortage, log it at a limited rate, and return the refusal (503)."""
        self.note(doing)
        return Refusal(
            503,
            "out_of_descriptors",
            "The controller has no file descriptor left for this request; try again later.",
            retry_after_s=2.0,
        )

    def probe(self) -> None:
        """Note a shortage if no descriptor is left. uvloop does not report failed accepts."""
        try:
            os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:
            if is_out_of_descriptors(error):
                self.note("accepting connections")

    def note(self, doing: str) -> None:
        """Count a shortage. At most one log line per `LOG_EVERY_S` reports the number."""
        self.shortages += 1
        now_s = time.monotonic()
        if now_s - self._logged_s < LOG_EVERY_S:
            return
        count, self._logged = self.shortages - self._logged, self.shortages
        self._logged_s = now_s
        _log.error(
            "out of file descriptors while %s (%d times since the last such line, limit %d);"
            " raise the limit of open files (ulimit -n, LimitNOFILE=)",
            doing,
            count,
            resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        )


def _finite(limit: int) -> int:
    return _UNLIMITED if limit == resource.RLIM_INFINITY else limit
