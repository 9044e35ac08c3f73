"""Records into a disk store and back, beside fio with the same pattern in the same run.

1 MiB at depth 32 with O_DIRECT, in a folder of /var/tmp (or of `KVELASTIC_BENCH_FOLDER`). Both
write over what they have written before. The store's figures have the checksums in them, the
table's entries and the index; fio's have none of these. The control is fio beside fio.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from benchmarks.harness import Figure
from kvelastic.errors import DeviceUnavailableError
from kvelastic.tiers.namespace import Namespace
from kvelastic.tiers.stores.disk.store import DiskStore

RECORD_BYTES = 1 << 20
RECORDS = 256
DEPTH = 32
ROUNDS = 9
WAYS = ("put", "get")


def fio(path: Path, way: str) -> float:
    """GB/s of one pass over a file of the same size."""
    command = [
        "fio",
        "--name=kvelastic",
        f"--filename={path}",
        f"--rw={'write' if way == 'put' else 'read'}",
        f"--bs={RECORD_BYTES}",
        f"--size={RECORDS * RECORD_BYTES}",
        f"--iodepth={DEPTH}",
        "--ioengine=io_uring",
        "--direct=1",
        "--thread",
        "--output-format=json",
    ]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != 0 or "{" not in done.stdout:
        raise RuntimeError(f"fio: {done.stderr or done.stdout}")
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    return float(job["write" if way == "put" else "read"]["bw_bytes"]) / 1e9


class _Records:
    """The records of a round: the same memory, under new keys each time."""

    def __init__(self) -> None:
        self.memory = memoryview(mmap.mmap(-1, RECORDS * RECORD_BYTES))
        self.memory[:] = os.urandom(RECORD_BYTES) * RECORDS
        steps = range(0, len(self.memory), RECORD_BYTES)
        self.views = [self.memory[at : at + RECORD_BYTES] for at in steps]
        self.keys = b""

    def timed(self, store: DiskStore, way: str) -> float:
        """GB/s of one call for all of them."""
        if way == "put":
            self.keys = os.urandom(16 * RECORDS)
        start = time.perf_counter()
        done = getattr(store, way)(self.keys, self.views)
        seconds = time.perf_counter() - start
        if not all(done):
            raise RuntimeError(f"{way}: {done.count(False)} of {RECORDS} records failed")
        return RECORDS * RECORD_BYTES / seconds / 1e9


def figures() -> list[Figure]:
    """GB/s of both ways, by io_uring and by threads; the ratio is to fio's."""
    bare = Path(os.environ.get("KVELASTIC_BENCH_FOLDER", "/var/tmp"))
    if shutil.which("fio") is None:
        return [_skipped("there is no fio here (apt-get install fio)")]
    rows: list[Figure] = []
    with tempfile.TemporaryDirectory(dir=bare, prefix="kvelastic_bench_") as name:
        folder = Path(name)
        try:
            fio(folder / "fio", "put")
            fio(folder / "fio", "get")
        except RuntimeError as error:
            return [_skipped(str(error)[:200])]
        for engine in ("io_uring", "threads"):
            rows += _beside_fio(folder, engine)
    return rows


def _beside_fio(folder: Path, engine: str) -> list[Figure]:
    room = (RECORDS + 8) * RECORD_BYTES * 161 // 160
    try:
        store = DiskStore(
            [folder / engine],
            RECORD_BYTES,
            room,
            Namespace(model="bench"),
            io=engine,  # type: ignore[arg-type]
        )
    except DeviceUnavailableError as error:
        return [_skipped(str(error))]
    records = _Records()
    bar = ">= 0.9" if engine == "io_uring" else ""
    rows = {way: Figure(f"disk {way}, {engine}", "GB/s", [], bar, "fio") for way in WAYS}
    controls = {way: Figure(f"control: fio {way}", "GB/s", [], "", "fio") for way in WAYS}
    records.timed(store, "put")  # the first writes of new files are others
    for _ in range(ROUNDS):
        for way in WAYS:
            rows[way].samples.append(records.timed(store, way))
            rows[way].floor_samples.append(fio(folder / "fio", way))
            controls[way].samples.append(fio(folder / "fio", way))
            controls[way].floor_samples.append(rows[way].floor_samples[-1])
    store.close()
    return [*rows.values(), *controls.values()]


def _skipped(reason: str) -> Figure:
    return Figure("disk", "GB/s", [float("nan")], note=f"skipped: {reason}")
