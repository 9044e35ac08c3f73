"""A forked child drops its parent's connections, or a peer would not see the parent's end."""

from __future__ import annotations

import contextlib
import os
import socket
from selectors import BaseSelector
from weakref import WeakSet

_sockets: WeakSet[socket.socket] = WeakSet()
_selectors: WeakSet[BaseSelector] = WeakSet()


def drop_in_children(opened: socket.socket | BaseSelector) -> None:
    """Close it in every child that is forked from now on; a program that is executed has none."""
    if isinstance(opened, socket.socket):
        _sockets.add(opened)
    else:
        _selectors.add(opened)


def _drop() -> None:
    # Selectors first: what they watch is the parent's, and stays in the parent's list.
    for selector in list(_selectors):
        with contextlib.suppress(OSError, KeyError):
            selector.close()
    for opened in list(_sockets):
        with contextlib.suppress(OSError):
            opened.close()


os.register_at_fork(after_in_child=_drop)
