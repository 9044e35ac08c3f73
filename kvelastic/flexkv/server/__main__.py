"""`python -m kvelastic.flexkv.server`: the server as a program."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any, Final

from kvelastic.errors import ConfigError
from kvelastic.flexkv.server.process import load

_MOST_BYTES: Final = 1 << 20
_STDIN: Final = 0
_ENDING: Final = (signal.SIGTERM, signal.SIGINT)


def main(arguments: list[str]) -> int:
    """Serve until SIGTERM, SIGINT, or a client's shutdown; the exit status."""
    if len(arguments) != 1 or arguments[0] in ("-h", "--help"):
        print(
            "usage: python -m kvelastic.flexkv.server CONFIG.json\n\n"
            "Serve FlexKV's clients on this machine until SIGTERM. The file has model_config and"
            " cache_config,\nby the names of FlexKV's fields, and server_recv_port and"
            " gpu_register_port (ipc:///path).\nWith - it is one line of standard input, and the"
            " server ends when that does.",
            file=sys.stdout if arguments else sys.stderr,
        )
        return 0 if arguments else 2
    # Before there are threads (NumPy starts some), which inherit it: one waits for the signals.
    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    from kvelastic.config import configure_logging
    from kvelastic.config import load as load_settings
    from kvelastic.errors import KvelasticError
    from kvelastic.flexkv.common.user_config import GLOBAL_CONFIG_FROM_ENV, set_log_level
    from kvelastic.flexkv.server.server import KVServer

    configure_logging(load_settings())
    is_child = arguments[0] == "-"
    try:
        set_log_level(GLOBAL_CONFIG_FROM_ENV.log_level)
        raw = sys.stdin.buffer.readline(_MOST_BYTES) if is_child else _read(arguments[0])
        server = KVServer(*load(raw))
    except KvelasticError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    threading.Thread(target=_stop_at_signal, args=(server,), daemon=True).start()
    if is_child:
        threading.Thread(target=_stop_at_end, args=(server,), daemon=True).start()
    server.run()
    return 0


def _read(path: str) -> bytes:
    try:
        with Path(path).open("rb") as file:
            return file.read(_MOST_BYTES)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from None


def _stop_at_signal(server: Any) -> None:
    signal.sigwait(_ENDING)
    server.stop()


def _stop_at_end(server: Any) -> None:
    # By its descriptor: Python ends badly while a thread waits in its own reader.
    while os.read(_STDIN, 4096):
        pass
    server.stop()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
