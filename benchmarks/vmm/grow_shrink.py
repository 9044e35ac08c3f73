"""Part 5: the KV of Llama-3-8B grows by 8 GiB and shrinks again, kvelastic and kvcached in turns.

It goes in steps of 128 MiB, which is one page id of kvcached's: kvelastic through its own Range (a
step is one batch), kvcached's calls replayed through ctypes (`kvcached_calls`). All have the same
driver, in the same process and in the same round, and the order changes from round to round.

recycled     the memory was kept by kvelastic since the last time: nothing is created or destroyed
given back   the memory came from the device and went back to it, as kvcached's always does

A figure is the median step times the number of steps. Whole sweeps are kept as well, but compare
them with care: a busy machine interrupts a sweep of 40 ms many times and one of 4 ms perhaps never,
which once made kvelastic look more than twice as good as it is.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.vmm import driver_kinds, kvcached_calls, own_pages
from benchmarks.vmm.bare_cuda import BareCuda
from benchmarks.vmm.models import GIB, LLAMA_3_8B, MIB
from benchmarks.vmm.prices import PROFILES
from benchmarks.vmm.section import Section, number
from kvelastic.device import page_size

TITLE = "Grow and shrink"
FULL: dict[str, Any] = {"kv_bytes": 8 * GIB, "rounds": 7}
QUICK: dict[str, Any] = {"kv_bytes": GIB // 2, "rounds": 2}
BAR = 1.0
STEP_BYTES = 128 * MIB


@dataclass(frozen=True)
class Contestant:
    """One way to grow and shrink; `before` and `after` are not timed."""

    name: str
    page_bytes: int
    handles: int
    before: Callable[[], object]
    grow: Callable[[int], object]
    """Takes the number of the step."""
    shrink: Callable[[int], object]
    after: Callable[[], object]


def measure(kind: str, *, kv_bytes: int, rounds: int) -> dict[str, Any]:
    """For each contestant microseconds of each step of each round, growing and shrinking."""
    cuda = BareCuda()
    # A small GPU grows by less.
    kv_bytes = min(kv_bytes, cuda.free_bytes() * 9 // 10 // GIB * GIB)
    contestants = make_contestants(cuda, driver_kinds.open_seam(kind), kv_bytes)
    told: dict[str, dict[str, Any]] = {
        each.name: {
            "page_bytes": each.page_bytes, "handles": each.handles, "grow_us": [], "shrink_us": []
        }
        for each in contestants
    }  # fmt: skip
    gc.disable()
    for turn in range(rounds + 1):
        shift = turn % len(contestants)
        for each in contestants[shift:] + contestants[:shift]:
            each.before()
            steps = range(kv_bytes // STEP_BYTES)
            grow_us = [_us(each.grow, step) for step in steps]
            shrink_us = [_us(each.shrink, step) for step in steps]
            each.after()
            if turn > 0:  # the first round warms up
                told[each.name]["grow_us"].append(grow_us)
                told[each.name]["shrink_us"].append(shrink_us)
    return {"kv_bytes": kv_bytes, "ctypes_us": cuda.ctypes_us(), "contestants": told}


def _us(call: Callable[[int], object], step: int) -> float:
    start = time.perf_counter_ns()
    call(step)
    return (time.perf_counter_ns() - start) / 1000


def make_contestants(cuda: BareCuda, seam: Any, kv_bytes: int) -> list[Contestant]:
    """kvelastic's pages of three sizes, and both layouts of kvcached.

    The default of this driver, the smallest that holds eight blocks, and kvcached's.
    """
    contiguous = kvcached_calls.contiguous(LLAMA_3_8B)
    default_bytes = page_size.for_price(page_size.measured_price_us(seam), seam.total_bytes)
    sizes = {default_bytes: "default", LLAMA_3_8B.paged().page_bytes: ""}
    sizes.setdefault(contiguous.page_id_bytes, "")
    return [
        *(one for size, what in sizes.items() for one in _own(seam, size, kv_bytes, what)),
        _theirs(cuda, contiguous, kv_bytes),
        _theirs(cuda, kvcached_calls.per_layer(LLAMA_3_8B), kv_bytes),
    ]


def _own(seam: Any, page_bytes: int, kv_bytes: int, what: str) -> list[Contestant]:
    layout = LLAMA_3_8B.paged(page_bytes)
    pages = range(layout.pages_for_blocks(LLAMA_3_8B.blocks_of(kv_bytes)))
    memory = own_pages.reserve(seam, layout, len(pages))

    per_step = STEP_BYTES // layout.page_bytes

    def of(step: int) -> range:
        return pages[step * per_step : (step + 1) * per_step]

    def fill() -> None:
        memory.map(pages)
        memory.unmap(pages)

    def grow(step: int) -> None:
        memory.map(of(step))

    def keep(step: int) -> None:
        memory.unmap(of(step))

    def give_back(step: int) -> None:
        memory.unmap(of(step), destroy=True)

    name = f"kvelastic, {layout.page_bytes // MIB} MiB{what and f' ({what})'}"
    size, count = layout.page_bytes, len(pages)
    return [
        # Only one contestant holds memory at a time, so a device needs room for one.
        Contestant(f"{name}, recycled", size, count, fill, grow, keep, memory.trim),
        Contestant(f"{name}, given back", size, count, _nothing, grow, give_back, _nothing),
    ]


def _theirs(cuda: BareCuda, layout: kvcached_calls.KvcachedLayout, kv_bytes: int) -> Contestant:
    page_ids = range(-(-kv_bytes // layout.page_id_bytes))
    replay = kvcached_calls.Replay(cuda, layout, len(page_ids))
    return Contestant(
        layout.name,
        layout.handle_bytes,
        len(page_ids) * layout.handles,
        _nothing,
        lambda step: replay.grow(page_ids[step : step + 1]),
        lambda step: replay.shrink(page_ids[step : step + 1]),
        _nothing,
    )


def _nothing() -> None:
    """No set-up."""


def sweep_ms(contestant: dict[str, Any], part: str) -> float:
    """Milliseconds of all steps, each taken as the median of all steps of all rounds."""
    rounds = contestant[part]
    return len(rounds[0]) * statistics.median(itertools.chain(*rounds)) / 1000


def both_ms(contestant: dict[str, Any]) -> float:
    """Grow and shrink together."""
    return sweep_ms(contestant, "grow_us") + sweep_ms(contestant, "shrink_us")


def whole_ms(contestant: dict[str, Any]) -> float:
    """The median round as it went, with all that interrupted it."""
    pairs = zip(contestant["grow_us"], contestant["shrink_us"], strict=True)
    return statistics.median(sum(grow) + sum(shrink) for grow, shrink in pairs) / 1000


def advantage(data: dict[str, Any], ours: str, theirs: str) -> float:
    """How many times as long kvcached's sequence takes: below 1, kvelastic is the slower one."""
    told = data["contestants"]
    return both_ms(told[theirs]) / both_ms(told[ours])


def priced_ms(name: str, contestant: dict[str, Any], profile: str) -> float:
    """Grow and shrink at the profile's prices alone, as if simulating cost nothing."""
    prices, handle_bytes = PROFILES[profile], contestant["page_bytes"]
    if name.startswith("kvcached"):
        handle_us = prices.kvcached_us(handle_bytes)
    else:
        handle_us = prices.own_us(handle_bytes, given_back=name.endswith("given back"))
    return contestant["handles"] * handle_us / 1000


def sections(
    data: dict[str, Any], kind: driver_kinds.DriverKind, profile: str = ""
) -> list[Section]:
    told = data["contestants"]
    rivals = [name for name in told if name.startswith("kvcached")]
    rows = []
    for name, each in told.items():
        both = [number(both_ms(each)), number(whole_ms(each))]
        ratios = [""] * len(rivals)
        if name not in rivals:
            ratios = [f"{advantage(data, name, rival):.2f}" for rival in rivals]
        if profile:
            priced = priced_ms(name, each, profile)
            both.append(number(priced))
            if name not in rivals:
                for i, rival in enumerate(rivals):
                    ratios[i] += f" ({priced_ms(rival, told[rival], profile) / priced:.2f})"
        medians = (number(sweep_ms(each, part)) for part in ("grow_us", "shrink_us"))
        rows.append((name, str(each["handles"]), *medians, *both, *ratios))
    notes = [
        "By: how many times as long kvcached takes; the bar, for the default recycled, is"
        f" >= {BAR:g}.",
        "A figure is the median step of 128 MiB times the steps; as it went: the median round, with"
        " whatever else the machine did.",
        f"kvcached's calls pay ctypes, about {data['ctypes_us']:.2f} us each; ours are native.",
    ]
    headings = ["", "handles", "grow ms", "shrink ms", "both ms", "as it went"]
    title = f"{TITLE} {data['kv_bytes'] / GIB:g} GiB of KV, Llama-3-8B"
    if profile:
        title += f", simulated {profile}"
        headings.append("at bare prices")
        notes.append(
            "Simulated: numbers of calls and handles at one GPU's reported prices. In brackets, and"
            " at bare prices: the same without ctypes and the simulator's own work, which is the"
            " figure to quote."
        )
    headings += ["by contiguous", "by per layer"]
    return [Section(title, tuple(headings), rows, notes)]
