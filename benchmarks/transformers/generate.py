"""`model.generate` with an `ElasticCache` beside a `DynamicCache`, and that one beside itself.

`generating.py` runs in a process of its own and takes the samples.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from transformers_process import environment_of

from benchmarks.pages import ROOT, Table
from benchmarks.transformers.comparison import headings, row
from benchmarks.transformers.engines import LEDGER, SERIES
from kvelastic.shared import ledger, segment

ROUNDS, QUICK_ROUNDS = 12, 2
NEW_TOKENS, QUICK_NEW_TOKENS = 96, 8
NAMES = ("DynamicCache", "DynamicCache again", "ElasticCache")


def measure(model: Path, *, quick: bool) -> Table:
    """Raises `subprocess.CalledProcessError` if the process fails; what it says is on stderr."""
    rounds = QUICK_ROUNDS if quick else ROUNDS
    new_tokens = QUICK_NEW_TOKENS if quick else NEW_TOKENS
    command = [sys.executable, "-m", "benchmarks.transformers.generating", str(model)]
    try:
        done = subprocess.run(
            [*command, str(rounds), str(new_tokens), *NAMES],
            check=True,
            cwd=ROOT,
            env=environment_of(SERIES, KVELASTIC_LEDGER=LEDGER, TQDM_DISABLE="1"),
            stdout=subprocess.PIPE,
        )
    finally:
        segment.reap()  # of a process that was killed
        ledger.reap()
    samples = json.loads(done.stdout)
    tokens_per_s, cpu_us = (
        [samples[name][figure] for name in NAMES] for figure in ("tokens_per_s", "cpu_us_a_token")
    )
    return Table(
        headings(*NAMES),
        [
            row("tokens a second", *tokens_per_s, more_is_better=True),
            row("CPU time of a token, us", *cpu_us, more_is_better=False),
        ],
        [
            f"{rounds} rounds of {samples['sequences']} sequences,"
            f" {samples['prompt_tokens']} tokens in and {new_tokens} out each; sequences that"
            " differ from DynamicCache's:"
            f" {samples['differing']}."
        ],
        {"generate": samples},
    )
