"""LoRA adapters in the names of blocks: told apart by their contents.

vLLM names a block that was computed with an adapter by the adapter's name and path. Neither says
what lies there: another training run is written to the same path, and its prompts would be answered
from KV of the former one, also after a restart. So a fingerprint of the files joins them::

    ("lora", name, path), ("lora_contents", fingerprint)

A worker loads an adapter's files when it first needs them, and may drop and load them again. If
they change and nobody says so, nobody knows which contents the workers have: the blocks get a name
that is never given again, and nothing is found under it. Blocks of a large adapter get one, too,
until its files are hashed: that takes about a second for each GiB, in a thread.

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
"""Files of this size are hashed while the engine core waits: some 15 ms."""


class _Seen(NamedTuple):
    files: WeightFiles | None
    name: str


class Adapters:
    """What each adapter holds that the workers may have loaded, by vLLM's number of it."""

    def __init__(self, cache: HashCache | None = None) -> None:
        self._cache = HashCache(default_folder()) if cache is None else cache
        self._seen: dict[int, _Seen] = {}
        self._hashed: dict[int, _Seen] = {}
        """Found by threads since; the engine core's thread takes it from there."""

    def contents_of(self, number: int, path: str) -> str:
        """A name for what an adapter holds; another one for every other contents.

        Blocks while files are read that were not read before, of 16 MiB at most.
        """
        files = _files_at(path)
        seen = self._seen.get(number)
        hashed = self._hashed.pop(number, None)
        if seen is not None and hashed is not None and hashed.files is seen.files:
            seen = self._seen[number] = hashed
        if seen is not None and seen.files == files:
            return seen.name
        found = None
        if seen is None and files is not None:  # else changed under the workers, or not to be read
            found = self._fingerprint(number, files)
        name = f"unknown {secrets.token_hex(16)}" if found is None else found
        self._seen[number] = _Seen(files, name)
        return name

    def forget(self, number: int) -> None:
        """It is loaded anew before it is used again."""
        self._seen.pop(number, None)

    def _fingerprint(self, number: int, files: WeightFiles) -> str | None:
        """What is known at once; else a thread finds it."""
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
        with suppress(OSError):  # they changed, or cannot be read: the name of now stays
            self._hashed[number] = _Seen(files, files.fingerprint(self._cache))


def _files_at(path: str) -> WeightFiles | None:
    try:
        return WeightFiles.at(path)
    except OSError:
        return None


_adapters: Final = Adapters()


def adapter_keys(original: Callable[..., list[Any]], request: Any) -> list[Any]:
    """What an adapter adds to the names of a request's blocks: asked for every block of it."""
    keys = original(request)
    adapter = request.lora_request
    if adapter is None:
        return keys
    contents = getattr(request, "kvelastic_adapter", None)
    if contents is None:
        contents = _adapters.contents_of(adapter.lora_int_id, adapter.lora_path)
        request.kvelastic_adapter = contents
    return [*keys, (_KIND, contents)]


def add_lora(original: Callable[..., Any], core: Any, lora_request: Any) -> Any:
    """An operator loads an adapter, perhaps in the place of one that the workers have."""
    if lora_request.load_inplace:
        _adapters.forget(lora_request.lora_int_id)
    return original(core, lora_request)


def remove_lora(original: Callable[..., Any], core: Any, lora_id: int) -> Any:
    """An operator removes an adapter."""
    _adapters.forget(lora_id)
    return original(core, lora_id)
