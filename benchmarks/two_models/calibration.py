"""The speed of this machine, measured with a stock server before anything else runs.

Both loads are scaled by it, so that a burst needs the same memory at once on any processor.
"""

from __future__ import annotations

import random
import statistics
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from vllm_server import VllmServer

from benchmarks.two_models.client import WORDS, Request, run_burst
from benchmarks.two_models.servers import Servers, stock_launch
from benchmarks.two_models.workload import BLOCK_BYTES, BLOCK_TOKENS, MODELS

REQUESTS = 20
"""As many as a burst has."""
PROMPT_TOKENS = 256
_ANSWER_TOKENS = 48
_ROUNDS = 3
_BLOCKS = 2 * REQUESTS * (PROMPT_TOKENS + _ANSWER_TOKENS) // BLOCK_TOKENS
"""All prompts of a round stay cached until it ends."""


@dataclass(frozen=True)
class Speed:
    """Of this machine with this model."""

    prompt_tokens_per_s: float
    """Of many prompts at once."""
    step_s: float
    """From one token to the next with a burst under way."""


def measure(model_folder: Path) -> Speed:
    """Start a server, ask it, and end it: under a minute. Raises what a burst raises."""
    launch = stock_launch(MODELS[0], _BLOCKS * BLOCK_BYTES, prefix_cache=True)
    with (
        TemporaryDirectory(prefix="kvelastic-two-models-") as folder,
        Servers(model_folder, Path(folder), {("calibration", MODELS[0]): launch}) as servers,
    ):
        servers.start()
        server = servers["calibration", MODELS[0]]
        _round(server, 0)
        rounds = [_round(server, number) for number in range(1, _ROUNDS + 1)]
        servers.stop()
    return Speed(
        statistics.median(one.prompt_tokens_per_s for one in rounds),
        statistics.median(one.step_s for one in rounds),
    )


def _round(server: VllmServer, number: int) -> Speed:
    """First all prompts, then the same ones out of the cache with answers."""
    pick = random.Random(f"calibration {number}")
    prompts = [pick.choices(WORDS, k=PROMPT_TOKENS) for _ in range(REQUESTS)]
    answers = run_burst(server.port, [Request(0.0, prompt, 1) for prompt in prompts])
    computed_s = max(answer.first_token_s for answer in answers)
    answers = run_burst(server.port, [Request(0.0, prompt, _ANSWER_TOKENS) for prompt in prompts])
    answered_s = statistics.median(a.last_token_s - a.first_token_s for a in answers)
    return Speed(REQUESTS * PROMPT_TOKENS / computed_s, answered_s / (_ANSWER_TOKENS - 1))
