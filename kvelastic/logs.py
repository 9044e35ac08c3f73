"""The logger `kvelastic`: its handler, and messages that are logged once per process."""

from __future__ import annotations

import logging
import os
import sys
import zlib
from typing import TYPE_CHECKING, Final, TextIO

if TYPE_CHECKING:
    from kvelastic.config import Config

    _Stream = logging.StreamHandler[TextIO]
else:
    _Stream = logging.StreamHandler  # Python 3.10 cannot subscript it

logger = logging.getLogger("kvelastic")


_SAID: Final = "_KVELASTIC_SAID"
"""Environment variable with checksums of logged messages; child processes inherit it."""

# Logged messages, and messages from before logging was configured.
_logged: set[str] = set()
_held: list[tuple[int, str]] = []


def log_once(level: int, message: str) -> None:
    """Log `message` once in this process and its child processes.

    If the level is disabled, the message is held until `configure_logging`.
    """
    if message in _logged:
        return
    _logged.add(message)
    if logger.isEnabledFor(level):
        _log(level, message)
    else:
        _held.append((level, message))


def _log(level: int, message: str) -> None:
    digest = f"{zlib.crc32(message.encode()):08x}"
    said = os.environ.get(_SAID, "").split()
    if digest not in said:
        os.environ[_SAID] = " ".join((*said, digest))
        logger.log(level, message)


class _Handler(_Stream):
    """kvelastic's handler, so that a second `configure_logging` replaces it."""


def configure_logging(config: Config, stream: TextIO | None = None) -> None:
    """Configure the logger `kvelastic` to write to `stream` (default: stderr).

    Calling it again replaces the handler. Records do not propagate to the root logger, because an
    engine that configures it would log each line twice.
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
        _log(*_held.pop(0))
