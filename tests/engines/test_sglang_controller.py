"""A real SGLang behind the controller: what one has put to sleep, the next one knows."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import needs
import pytest
from sglang_pair import PAGED, PROMPTS, Pairs
from waiting import wait_until

from kvelastic.shared import segment

sys.path.append(str(Path(__file__).parents[1] / "controller"))
from running import Controller

pytestmark = [needs.sglang, pytest.mark.timeout(600)]

MODEL = "tiny"


def ask(front: Controller, prompt: list[int]) -> list[int]:
    """Through the controller, by SGLang's own name for the model: its folder."""
    answer = front.post(
        "/v1/completions",
        {"model": MODEL, "prompt": prompt, "max_tokens": 8, "temperature": 0},
        timeout=300,
    )
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return [int(word[1:]) for word in text.split()]


@pytest.mark.end_to_end
def test_new_controller_finds_sglang_asleep_and_wakes_it(
    sglang_pairs: Pairs, sglang_model: Path
) -> None:
    pair = sglang_pairs[PAGED]
    config = {
        "models": [
            {
                "name": MODEL,
                "engine": "sglang",
                "url": f"http://127.0.0.1:{pair.server.port}",
                "served_name": str(sglang_model),
                "instance": pair.name,
            }
        ],
        "sleep": {"min_sleep": 0},
    }
    with Controller(config) as front:
        assert front.state(MODEL) == "awake"
        before = ask(front, PROMPTS[0])
        assert front.post(f"/action/sleep/{MODEL}").json()["success"]
        assert pair.usage()["mapped_bytes"] == pair.resident_bytes() == 0
        assert segment.inspect(pair.name).engine_asleep is True
        front.end(signal.SIGKILL)
    with Controller(config) as front:
        wait_until(lambda: front.state(MODEL) == "asleep")
        assert list(front.get("/sleep/status").json()["sleeping_models"]) == [MODEL]
        assert ask(front, PROMPTS[0]) == before
        assert front.state(MODEL) == "awake"
        assert segment.inspect(pair.name).engine_asleep is False
        # By somebody else, of whom the controller hears nothing.
        pair.server.post("/release_memory_occupation")
        wait_until(lambda: front.state(MODEL) == "asleep")
        assert ask(front, PROMPTS[0]) == before
