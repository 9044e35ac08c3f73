"""Adds the contents of LoRA adapters to the names of blocks.

vLLM names a block that was computed with an adapter by the adapter's name and path, which do not
identify its contents. If another training run writes to the same path, prompts would reuse KV of
the old adapter, also after a restart. So a fingerprint of the files is added::

    ("lora", name, path), ("lora_contents", fingerprint)

A worker loads an adapter's files on first use, and may drop and reload them. If they change without
a notification, the contents that the workers hold are unknown. Then the blocks get a unique name,
under which nothing is found. Blocks of a large adapter get one too until its files are hashed, in a
thread, at about one second per GiB.

Used by the engine core's thread. Imports no vLLM.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, NamedTuple

from kvelastic.tiers.hash_cache import HashCache, default_folder
from kvelastic.tiers.weights_fingerprint import WeightFiles

_KIND: Final = "lora_contents"
_AT_ONCE_BYTES: Final = 16 << 20
"""Files up to this size are hashed while the engine core waits: about 15 ms."""


class _Seen(NamedTuple):
    files: WeightFiles | None
    name: str


class Adapters:
    """The contents of each adapter that the workers may have loaded, by vLLM's adapter number."""

    def __init__(self) -> None:
        self._cache = HashCache(default_folder())
        self._seen: dict[int, _Seen] = {}
        self._hashed: dict[int, _Seen] = {}
        """Results of hash threads, which the engine core's thread picks up."""

    def contents_of(self, number: int, path: str) -> str:
        """Return a name for an adapter's contents; different contents have different names.

        Blocks while it reads up to 16 MiB of files that were not read before.
        """
        files = _files_at(path)
        seen = self._seen.get(number)
        hashed = self._hashed.pop(number, None)
        if seen is not None and hashed is not None and hashed.files is seen.files:
            seen = self._seen[number] = hashed
        if seen is not None and seen.files == files:
            return seen.name
        found = None
        if seen is None and files is not None:  # else changed under the workers, or unreadable
            found = self._fingerprint(number, files)
        name = f"unknown {secrets.token_hex(16)}" if found is None else found
        self._seen[number] = _Seen(files, name)
        return name

    def forget(self, number: int) -> None:
        """The workers reload the adapter before its next use."""
        self._seen.pop(number, None)

    def _fingerprint(self, number: int, files: WeightFiles) -> str | None:
        """Return the fingerprint if it is known or quick; otherwise find it in a thread."""
        try:
            if files.size_bytes <= _AT_ONCE_BYTES:
                return files.fingerprint(self._cache)
            known = files.known(self._cache)
        except OSError:
            return None
        if known is None:
            threading.Thread(
                target=self._hash, args=(number, files), name="kvelastic-hash", daemon=True
            ).start()
        return known

    def _hash(self, number: int, files: WeightFiles) -> None:
        with suppress(OSError):  # the files changed or are unreadable: keep the current name
            self._hashed[number] = _Seen(files, files.fingerprint(self._cache))


def _files_at(path: str) -> WeightFiles | None:
    try:
        return WeightFiles.at(path)
    except OSError:
        return None


_adapters: Final = Adapters()


def adapter_keys(original: Callable[..., list[Any]], request: Any) -> list[Any]:
    """Return vLLM's extra hash keys of a request, with its adapter's contents. Called per block."""
    keys = original(request)
    adapter = request.lora_request
    if adapter is None:
        return keys
    contents = getattr(request, "kvelastic_adapter", None)
    if contents is None:
        contents = _adapters.contents_of(adapter.lora_int_id, adapter.lora_path)
        request.kvelastic_adapter = contents
    return [*keys, (_KIND, contents)]


def adds(lora_request: Any) -> None:
    """A client loads an adapter, possibly in place of a loaded one."""
    if lora_request.load_inplace:
        forget(lora_request.lora_int_id)


def forget(number: int) -> None:
    """A client replaces or removes the adapter of that number."""
    _adapters.forget(number)
