"""The logger `kvelastic`: where its lines go, and messages that are said once a process."""

from __future__ import annotations

import logging
import os
import sys
import zlib
from typing import TYPE_CHECKING, Final, Protocol, TextIO

if TYPE_CHECKING:
    _Stream = logging.StreamHandler[TextIO]
else:
    _Stream = logging.StreamHandler  # which Python 3.10 cannot subscript

logger = logging.getLogger("kvelastic")


class LogSettings(Protocol):
    """What of the configuration is for the log; a `Config` is one."""

    @property
    def log_level(self) -> str:
        """The least level that is written, as `logging` names it."""

    @property
    def log_color(self) -> bool:
        """Whether a terminal gets colours."""


_SAID: Final = "_KVELASTIC_SAID"
"""In the environment, which child processes inherit: checksums of what was said."""

# Messages that were said, and those that came before logging was set up.
_said: set[str] = set()
_held: list[tuple[int, str]] = []


def say_once(level: int, message: str) -> None:
    """Log `message` once in this process and those that it starts.

    Held until `configure_logging` if the level is off so far.
    """
    if message in _said:
        return
    _said.add(message)
    if logger.isEnabledFor(level):
        _say(level, message)
    else:
        _held.append((level, message))


def _say(level: int, message: str) -> None:
    digest = f"{zlib.crc32(message.encode()):08x}"
    said = os.environ.get(_SAID, "").split()
    if digest not in said:
        os.environ[_SAID] = " ".join((*said, digest))
        logger.log(level, message)


class _Handler(_Stream):
    """Ours, so that a second `configure_logging` replaces it and never adds one."""


def configure_logging(config: LogSettings, stream: TextIO | None = None) -> None:
    """Let the logger `kvelastic` write to `stream` (stderr by default) as `config` says.

    Calling it again replaces the handler. Records stay out of the root logger's handlers, or an
    engine that sets those up would print each line twice.
    """
    stream = sys.stderr if stream is None else stream
    prefix = f"[kvelastic {os.getpid()}]"
    if config.log_color and stream.isatty():
        prefix = f"\x1b[36m{prefix}\x1b[0m"
    handler = _Handler(stream)
    handler.setFormatter(
        logging.Formatter(f"%(levelname)s %(asctime)s {prefix} %(message)s", "%m-%d %H:%M:%S")
    )
    for old in [old for old in logger.handlers if isinstance(old, _Handler)]:
        logger.removeHandler(old)
    logger.addHandler(handler)
    logger.setLevel(config.log_level)
    logger.propagate = False
    while _held:
        _say(*_held.pop(0))
