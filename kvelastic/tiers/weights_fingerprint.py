"""What a model's weights are, told apart by their contents: for the namespace of its tiers.

    fingerprint_of_weights("/models/llama")     # 32 hex digits, or None: nobody can say

A name says nothing of contents: weights are replaced under the same path, and KV of the old ones
would answer as if it were of the new. Reading all of them takes as long as loading the model, so
files are sampled: their names and sizes, their first and last 64 KiB (which hold the tables of
contents), and 4 KiB of each MiB between. A file of 8 MiB or less is read whole.

Pure functions over a folder. They block as long as reading takes, some ten milliseconds a GiB.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

WEIGHT_SUFFIXES: Final = frozenset(
    {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz", ".ckpt", ".tensors"}
)
DESCRIBING_SUFFIXES: Final = frozenset({".json", ".py"})
"""What changes how weights are computed with: configurations, quantization, a model's own code."""

_WHOLE_BYTES: Final = 8 << 20
_EDGE_BYTES: Final = 64 << 10
_STRIDE_BYTES: Final = 1 << 20
_SAMPLE_BYTES: Final = 4 << 10


def fingerprint_of_weights(model: str) -> str | None:
    """A fingerprint of the weights at a path: a folder, or one file.

    None where there are none to look at (a name that is not a local path), or they cannot be read.
    """
    path = Path(model)
    digest = hashlib.sha256(b"kvelastic weights 1")
    try:
        files = sorted(_files_of(path), key=str)
        if not any(file.suffix in WEIGHT_SUFFIXES for file in files):
            return None
        for file in files:
            name = str(file.relative_to(path)) if file != path else file.name
            digest.update(f"{len(name)}:{name}".encode())
            _add_file(digest, file)
    except OSError:
        return None
    return digest.hexdigest()[:32]


def _files_of(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
        return
    for file in path.rglob("*"):
        if file.suffix in WEIGHT_SUFFIXES | DESCRIBING_SUFFIXES and file.is_file():
            yield file


def _add_file(digest: hashlib._Hash, file: Path) -> None:
    with file.open("rb", buffering=0) as opened:
        size_bytes = os.fstat(opened.fileno()).st_size
        digest.update(f"{size_bytes};".encode())
        for offset, length in samples(size_bytes):
            opened.seek(offset)
            left = length
            while left > 0:
                read = opened.read(left)
                if not read:
                    raise OSError(f"{file} became shorter while it was read")
                digest.update(read)
                left -= len(read)


def samples(size_bytes: int) -> list[tuple[int, int]]:
    """Which parts of a file of that size are read: offset and length of each, in order."""
    if size_bytes <= _WHOLE_BYTES:
        return [(0, size_bytes)]
    last = size_bytes - _EDGE_BYTES
    return [
        (0, _EDGE_BYTES),
        *((offset, _SAMPLE_BYTES) for offset in range(_STRIDE_BYTES, last, _STRIDE_BYTES)),
        (last, _EDGE_BYTES),
    ]
