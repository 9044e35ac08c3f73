"""Closes a parent's connections in forked children; else peers would not detect its end."""

from __future__ import annotations

import contextlib
import os
import socket
from selectors import BaseSelector
from weakref import WeakSet

_opened: WeakSet[socket.socket | BaseSelector] = WeakSet()


def drop_in_children(opened: socket.socket | BaseSelector) -> None:
    """Close it in every child forked from now on. An executed program does not inherit it."""
    _opened.add(opened)


def _drop() -> None:
    # Selectors first: the watched descriptors are the parent's and must stay registered there.
    for opened in sorted(_opened, key=lambda one: isinstance(one, socket.socket)):
        with contextlib.suppress(OSError, KeyError):
            opened.close()


os.register_at_fork(after_in_child=_drop)
