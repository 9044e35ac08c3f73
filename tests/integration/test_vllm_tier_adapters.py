"""Blocks of a LoRA adapter are named by what it holds, as long as anybody can know that."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from waiting import DEADLINE_S, wait_until

from kvelastic.integration.vllm import tier_adapters
from kvelastic.integration.vllm.tier_adapters import Adapters, adapter_keys
from kvelastic.tiers import weights_fingerprint


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text('{"r": 8}')
    (folder / "adapter_model.safetensors").write_bytes(b"weights" * 100)
    return folder


def change(path: Path, by: bytes = b"others!") -> None:
    (path / "adapter_model.safetensors").write_bytes(by * 100)


def test_same_adapter_contents_have_the_same_key(path: Path) -> None:
    assert Adapters().contents_of(1, str(path)) == Adapters().contents_of(7, str(path))


def test_changed_adapter_has_another_key_after_reload(path: Path) -> None:
    adapters = Adapters()
    before = adapters.contents_of(1, str(path))
    change(path)
    adapters.forget(1)
    after = adapters.contents_of(1, str(path))
    assert after != before
    assert after == Adapters().contents_of(1, str(path))


def test_adapter_changed_while_loaded_has_a_private_key(path: Path) -> None:
    adapters = Adapters()
    before = adapters.contents_of(1, str(path))
    change(path)
    after = adapters.contents_of(1, str(path))
    assert after not in (before, Adapters().contents_of(1, str(path)))
    assert adapters.contents_of(1, str(path)) == after, "its own prefix cache still works"
    change(path, b"weights")
    assert adapters.contents_of(1, str(path)) not in (before, after)


def test_every_byte_of_an_adapter_counts(path: Path) -> None:
    file = path / "adapter_model.safetensors"
    content = bytearray(12 << 20)
    file.write_bytes(content)
    before = Adapters().contents_of(1, str(path))
    content[9_437_184 + 100_000] = 1
    file.write_bytes(content)
    assert Adapters().contents_of(1, str(path)) != before


def test_unhashed_large_adapter_has_a_private_key(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = Adapters().contents_of(1, str(path))
    monkeypatch.setattr(tier_adapters, "_AT_ONCE_BYTES", 0)
    may_go_on = threading.Event()
    original = weights_fingerprint._hash

    def hash_when_told(*arguments: Any) -> str:
        assert may_go_on.wait(DEADLINE_S)
        return original(*arguments)

    monkeypatch.setattr(weights_fingerprint, "_hash", hash_when_told)
    adapters, others = Adapters(), Adapters()
    first = adapters.contents_of(1, str(path))
    assert first == adapters.contents_of(1, str(path)) != others.contents_of(1, str(path))
    change(path)  # the others' workers may have either
    other = others.contents_of(1, str(path))
    change(path, b"weights")
    adapters.forget(1)
    assert adapters.contents_of(1, str(path)) not in (expected, first)
    may_go_on.set()
    wait_until(lambda: adapters.contents_of(1, str(path)) == expected, "the adapter is hashed")
    assert others.contents_of(1, str(path)) not in (expected, other)


def test_unreadable_adapter_has_a_private_key() -> None:
    names = {Adapters().contents_of(1, "a-name-on-a-hub") for _ in range(2)}
    assert len(names) == 2


def test_adapter_key_is_kept_for_the_request(path: Path) -> None:
    lora = SimpleNamespace(lora_int_id=1, lora_path=str(path))
    request = SimpleNamespace(lora_request=lora)
    first = adapter_keys(lambda _: [("lora", "a", str(path))], request)
    change(path)
    assert adapter_keys(lambda _: [("lora", "a", str(path))], request) == first
    assert first[0] == ("lora", "a", str(path))
    assert adapter_keys(lambda _: [], SimpleNamespace(lora_request=None)) == []
