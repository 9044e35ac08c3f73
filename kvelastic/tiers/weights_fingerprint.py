"""The identity of a model's weights: a SHA-256 over the contents of its files.

    weights = WeightFiles.at("/models/llama")    # before the engine reads them; None: no weights
    weights.fingerprint(cache)                   # 32 hex digits; blocks while files are read

A path does not identify contents. If new weights replace old ones under the same path, the KV of
the old weights must not be served. One changed byte gives another identity. Hashing takes about 1 s
per GiB, so digests of files are cached (`hash_cache`).

The engine reads the same files at another time. So `WeightFiles` records the facts of each file
before the engine reads them. If a file has changed by the time the last one is hashed, there is no
fingerprint.
"""

from __future__ import annotations

import hashlib
import logging
import os
import random
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvelastic.tiers.hash_cache import FileFacts, HashCache

_log = logging.getLogger("kvelastic")

WEIGHT_SUFFIXES: Final = frozenset(
    {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz", ".ckpt", ".tensors"}
)
"""Suffixes of weights. A path without any such file holds no weights."""
_NOTE_SUFFIXES: Final = frozenset(
    {".md", ".txt", ".rst", ".pdf", ".html", ".png", ".jpg", ".jpeg", ".gif", ".svg", ".log"}
)
"""Suffixes of files that do not affect results. All other files count, because a model's own code
may read any file."""

RANDOM_WEIGHTS: Final = "dummy"
"""The load format of vLLM and SGLang for random weights."""

_CHUNK_BYTES: Final = 1 << 20
_MOST_FILES: Final = 100_000
_FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK


class WeightsError(OSError):
    """The identity of the weights cannot be determined."""


class CancelledError(WeightsError):
    """The caller stopped the hashing."""


@dataclass(frozen=True)
class WeightFiles:
    """The files of a model, with their facts at one moment."""

    path: Path
    root: Path
    """`path` if it is a folder, otherwise its parent."""
    files: dict[str, FileFacts]
    """Facts by path relative to `root`, sorted."""

    @staticmethod
    def at(model: str) -> WeightFiles | None:
        """Return the files at a path as they are now. None if there are no weights.

        Reads no contents. Raises `WeightsError` for more than 100,000 files, and `OSError` if a
        file or folder cannot be inspected.
        """
        path = Path(os.path.abspath(model))  # noqa: PTH100  (a link's target may change later)
        root = path if path.is_dir() else path.parent
        facts = {name: _facts_of(root / name) for name in sorted(_names_at(path))}
        files = {name: each for name, each in facts.items() if each is not None}
        if not any(Path(name).suffix in WEIGHT_SUFFIXES for name in files):
            return None
        return WeightFiles(path, root, files)

    @staticmethod
    def look(model: str, load_format: str) -> WeightFiles | None:
        """Return the files at a path as `at` does, but log errors and return None.

        `load_format` is the engine's. Returns None for random weights.
        """
        if load_format == RANDOM_WEIGHTS:
            return None
        try:
            return WeightFiles.at(model)
        except OSError as error:
            _log.warning(
                "Which weights this engine has cannot be known: %s. Until it is started again, its"
                " tiers hold blocks of this process alone, and no other finds them.",
                error,
            )
            return None

    @property
    def size_bytes(self) -> int:
        """Total size of the files."""
        return sum(facts.size_bytes for facts in self.files.values())

    def known(self, cache: HashCache) -> str | None:
        """Return the fingerprint if all digests are cached, otherwise None. Reads no contents.

        Raises `WeightsError` if a file has changed since `at`, and `OSError` for errors of the file
        system.
        """
        found = cache.get({self._path_of(name): facts for name, facts in self.files.items()})
        if len(found) < len(self.files):
            return None
        return self._combined({name: found[self._path_of(name)] for name in self.files})

    def fingerprint(
        self, cache: HashCache | None = None, is_cancelled: Callable[[], bool] = lambda: False
    ) -> str:
        """Return the fingerprint, 32 hex digits. Blocks while it reads files that are not cached.

        Raises `WeightsError` if a file has changed since `at`, `CancelledError` once `is_cancelled`
        returns true, and `OSError` for errors of the file system.
        """
        names = list(self.files)
        # Shuffle, so that processes that start together share the work through the cache.
        random.shuffle(names)
        digests = {name: self._digest_of(name, cache, is_cancelled) for name in names}
        return self._combined(digests)

    def _digest_of(
        self, name: str, cache: HashCache | None, is_cancelled: Callable[[], bool]
    ) -> str:
        path, facts = self._path_of(name), self.files[name]
        if cache is not None and (found := cache.get({path: facts})):
            return found[path]
        began_ns = time.time_ns()
        digest = _hash(path, is_cancelled)
        if _facts_of(Path(path)) != facts:
            raise _changed(path)
        if cache is not None and facts.is_settled(began_ns):
            cache.put(path, facts, digest)
        return digest

    def _combined(self, digests: dict[str, str]) -> str:
        """Return the fingerprint. Raises `WeightsError` if files were changed, added or removed."""
        now = WeightFiles.at(str(self.path))
        if now is None or now.files != self.files:
            raise _changed(str(self.path))
        total = hashlib.sha256(b"kvelastic weights 2")
        for name in self.files:
            raw = os.fsencode(name)
            total.update(b"%d:" % len(raw) + raw + bytes.fromhex(digests[name]))
        return total.hexdigest()[:32]

    def _path_of(self, name: str) -> str:
        return str(self.root / name)


def _names_at(path: Path) -> Iterator[str]:
    """Yield the files below a folder, except notes and hidden files. For a file, yield its name."""
    if not path.is_dir():
        if path.is_file():
            yield path.name
        return
    count = 0
    for folder, below, names in os.walk(path, onerror=_raise):
        below[:] = [name for name in below if not name.startswith(".")]
        for name in names:
            if name.startswith(".") or Path(name).suffix.lower() in _NOTE_SUFFIXES:
                continue
            count += 1
            if count > _MOST_FILES:
                raise WeightsError(
                    f"{path} has more than {_MOST_FILES} files; give the model a folder of its own"
                )
            yield os.path.relpath(os.path.join(folder, name), path)  # noqa: PTH118


def _raise(error: OSError) -> None:
    raise error


def _facts_of(path: Path) -> FileFacts | None:
    """Return the facts of a regular file, or None for anything else, which cannot hold weights."""
    try:
        state = path.stat()
    except FileNotFoundError:  # a dangling link
        return None
    return FileFacts.of(state) if stat.S_ISREG(state.st_mode) else None


def _hash(path: str, is_cancelled: Callable[[], bool]) -> str:
    digest = hashlib.sha256()
    chunk = memoryview(bytearray(_CHUNK_BYTES))
    fd = os.open(path, _FLAGS)
    with os.fdopen(fd, "rb", buffering=0) as opened:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise _changed(path)
        while count := opened.readinto(chunk):
            digest.update(chunk[:count])  # releases the GIL
            if is_cancelled():
                raise CancelledError(f"hashing {path} was stopped")
    return digest.hexdigest()


def _changed(path: str) -> WeightsError:
    return WeightsError(f"{path} has changed since the engine started")
