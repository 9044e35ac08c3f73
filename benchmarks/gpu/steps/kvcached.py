"""kvcached 0.1.6 beside kvelastic: the same calls of kvcached's interface, a process for each turn.

    python -m benchmarks.gpu.steps.kvcached --quick         # kvelastic alone, on the host

`scripts/gpu --carry` packs kvcached's source, and this step builds it with the machine's torch.
Both allocate in the process that maps the pages, so no sockets are between. Memory held is the
difference of the device's free memory; torch allocates nothing in the meantime.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.gpu import places
from benchmarks.gpu.carried import pack
from benchmarks.gpu.findings import Findings
from benchmarks.harness import number
from benchmarks.vmm.section import Section

MIB = 1 << 20
LAYERS, QUICK_LAYERS, HEADS, HEAD, TOKENS = 32, 2, 8, 128, 16
"""Llama-3-8B's: a block has 2 MiB."""
LAYER_BYTES = 2 * TOKENS * HEADS * HEAD * 2
"""Of a block."""
REQUEST = 64
"""Blocks."""
PARTS = ("kvcached", "kvelastic")
TURNS = 3
_LIMIT_S = 0.5
"""How long a limit from outside is waited for."""
ROWS = {
    "init, ms": "init_ms",
    "held just after init, MiB": "held_after_init_mib",
    "alloc(1), us": "alloc_1_us",
    "free(1), us": "free_1_us",
    "alloc(16), us": "alloc_16_us",
    "alloc(256), us": "alloc_256_us",
    f"alloc({REQUEST}) with no page mapped, us": "cold_us",
    "grow by requests, ms": "grow_ms",
    "shrink, ms": "shrink_ms",
    "held at the top, MiB": "held_top_mib",
    "held right after, MiB": "held_after_mib",
    "held after trim(), MiB": "held_trimmed_mib",
    "limit from outside: memory back, ms": "limit_ms",
    "shutdown, ms": "shutdown_ms",
}


def main() -> None:
    def more(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--child", choices=PARTS)

    with Findings.of_command(__doc__, more) as found:
        if found.arguments.child:
            print(json.dumps(_measure(found.arguments.child, quick=found.quick)))
            return
        paths = {"kvelastic": ""}
        if not found.quick:
            built = _build(found)
            if built is None:
                return
            paths["kvcached"] = built
        told: dict[str, list[dict[str, Any]]] = {part: [] for part in paths}
        for turn in range(1 if found.quick else TURNS):
            for part in sorted(paths, reverse=turn % 2 == 1):
                measured = _turn(found, part, paths[part])
                if measured is None:
                    return
                told[part].append(measured)
        _report(found, told)


def _build(found: Findings) -> str | None:
    """The folder of a built kvcached for PYTHONPATH, or None after a failure, which is reported."""
    if pack.has_kvcached():
        return ""
    source = pack.find_kvcached()
    if source is None:
        found.skip("there is no source of kvcached; pack it with scripts/gpu --carry")
        return None
    folder = places.BUILD / "kvcached"
    shutil.copytree(source, folder, dirs_exist_ok=True)
    # It is linked with -lcuda, and a machine that only runs CUDA has no libcuda.so.
    libraries = folder / "libraries"
    libraries.mkdir(exist_ok=True)
    link = libraries / "libcuda.so"
    link.unlink(missing_ok=True)
    link.symlink_to(_libcuda())
    paths = os.pathsep.join(filter(None, (str(libraries), os.environ.get("LIBRARY_PATH"))))
    done = subprocess.run(
        [sys.executable, "setup.py", "build_ext", "--inplace"],
        check=False, cwd=folder, env=os.environ | {"LIBRARY_PATH": paths},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    found.check("kvcached compiles", done.returncode == 0, done.stdout[-1500:] * done.returncode)
    return str(folder) if done.returncode == 0 else None


def _libcuda() -> str:
    ctypes.CDLL("libcuda.so.1")
    maps = Path("/proc/self/maps").read_text()
    return next(line.split()[-1] for line in maps.splitlines() if "/libcuda.so" in line)


def _turn(found: Findings, part: str, path: str) -> dict[str, Any] | None:
    command = [sys.executable, "-m", "benchmarks.gpu.steps.kvcached", "--child", part]
    paths = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), path)))
    done = subprocess.run(
        command + ["--quick"] * found.quick,
        check=False,
        env=os.environ | {"PYTHONPATH": paths, "KVCACHED_IPC_NAME": f"kvcached_step_{os.getpid()}"},
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    if done.returncode != 0:
        said = f"exit code {done.returncode}; its last output: {done.stdout[-800:]}"
        found.check(f"{part} ends", False, said)
        return None
    measured: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    found.check(f"{part} hands out no block twice", measured["twice"] == 0)
    return measured


def _report(found: Findings, told: dict[str, list[dict[str, Any]]]) -> None:
    rows = []
    for name, key in ROWS.items():
        cells = [name]
        for part, turns in told.items():
            values = [turn[key] for turn in turns if turn[key] is not None]
            middle = statistics.median(values) if values else None
            found.figure(f"{part}_{key}", middle)
            cells.append("not while idle" if middle is None else number(middle))
        rows.append(tuple(cells))
    count = len(told["kvelastic"])
    found.table(Section(f"Medians of {count} processes each", ("", *told), rows))


# --- in a child ----------------------------------------------------------------------------------


def _measure(part: str, *, quick: bool) -> dict[str, Any]:
    import torch

    calls = importlib.import_module(f"{part}.integration.vllm.interfaces")
    device = "cpu" if quick else "cuda:0"
    layers, blocks, requests, colds = QUICK_LAYERS, 1024, 3, 2
    if not quick:
        torch.zeros(1, device=device)
        layers, requests, colds = LAYERS, 64, 20
        blocks = int(0.9 * torch.cuda.mem_get_info()[1]) // (layers * LAYER_BYTES)
    before = 0 if quick else torch.cuda.mem_get_info()[0]
    begun = time.perf_counter()
    if part == "kvcached":
        calls.init_kvcached(
            tp_rank=0, world_size=1, pp_rank=0, is_worker=True, device=device, async_sched=False
        )
    else:
        calls.init_kvelastic(device=device)
    kept = calls.alloc_kv_cache(
        (2, blocks, TOKENS, HEADS, HEAD), TOKENS, torch.bfloat16, device, layers
    )
    manager = calls.get_kv_cache_manager(blocks, TOKENS, HEADS * HEAD * 2, layers)
    if part == "kvcached":
        manager._wait_post_init()

    def held() -> float:
        if quick:
            return float(manager.get_mapped_memory_size()) / MIB
        return (before - torch.cuda.mem_get_info()[0]) / MIB

    found: dict[str, Any] = {"init_ms": 1e3 * (time.perf_counter() - begun)}
    found["held_after_init_mib"] = held()
    found |= _cold(manager, colds)
    found |= _warm(manager, 20 if quick else 2000)
    found |= _grow(manager, requests, held)
    found["limit_ms"] = _limit(part, manager, layers * LAYER_BYTES * REQUEST, held)
    begun = time.perf_counter()
    del kept
    getattr(calls, f"shutdown_{part}")()
    found["shutdown_ms"] = 1e3 * (time.perf_counter() - begun)
    return found


def _timed(call: Callable[[], Any]) -> tuple[float, Any]:
    begun = time.perf_counter()
    given = call()
    return 1e6 * (time.perf_counter() - begun), given


def _cold(manager: Any, count: int) -> dict[str, float]:
    took = []
    for _ in range(count):
        manager.trim()
        us, ids = _timed(lambda: manager.alloc(REQUEST))
        took.append(us)
        manager.free(ids)
    return {"cold_us": statistics.median(took)}


def _warm(manager: Any, count: int) -> dict[str, float]:
    found = {}
    manager.free(manager.alloc(512))  # leaves enough pages mapped
    for blocks in (1, 16, 256):
        allocs, frees = [], []
        for _ in range(count):
            us, ids = _timed(lambda blocks=blocks: manager.alloc(blocks))  # type: ignore[misc]
            allocs.append(us)
            frees.append(_timed(lambda ids=ids: manager.free(ids))[0])  # type: ignore[misc]
        found[f"alloc_{blocks}_us"] = statistics.median(allocs)
        found[f"free_{blocks}_us"] = statistics.median(frees)
    return found


def _grow(manager: Any, requests: int, held: Callable[[], float]) -> dict[str, float]:
    manager.trim()
    taken: list[list[int]] = []

    def grow() -> None:
        taken.extend(manager.alloc(REQUEST) for _ in range(requests))

    def shrink() -> None:
        for ids in taken:
            manager.free(ids)

    grown_us, _ = _timed(grow)
    flat = [block for ids in taken for block in ids]
    found: dict[str, float] = {
        "twice": len(flat) - len(set(flat) - {0}), "grow_ms": grown_us / 1e3, "held_top_mib": held()
    }  # fmt: skip
    found["shrink_ms"] = _timed(shrink)[0] / 1e3
    found["held_after_mib"] = held()
    manager.trim()
    found["held_trimmed_mib"] = held()
    return found


def _limit(part: str, manager: Any, limit: int, held: Callable[[], float]) -> float | None:
    """Milliseconds from a limit that another program sets to the memory being back.

    None: not while the instance makes no call.
    """
    kept = [manager.alloc(REQUEST // 2) for _ in range(6)]
    for ids in kept[1:]:
        manager.free(ids)
    begun = time.perf_counter()
    if part == "kvcached":
        outside = importlib.import_module("kvcached.cli.utils")
        outside.update_kv_cache_limit(manager.ipc_name, limit)
    else:
        from kvelastic.shared import segment

        segment.request(manager.name, limit_bytes=limit, wait_s=_LIMIT_S)
    while time.perf_counter() - begun < _LIMIT_S:
        # kvcached also holds its zero page, at most as large as a request.
        if held() <= 2 * limit / MIB:
            return 1e3 * (time.perf_counter() - begun)
        time.sleep(0.0002)
    return None


if __name__ == "__main__":
    main()
