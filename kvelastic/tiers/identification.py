"""Finds out in the background which weights an engine has, for the stores that outlive it.

    weights = WeightFiles.at(path)                 # before the engine loads them
    identification = Identification(weights, stores, HashCache(default_folder()))
    identification.begin()                         # at once where all files were hashed before
    identification.close()

One thread of the lowest priority reads the files. If their identity cannot be known (a file has
changed since the engine started, or cannot be read), the stores get an identity of this process
alone.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from kvelastic.sizes import format_size
from kvelastic.tiers.hash_cache import HashCache
from kvelastic.tiers.identified import IdentifiedStore
from kvelastic.tiers.weights_fingerprint import CancelledError, WeightFiles

_log = logging.getLogger("kvelastic")

_CLOSE_S: Final = 5.0
_LOWEST_PRIORITY: Final = 19


class Identification:
    """See the module."""

    def __init__(
        self, weights: WeightFiles, stores: Sequence[IdentifiedStore], cache: HashCache
    ) -> None:
        self._weights = weights
        self._stores = tuple(stores)
        self._cache = cache
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvelastic-hash", daemon=True)

    def begin(self) -> None:
        """Identify the stores: before this returns if the digests are cached, else later."""
        try:
            known = self._weights.known(self._cache)
        except OSError as error:
            self._give_up(error)
            return
        if known is not None:
            self._identify(known)
            return
        _log.info(
            "The weights at %s (%s) are hashed once, which takes about a second for each GiB. Until"
            " then these tiers are not used: %s.",
            self._weights.path,
            format_size(self._weights.size_bytes),
            self._names,
        )
        self._thread.start()

    def close(self) -> None:
        """Stop hashing. Digests of files that were read whole are kept. Safe to repeat.

        Blocks until the thread has ended, 5 s at most: a read of a file may hang.
        """
        self._is_closing.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_S)

    @property
    def _names(self) -> str:
        return ", ".join(store.name for store in self._stores)

    def _run(self) -> None:
        with suppress(OSError):  # of this thread alone
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
        began_s = time.monotonic()
        try:
            found = self._weights.fingerprint(self._cache, self._is_closing.is_set)
        except CancelledError:
            return
        except OSError as error:
            self._give_up(error)
            return
        self._identify(found)
        _log.info(
            "The weights at %s are hashed (%.1f s): these tiers are used now: %s.",
            self._weights.path,
            time.monotonic() - began_s,
            self._names,
        )

    def _give_up(self, error: OSError) -> None:
        _log.warning(
            "Which weights this engine has cannot be known: %s. Until it is started again, these"
            " tiers hold blocks of this process alone, and no other finds them: %s.",
            error,
            self._names,
        )
        self._identify(f"unknown {secrets.token_hex(16)}")

    def _identify(self, fingerprint: str) -> None:
        if self._is_closing.is_set():
            return
        for store in self._stores:
            store.identify(fingerprint)
