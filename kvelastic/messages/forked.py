"""Closes a parent's connections in forked children; else peers would not detect its end."""

from __future__ import annotations

import contextlib
import os
import socket
from selectors import BaseSelector
from weakref import WeakSet

_sockets: WeakSet[socket.socket] = WeakSet()
_selectors: WeakSet[BaseSelector] = WeakSet()


def drop_in_children(opened: socket.socket | BaseSelector) -> None:
    """Close it in every child forked from now on. An executed program does not inherit it."""
    if isinstance(opened, socket.socket):
        _sockets.add(opened)
    else:
        _selectors.add(opened)


def _drop() -> None:
    # Selectors first: the watched descriptors are the parent's and must stay registered there.
    for selector in list(_selectors):
        with contextlib.suppress(OSError, KeyError):
            selector.close()
    for opened in list(_sockets):
        with contextlib.suppress(OSError):
            opened.close()


os.register_at_fork(after_in_child=_drop)
