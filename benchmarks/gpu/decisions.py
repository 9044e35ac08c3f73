"""What the figures of a run decide; "not measured" where there are none.

The rules are those of the product and of its documents: `kvelastic.device.page_size` for what a
page may cost, 1.2 of the bare calls for a page's cycle, 1 % of a dense cache for attention, 5 ms
for a limit.
"""

from __future__ import annotations

from typing import Any

from benchmarks.gpu.state import PASSED, State

CYCLE_BAR = 1.2
ATTENTION_BAR = 1.01
LIMIT_BAR_MS = 5.0
DEAR_TO_CREATE = 1.5
"""A cold cycle costs so many times a recycled one: then keeping handles is worth their memory."""
MIB = 1 << 20


def lines(run: State) -> list[str]:
    """A sentence for each decision."""
    readme = _readme(run)
    if run.simulated or run.quick:
        readme = ["The README may say nothing of this run: its figures are no evidence."]
    return [_page_size(run), _guard(run), _recycled(run), *readme]


def _number(run: State, step: str, name: str) -> float | None:
    value = run.figures(step).get(name)
    return float(value) if isinstance(value, int | float) else None


def _page_size(run: State) -> str:
    default, price = (_number(run, "facts", n) for n in ("default_page_bytes", "page_price_us"))
    told = "not measured"
    if default is not None and price is not None:
        told = f"{default / MIB:.0f} MiB at {price:.0f} us a page, by the driver's price"
    worst = run.figures("attention").get("attention_over_dense")
    asks = _smallest_within(worst) if isinstance(worst, dict) else None
    if asks is None:
        return f"Default page size: {told}; what attention asks for: not measured."
    return f"Default page size: {told}; attention is within 1 % of dense from {asks} on."


def _smallest_within(over_dense: dict[str, Any]) -> str | None:
    """`over_dense`: by MiB a page, the worst quotient of all batch sizes."""
    try:
        sizes = sorted((int(size), float(worst)) for size, worst in over_dense.items())
    except (TypeError, ValueError):
        return None
    for place, (size, _) in enumerate(sizes):
        if all(worst <= ATTENTION_BAR for _, worst in sizes[place:]):
            return f"{size} MiB"
    return "no size that was tried" if sizes else None


def _guard(run: State) -> str:
    price = _number(run, "vmm-page_cycle", "guarded_over_recycled")
    told = (
        "its price: not measured" if price is None else f"a cycle costs {price:.2f} times as much"
    )
    return f"Guard page, off by default: {told}; {_stale(run)}."


def _stale(run: State) -> str:
    if run.outcome("stale-columns").status == PASSED:
        return "it keeps a kernel that reads ahead from harm"
    return f"reading ahead: {run.outcome('stale-columns').status}"


def _recycled(run: State) -> str:
    ratio = _number(run, "vmm-page_cycle", "cold_over_recycled")
    if ratio is None:
        return "Recycled or cold: not measured."
    choice = (
        "keep handles" if ratio >= DEAR_TO_CREATE else "giving memory back at once costs little"
    )
    return f"Recycled or cold: a cold cycle costs {ratio:.2f} of a recycled one; {choice}."


def _readme(run: State) -> list[str]:
    cycle = _number(run, "vmm-page_cycle", "recycled_over_bare")
    seen = _number(run, "limit", "acknowledged_p99_ms")
    whole, first = (_number(run, "handover", name) for name in ("whole_ms", "first_ms"))
    moved = _number(run, "handover", "moved_gib")
    said = [
        _bar("a page's cycle", cycle, CYCLE_BAR, "of the bare calls"),
        _bar("a limit is acknowledged within", seen, LIMIT_BAR_MS, "ms (p99)"),
        "memory handed over: not measured"
        if whole is None or first is None or moved is None
        else f"{moved:.3g} GiB handed over in {whole:.1f} ms, the first page in {first:.2f} ms",
    ]
    for step, what in (
        ("battery", "the contract of drivers holds"),
        ("killed", "kill -9 gives everything back"),
        ("decode-eager", "decode under map and unmap gives the tokens of a dense cache"),
        ("decode-graphs", "and so it does with CUDA graphs"),
        ("transformers", "transformers gives the tokens of stock"),
    ):
        status = run.outcome(step).status
        said.append(f"{what}: {'yes' if status == PASSED else status}")
    return [f"The README may say: {each}." for each in said]


def _bar(what: str, value: float | None, bar: float, unit: str) -> str:
    if value is None:
        return f"{what}: not measured"
    return f"{what} {value:.2f} {unit} (bar: {bar:g}{'' if value <= bar else ', NOT met'})"
