"""What a large capacity costs: an elastic cache for 1M tokens beside stock ones for 16K."""

from __future__ import annotations

from pathlib import Path

from open_memfds import held_bytes
from transformers_process import TransformersEngine, make_prompts

from benchmarks.harness import Figure
from benchmarks.pages import Table
from benchmarks.transformers.comparison import AGAIN, ELASTIC, NAMES, STOCK
from benchmarks.transformers.engines import BLOCK_TOKENS, started
from benchmarks.transformers.workload import AT_ONCE
from kvelastic.device.process_memory import anonymous_bytes

ROUNDS, QUICK_ROUNDS = 5, 1
STOCK_TOKENS, ELASTIC_TOKENS = 1 << 14, 1 << 20
NEW_TOKENS = 32
MB = 1_000_000


def measure(folder: Path, *, quick: bool) -> Table:
    """Each round starts all engines; raises what `started` raises."""
    arguments = {
        name: ["--block-tokens", str(BLOCK_TOKENS), "--num-blocks", str(tokens // BLOCK_TOKENS)]
        for name, tokens in zip(NAMES, (STOCK_TOKENS, STOCK_TOKENS, ELASTIC_TOKENS), strict=True)
    }
    prompts = make_prompts(AT_ONCE, seed=1)
    held: dict[str, list[dict[str, float]]] = {"after start": [], f"after {AT_ONCE} prompts": []}
    for _ in range(QUICK_ROUNDS if quick else ROUNDS):
        with started(folder, arguments) as engines:
            for when, samples in held.items():
                if when != "after start":
                    for engine in engines.values():
                        engine.burst(prompts, NEW_TOKENS)
                samples.append({name: _held_mb(engine) for name, engine in engines.items()})
    figures = []
    for when, samples in held.items():
        for name, capacity in ((AGAIN, "16K again"), (ELASTIC, "kvelastic with 1M")):
            figures.append(
                Figure(
                    f"{when}: {capacity}, more than stock with 16K",
                    "MB",
                    [one[name] - one[STOCK] for one in samples],
                    "< 50 MB" if name == ELASTIC else "",
                    note=", ".join(f"{one[name]:.1f} beside {one[STOCK]:.1f}" for one in samples),
                )
            )
    return Table.of_figures(figures, ["MB that the process holds: anonymous, and KV cache."])


def _held_mb(engine: TransformersEngine) -> float:
    return (anonymous_bytes(engine.pid) + held_bytes(engine.pid)) / MB
