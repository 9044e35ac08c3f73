"""LoRA adapters in the names of blocks: told apart by their contents.

vLLM names a block that was computed with an adapter by the adapter's name and path. Neither says
what lies there: another training run is written to the same path, and its prompts would be answered
from KV of the former one, also after a restart. So a fingerprint of the files joins them::

    ("lora", name, path), ("lora_contents", fingerprint)

A worker loads an adapter's files when it first needs them, and may drop and load them again. If
they change and nobody says so, nobody knows which contents the workers have: the blocks get a name
that is never given again, and nothing is found under it.

Used by the engine core's thread. Imports no vLLM.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

from kvelastic.tiers.weights_fingerprint import fingerprint_of_weights

_KIND: Final = "lora_contents"

_Files = tuple[tuple[str, int, int, int], ...]
"""Path, size, time of change and inode of each file."""


class _Seen(NamedTuple):
    files: _Files
    fingerprint: str


class Adapters:
    """What each adapter holds that the workers may have loaded, by vLLM's number of it."""

    def __init__(self, fingerprint: Callable[[str], str | None] = fingerprint_of_weights) -> None:
        self._fingerprint = fingerprint
        self._seen: dict[int, _Seen] = {}

    def contents_of(self, number: int, path: str) -> str:
        """A fingerprint of what an adapter holds; another one for every other contents.

        Blocks while files are read that were not read before: some milliseconds.
        """
        files = _files_at(path)
        seen = self._seen.get(number)
        if seen is not None and seen.files == files:
            return seen.fingerprint
        found = self._fingerprint(path) if seen is None else None
        if found is None:  # changed under the workers, or not to be read here
            found = f"unknown {secrets.token_hex(16)}"
        self._seen[number] = _Seen(files, found)
        return found

    def forget(self, number: int) -> None:
        """It is loaded anew before it is used again."""
        self._seen.pop(number, None)


def _files_at(path: str) -> _Files:
    folder = Path(path)
    try:
        files = sorted(folder.rglob("*")) if folder.is_dir() else [folder]
        facts = [(str(file), file.stat()) for file in files]
    except OSError:
        return ()
    return tuple((name, fact.st_size, fact.st_mtime_ns, fact.st_ino) for name, fact in facts)


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
