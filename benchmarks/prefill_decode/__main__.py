"""`scripts/bench prefill_decode`: prompts in one vLLM and tokens in another, beside one engine.

    scripts/bench prefill_decode                        about ten minutes
    scripts/bench prefill_decode --part first_token     one of both parts
    scripts/bench prefill_decode --quick                a tiny model, one round; no evidence

README.md says what the figures mean.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks import pages
from benchmarks.harness import end_by_exception
from benchmarks.prefill_decode import first_token, interference
from benchmarks.prefill_decode.engines import Engines, engines
from benchmarks.vllm.models import prepare

PROMPTS, QUICK_PROMPTS = (272, 528, 976), (272, 976)
"""Whole blocks and a half: the decode engine computes half a block in each case."""
ROUNDS, INTERFERENCE_ROUNDS = 5, 2
RUN_S, QUICK_RUN_S = 25.0, 3.0


Parts = dict[str, tuple[str, pages.Measure]]


def parts(started: Engines | None) -> Parts:
    """The parts over running engines; None: for their names only."""

    def of_first_token(quick: bool) -> pages.Table:
        assert started is not None
        lengths, rounds = (QUICK_PROMPTS, 1) if quick else (PROMPTS, ROUNDS)
        return first_token.measure(started, lengths, rounds)

    def of_interference(quick: bool) -> pages.Table:
        assert started is not None
        run_s, rounds = (QUICK_RUN_S, 1) if quick else (RUN_S, INTERFERENCE_ROUNDS)
        return interference.measure(started, run_s, rounds)

    return {
        "first_token": ("Seconds to the first token on the decode engine", of_first_token),
        "interference": ("Time between tokens while long prompts arrive", of_interference),
    }


def main() -> int:
    """Measure, print and keep; returns the exit status."""
    given = pages.arguments("prefill_decode", __doc__, parts(None))
    with TemporaryDirectory(prefix="kvelastic-bench-pd-") as folder:
        try:
            model = prepare("tiny" if given.quick else "smollm2", Path(folder))
            with engines(model, Path(folder)) as started:
                title = "Prefill and decode in two engines"
                return pages.run("prefill_decode", title, given, parts(started))
        except (AssertionError, OSError, subprocess.SubprocessError) as error:
            print(f"FAILED: {error or type(error).__name__}", file=sys.stderr)
            return 1


if __name__ == "__main__":
    end_by_exception()
    sys.exit(main())
