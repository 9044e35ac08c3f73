"""The program that the tests of transformers are built on, with nothing of kvelastic in it."""

from __future__ import annotations

from pathlib import Path

import needs
import pytest
from transformers_process import TransformersEngine, make_prompts

pytestmark = [needs.transformers, pytest.mark.timeout(600)]


@pytest.mark.parametrize("series", needs.TRANSFORMERS)
def test_stock_runs_give_equal_tokens(series: str, tmp_path: Path) -> None:
    """Cold, prefix-cached, and by the other engine; and zeros in the prefix cache do show."""
    prompts = make_prompts(16, seed=3)
    with (
        TransformersEngine(series, tmp_path / "one.log") as one,
        TransformersEngine(series, tmp_path / "other.log") as other,
    ):
        assert one.wait_until_ready().startswith(f"{series}.")
        assert other.wait_until_ready().startswith(f"{series}.")
        cold = one.burst(prompts, 16)
        assert all(len(tokens) == 16 for tokens in cold)
        assert len({tuple(tokens) for tokens in cold}) == len(cold)
        assert other.burst(prompts, 16) == cold

        before = one.counters()
        assert one.burst(prompts, 16) == cold
        assert one.counters()["prefix_tokens"] > before["prefix_tokens"]

        assert one.ask("zero")["zeroed"] > 0
        zeroed = one.burst(prompts, 16)
        assert sum(a != b for a, b in zip(zeroed, cold, strict=True)) > len(cold) // 2

        long = other.submit(prompts[:1], 4000)
        other.cancel(long[0])
        after = other.counters()
        assert (after["active"], after["waiting"], after["is_alive"]) == (0, 0, True)
        assert one.stop() == other.stop() == 0
