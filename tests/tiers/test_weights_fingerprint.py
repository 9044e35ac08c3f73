"""The identity of weights is that of every byte, is read once, and is never that of other files."""

from __future__ import annotations

import json
import os
import random
import shutil
import stat
import time
from pathlib import Path

import pytest

from kvelastic.tiers import hash_cache, weights_fingerprint
from kvelastic.tiers.hash_cache import FileFacts, HashCache, default_folder
from kvelastic.tiers.weights_fingerprint import (
    CancelledError,
    WeightFiles,
    WeightsError,
)

MIB = 1 << 20


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"hidden_size": 128}')
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * (5 * MIB // 256))
    (folder / "README.md").write_text("not read")
    return folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HashCache:
    monkeypatch.setattr(hash_cache, "_SETTLED_NS", -60_000_000_000)
    return HashCache(tmp_path / "cache")


def fingerprint_of_weights(model: str) -> str | None:
    weights = WeightFiles.at(model)
    return None if weights is None else weights.fingerprint()


def files_of(model: Path) -> WeightFiles:
    files = WeightFiles.at(str(model))
    assert files is not None
    return files


def change(file: Path, offset: int, with_bytes: bytes) -> None:
    """In place, with the times of before."""
    before = file.stat()
    with file.open("r+b") as opened:
        opened.seek(offset)
        opened.write(with_bytes)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_every_change_of_a_large_file_is_detected(model: Path) -> None:
    large = model / "model.safetensors"
    large.write_bytes(random.Random(1).randbytes(20 * MIB))
    first = fingerprint_of_weights(str(model))
    content = large.read_bytes()
    rng = random.Random(2)
    for offset, length in [
        (9 * MIB + 8192, 900 << 10),  # nearly a mebibyte of zeros
        *((rng.randrange(0, 20 * MIB - 8192), 8192) for _ in range(10)),  # a norm
        (12 * MIB + 777_777, 1),
        (20 * MIB - 1, 1),
    ]:
        zeros = bytes(length)
        if content[offset : offset + length] == zeros:
            zeros = b"\1" * length
        change(large, offset, zeros)
        assert fingerprint_of_weights(str(model)) != first, (offset, length)
        change(large, offset, content[offset : offset + length])
    assert fingerprint_of_weights(str(model)) == first


def test_all_files_except_notes_are_hashed(model: Path) -> None:
    first = fingerprint_of_weights(str(model))
    (model / "README.md").write_text("changed")
    (model / ".gitattributes").write_text("x")
    (model / ".cache").mkdir()
    (model / ".cache" / "download.json").write_text("x")
    assert fingerprint_of_weights(str(model)) == first
    (model / "norms.dat").write_bytes(b"1")
    second = fingerprint_of_weights(str(model))
    assert second != first
    (model / "norms.dat").write_bytes(b"2")
    assert fingerprint_of_weights(str(model)) not in (first, second)
    (model / "norms.dat").rename(model / "other.dat")
    assert fingerprint_of_weights(str(model)) not in (first, second)


def test_single_file_and_linked_folder_are_hashed(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"a" * 100)
    first = fingerprint_of_weights(str(file))
    assert first is not None
    file.write_bytes(b"b" * 100)
    assert fingerprint_of_weights(str(file)) not in (None, first)
    (tmp_path / "link").symlink_to(model)
    assert fingerprint_of_weights(str(tmp_path / "link")) == fingerprint_of_weights(str(model))


@pytest.mark.parametrize("odd", ["fifo", "dangling", "loop"])
def test_pipes_and_broken_links_are_ignored(model: Path, odd: str) -> None:
    first = fingerprint_of_weights(str(model))
    if odd == "fifo":
        os.mkfifo(model / "pipe.bin")
    elif odd == "dangling":
        (model / "lost.bin").symlink_to(model / "nowhere")
    else:
        (model / "again").symlink_to(model)
    assert fingerprint_of_weights(str(model)) == first


def test_missing_weights_have_no_fingerprint(tmp_path: Path, model: Path) -> None:
    assert fingerprint_of_weights("org/some-model") is None
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "config.json").write_text("{}")
    assert fingerprint_of_weights(str(empty)) is None


def test_too_many_files_are_rejected(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_fingerprint, "_MOST_FILES", 1)
    with pytest.raises(WeightsError, match="more than 1 files"):
        WeightFiles.at(str(model))


def replaced(model: Path) -> None:
    new = model / "model.safetensors.new"
    new.write_bytes(b"x" * (20 * MIB))
    new.rename(model / "model.safetensors")


@pytest.mark.parametrize(
    "alter",
    [
        replaced,
        lambda model: change(model / "model.safetensors", 5, b"new"),
        lambda model: (model / "config.json").unlink(),
        lambda model: (model / "more.bin").write_bytes(b"1"),
        shutil.rmtree,
    ],
    ids=["replaced", "in-place", "removed", "added", "gone"],
)
def test_files_changed_since_start_are_rejected(model: Path, cache, alter) -> None:
    """The engine has loaded one of the two; nobody knows which."""
    weights = files_of(model)
    weights.fingerprint(cache)
    alter(model)
    with pytest.raises(OSError, match=r"changed|No such file"):
        weights.fingerprint(cache)
    with pytest.raises(OSError, match=r"changed|No such file"):
        weights.known(cache)


def test_files_changed_during_hashing_are_rejected(model: Path, cache) -> None:
    weights = files_of(model)
    chunks = iter(range(100))

    def alter_once() -> bool:
        if next(chunks) == 3:
            change(model / "model.safetensors", 0, b"new")
        return False

    with pytest.raises(WeightsError, match="changed"):
        weights.fingerprint(cache, alter_once)
    assert files_of(model).known(cache) is None, "nor is anything remembered"


def test_hashing_can_be_cancelled(model: Path) -> None:
    with pytest.raises(CancelledError):
        files_of(model).fingerprint(is_cancelled=lambda: True)


def test_files_are_read_once(model: Path, cache, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = files_of(model)
    assert weights.known(cache) is None
    first = weights.fingerprint(cache)
    monkeypatch.setattr(weights_fingerprint, "_hash", None)
    assert weights.known(cache) == weights.fingerprint(cache) == first
    assert files_of(model).known(cache) == first


def test_change_with_the_old_mtime_is_detected(model: Path, cache) -> None:
    first = files_of(model).fingerprint(cache)
    change(model / "model.safetensors", 3 * MIB, b"new")
    weights = files_of(model)
    assert weights.known(cache) is None
    assert weights.fingerprint(cache) != first


def test_freshly_written_file_is_not_cached(model: Path, tmp_path: Path) -> None:
    """Within one tick of the file system's clock a second change would not show."""
    cache = HashCache(tmp_path / "cache")
    weights = files_of(model)
    weights.fingerprint(cache)
    assert weights.known(cache) is None
    facts = FileFacts(1, 0, 0, 1)
    assert facts.is_settled(time.time_ns())
    assert not facts._replace(ctime_ns=time.time_ns() + 10**12).is_settled(time.time_ns())


def test_cache_is_private_to_the_user(model: Path, cache, tmp_path: Path) -> None:
    weights = files_of(model)
    first = weights.fingerprint(cache)
    folder = tmp_path / "cache"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for name in ("weights.json", "weights.lock"):
        assert stat.S_IMODE((folder / name).stat().st_mode) == 0o600
    (folder / "weights.json").chmod(0o620)
    assert weights.known(cache) is None, "others may have written there"
    (folder / "weights.json").chmod(0o600)
    assert weights.known(cache) == first
    folder.chmod(0o777)
    assert weights.known(cache) is None
    assert weights.fingerprint(cache) == first


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[" * 100_000,
        b"[]",
        b'{"version": 2, "files": {}}',
        b'{"version": 1, "files": []}',
        b'{"version": 1, "files": {"a": 1}}',
        b'{"version": 1, "files": {"a": [1, 2, 3, 4]}}',
        b'{"version": 1, "files": {"a": [[], 2, 3, 4, "00"]}}',
        b'{"version": 1, "files": {"a": [1, 2, 3, 4, "x"]}}',
        b"\xff" * 100,
        b" " * (9 << 20),
    ],
    ids=range(12),
)
def test_damaged_cache_is_ignored_and_replaced(model: Path, cache, tmp_path, content) -> None:
    folder = tmp_path / "cache"
    folder.mkdir(0o700)
    file = folder / "weights.json"
    file.touch(0o600)
    file.write_bytes(content)
    weights = files_of(model)
    assert weights.known(cache) is None
    first = weights.fingerprint(cache)
    assert weights.known(cache) == first == fingerprint_of_weights(str(model))


def test_cache_size_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hash_cache, "_MOST_ENTRIES", 3)
    cache = HashCache(tmp_path / "cache")
    facts = FileFacts(1, 2, 3, 4)
    for number in range(5):
        cache.put(f"/{number}", facts, f"{number:064x}")
    kept = json.loads((tmp_path / "cache" / "weights.json").read_text())["files"]
    assert list(kept) == ["/2", "/3", "/4"]


def test_inaccessible_cache_is_empty(tmp_path: Path) -> None:
    cache = HashCache(tmp_path / ("name" * 64) / "cache")  # longer than a name may be
    assert cache.get({"a": FileFacts(1, 2, 3, 4)}) == {}


def test_unwritable_cache_is_ignored(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    cache = HashCache(tmp_path / "file" / "cache")
    weights = files_of(model)
    assert weights.known(cache) is None
    assert weights.fingerprint(cache) == weights.fingerprint(HashCache(None))


def test_default_cache_folder_follows_xdg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache/me")
    assert default_folder() == Path("/var/cache/me/kvelastic")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", "/home/me")
    assert default_folder() == Path("/home/me/.cache/kvelastic")
