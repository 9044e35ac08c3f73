"""Threads decode the first cell of new kinds of status file at once: `first_decodes.py COUNT`.

Each of COUNT kinds has types of its own, which msgspec has not seen. Prints "done" at the end.
"""

from __future__ import annotations

import sys
import threading
import types
from typing import Any

from kvelastic.shared.status_file import Count, Shown, StatusKind  # noqa: F401 - annotations

FIELDS = 40
THREADS = 4


def new_kind(number: int) -> StatusKind[Any, Any, Any]:
    names = [f"field_{each}" for each in range(FIELDS)]
    body = {
        "__module__": __name__,
        "__annotations__": dict.fromkeys(names, "Count | None"),
        **dict.fromkeys(names),
    }
    options = {"frozen": True, "array_like": True}
    cell: Any = types.new_class(f"Cell{number}", (Shown,), options, lambda own: own.update(body))
    return StatusKind("status file", b"12345678", 1, 4096, cell, cell, cell)


def decode_at_once(kind: StatusKind[Any, Any, Any]) -> None:
    value = kind.snapshot()
    raw, begin, found = kind.pack(1, value), threading.Barrier(THREADS), list[Any]()

    def decode() -> None:
        begin.wait()
        found.append(kind.unpack(kind.snapshot, raw))

    threads = [threading.Thread(target=decode) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [(1, value)] * THREADS, found


def main() -> None:
    sys.setswitchinterval(1e-6)
    for number in range(int(sys.argv[1])):
        decode_at_once(new_kind(number))
    print("done")


if __name__ == "__main__":
    main()
