"""Contiguous pages under an `ElasticCache`, without torch: Ctrl-C, and the process's reserve."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from kvelastic import _vmm, config
from kvelastic.device.selection import Device
from kvelastic.integration.transformers.growing_pages import GrowingPages, open_growing_pages
from kvelastic.units import MIB_BYTES

DEVICE = Device(f"growing-pages-{os.getpid()}", 64 * MIB_BYTES, _vmm.HostDriver)


@pytest.fixture
def opened() -> Iterator[Callable[[], GrowingPages]]:
    with ExitStack() as stack:

        def opens() -> GrowingPages:
            pages = open_growing_pages(
                config.load(), DEVICE, engine="transformers", lanes=1, name=None
            )
            stack.callback(pages.close, is_unused=True)
            return pages

        yield opens


class Interrupted:
    """Blocks of a pool, where SIGINT comes before or after a call of one method."""

    def __init__(self, blocks: Any, method: str, *, is_after: bool) -> None:
        self._blocks = blocks
        self._method = method
        self._is_after = is_after

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._blocks, name)
        if name != self._method:
            return real

        def call(*arguments: Any) -> Any:
            if self._is_after:
                real(*arguments)
            signal.raise_signal(signal.SIGINT)

        return call


@pytest.mark.parametrize("is_after", [False, True])
@pytest.mark.parametrize("method", ["alloc", "free", "trim"])
def test_interrupted_call_leaves_the_pages_usable(
    opened: Callable[[], GrowingPages],
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    is_after: bool,
) -> None:
    pages = opened()
    blocks = pages.pool.blocks
    pages.grow(3)
    with monkeypatch.context() as patch:
        patch.setattr(pages.pool, "blocks", Interrupted(blocks, method, is_after=is_after))
        with pytest.raises(KeyboardInterrupt):
            pages.grow(5) if method == "alloc" else pages.shrink(1, trim=True)
    for wanted in (4, 6):
        pages.grow(wanted)
        assert pages.held == wanted
        assert blocks.stats()["blocks_used"] == wanted * 64 - 1
    pages.shrink(0, trim=True)
    assert blocks.stats()["blocks_used"] == 0


def test_interrupted_cache_closes_without_used_blocks(
    opened: Callable[[], GrowingPages], monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = opened()
    blocks = pages.pool.blocks
    with monkeypatch.context() as patch:
        patch.setattr(pages.pool, "blocks", Interrupted(blocks, "alloc", is_after=True))
        with pytest.raises(KeyboardInterrupt):
            pages.grow(2)
    pages.close(is_unused=True)
    assert blocks.mapped_bytes == 0


def test_next_pages_reserve_after_a_close(
    opened: Callable[[], GrowingPages], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVELASTIC_RESERVE", "8M")

    def reserve_bytes(pages: GrowingPages) -> int:
        (ledger,) = pages.pool.ledgers
        return ledger.member.reserve_bytes

    first, second = opened(), opened()
    assert (reserve_bytes(first), reserve_bytes(second)) == (8 * MIB_BYTES, 0)
    first.close(is_unused=True)
    assert reserve_bytes(opened()) == 8 * MIB_BYTES
    assert reserve_bytes(opened()) == 0
