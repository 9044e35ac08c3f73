"""One worker process: attaches to the ring as its rank, and answers whatever else is compared.

Started by group.py with a JSON of file descriptors and names. All of it waits in the kernel while
it is not asked; the process ends with its standard input.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
from collections.abc import Callable

from benchmarks.ring import pickled
from benchmarks.ring.channels import Library, SharedWords, serve_stream
from benchmarks.ring.geometry import LAYOUT, PAGES
from kvelastic import _vmm
from kvelastic.pool.pool import native_geometry
from kvelastic.shared import segment


def in_background(serve: Callable[..., None], *arguments: object) -> None:
    threading.Thread(target=serve, args=arguments, daemon=True).start()


def main() -> None:
    told = json.loads(sys.argv[1])
    library = Library(told["library"])
    words = SharedWords(library, told["words"])
    in_background(words.serve_bells)
    in_background(words.serve_pages, told["rank"])
    in_background(serve_stream, library, told["socket"], told["socket"])
    in_background(serve_stream, library, *told["pipe"])
    in_background(pickled.serve_connection, socket.socket(fileno=told["connection"]))
    in_background(pickled.serve_listener, socket.socket(fileno=told["listener"]))
    memory = _vmm.Range.reserve(_vmm.HostDriver(), native_geometry(LAYOUT, PAGES))
    opened = segment.open_writable(told["segment"])
    worker = _vmm.RingWorker.start(opened.control_block, memory, told["rank"])
    print("ready", flush=True)
    sys.stdin.read()
    worker.stop()


if __name__ == "__main__":
    main()
