"""The limit of open files: raised when the controller starts; and what running out looks like.

files = OpenFiles.raised()            # before anything is opened
files.most_connections                # of clients; each may need a second one to an engine
if is_out_of_descriptors(error): raise files.refusal("connecting to an engine")

Each client's connection is one open file, its engine's another. So the bound on connections is
what keeps the controller from running out; where it does all the same (somebody lowers the limit,
or the whole machine is out of them), it is answered as that and never as an engine's fault.
"""

from __future__ import annotations

import logging
import os
import resource
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from kvelastic.controller.refusal import Refusal
from kvelastic.errors import is_out_of_descriptors

_log = logging.getLogger("kvelastic.controller")

LOG_EVERY_S: Final = 10.0
_LEAST_OTHERS: Final = 96
"""Files other than connections: listeners, logs, segments that are read, pipes of engines."""
_MOST_OTHERS: Final = 8192
_MOST_BACKLOG: Final = 2048
_UNLIMITED: Final = 1 << 20


@dataclass
class OpenFiles:
    """Owned by the loop."""

    limit: int
    """Files that this process may have open."""
    limit_at_start: int
    """What it was before it was raised; engines that are launched get it back."""
    shortages: int = 0
    """Times that something could not be opened for want of a descriptor."""
    _logged_s: float = field(default=float("-inf"))
    _logged: int = 0

    @classmethod
    def raised(cls) -> OpenFiles:
        """Raise this process's soft limit to its hard one, as far as the system lets it."""
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
        """Of clients that are served at once."""
        return max(1, (self.limit - self._others) // 2)

    @property
    def most_refused(self) -> int:
        """Connections beyond those that are told so at once; more are closed without a word."""
        return self._others // 4

    @property
    def backlog(self) -> int:
        """Connections that the system may hand over at once."""
        return min(_MOST_BACKLOG, self._others // 4)

    def give_back(self, pid: int) -> None:
        """Give a child the limit that this process had: `select` cannot take more than 1,024."""
        with suppress(OSError, ValueError):  # it has ended, or runs as another user
            hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)[1]
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (self.limit_at_start, hard))

    def refusal(self, doing: str) -> Refusal:
        """Count a shortage, say it in the log now and then, and return the answer."""
        self.note(doing)
        return Refusal(
            503,
            "out_of_descriptors",
            "The controller has no file descriptor left for this request; try again later.",
            retry_after_s=2.0,
        )

    def probe(self) -> None:
        """Note whether a descriptor is left. uvloop closes what it cannot accept without a word."""
        try:
            os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:
            if is_out_of_descriptors(error):
                self.note("accepting connections")

    def note(self, doing: str) -> None:
        """Count a shortage. One line of the log in ten seconds says how many there were."""
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
