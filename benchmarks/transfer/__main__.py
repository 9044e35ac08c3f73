"""`scripts/bench transfer`: copies between processes, beside memcpy and the system's own calls."""

from __future__ import annotations

import ctypes
import random
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks.harness import Figure
from benchmarks.pages import Table, arguments, run
from benchmarks.transfer.bare_mooncake import BareMooncake, why_missing
from benchmarks.transfer.bare_stream import BareStream
from benchmarks.transfer.memory import PAGE_BYTES, mapped
from kvelastic.errors import KvelasticError
from kvelastic.messages import SecretFile, parse_address
from kvelastic.transfer import Link, Node, Piece

TOTAL_BYTES = 256 << 20
COPIED_BYTES = 48 << 20
ROUNDS = 15
DEADLINES_S = (0.1, 1.0)
DEADLINE_ROUNDS = 5
SIZES = {"24 KiB": 24 << 10, "1 MiB": 1 << 20}


def measure(_quick: bool) -> Table:
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as folder:
        secret_path = Path(folder) / "secret"
        secret_path.touch(0o600)
        secret_path.write_text(secrets.token_hex(32))
        for kind in ("unix", "tcp"):
            listen = f"unix://{folder}/owner" if kind == "unix" else "tcp://127.0.0.1:0"

            owner = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "benchmarks.transfer.owner",
                    listen,
                    str(secret_path),
                    str(TOTAL_BYTES),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            try:
                assert owner.stdout is not None
                base, address = owner.stdout.readline().split()
                with Node(2, secret=SecretFile(secret_path)) as node:
                    link = node.link(parse_address(address), timeout_s=10)
                    for name, size in SIZES.items():
                        figures += pulls(kind, link, int(base), name, size)
                    link.unlink(10)
                    figures += deadlines(kind, node, address, int(base), owner)
            finally:
                owner.kill()
                owner.communicate()
    return Table.of_figures(figures)


def pulls(kind: str, link: Link, base: int, name: str, size: int) -> list[Figure]:
    """Pulls of scattered pieces into one place, and the same bytes by the floor, in turns."""
    ours = mapped(TOTAL_BYTES, size)
    count = COPIED_BYTES // size
    # Pieces that lie within pages, as blocks do, in any order.
    per_page = PAGE_BYTES // size
    places = [
        page * PAGE_BYTES + at * size
        for page in range(TOTAL_BYTES // PAGE_BYTES)
        for at in range(per_page)
    ]
    rng = random.Random(1)
    from_places, to_places = rng.sample(places, count), rng.sample(places, count)
    sources: list[Piece] = [(base + at, size) for at in from_places]
    targets: list[Piece] = [(ours.address + at, size) for at in to_places]
    floors: dict[str, Callable[[], float]]
    ends = ExitStack()
    if kind == "unix":
        pid = link.connection.peer.pid
        assert pid is not None
        floors = {
            "memcpy of such pieces": copies_here(size),
            "bare process_vm_readv": bare_reads(pid, sources, targets),
        }
    else:
        floors = {"bare TCP stream": ends.enter_context(BareStream(COPIED_BYTES, size)).receive}
        if not (why := why_missing()):
            mooncake = BareMooncake(TOTAL_BYTES, size, from_places, to_places)
            floors["Mooncake's engine"] = ends.enter_context(mooncake).read
        else:
            print(f"no row beside Mooncake's engine: {why}", file=sys.stderr)

    def pull() -> float:
        begin_s = time.perf_counter()
        link.pull(sources, targets, timeout_s=60)
        return COPIED_BYTES / (time.perf_counter() - begin_s) / 1e9

    floors["the same again"] = pull  # the control
    samples: list[float] = []
    of_floors: dict[str, list[float]] = {floor: [] for floor in floors}
    with ends:
        for _ in range(ROUNDS):
            samples.append(pull())
            for floor, run in floors.items():
                of_floors[floor].append(run())
    bars = {
        "memcpy of such pieces": ">= 0.9",
        "bare TCP stream": ">= 0.8",
        "Mooncake's engine": ">= 0.8",
    }
    return [
        Figure(
            f"pull, {name} pieces, {kind}",
            "GB/s",
            samples,
            bars.get(floor, ""),
            floor,
            of_floors[floor],
        )
        for floor in floors
    ]


def deadlines(
    kind: str, node: Node, address: str, base: int, owner: subprocess.Popen[str]
) -> list[Figure]:
    """How late a pull from a peer that is stopped returns."""
    ours = mapped(PAGE_BYTES, PAGE_BYTES)
    figures = []
    for timeout_s in DEADLINES_S:
        late_ms = []
        for _ in range(DEADLINE_ROUNDS):
            link = node.link(parse_address(address), timeout_s=10)
            owner.send_signal(signal.SIGSTOP)
            begin_s = time.perf_counter()
            try:
                link.pull([(base, PAGE_BYTES)], [(ours.address, PAGE_BYTES)], timeout_s)
            except KvelasticError:
                late_ms.append((time.perf_counter() - begin_s - timeout_s) * 1e3)
            finally:
                owner.send_signal(signal.SIGCONT)
                link.unlink(10)
        assert len(late_ms) == DEADLINE_ROUNDS, "a peer that is stopped has answered"
        name = f"beyond a deadline of {timeout_s * 1e3:.0f} ms, {kind}"
        bar = f"<= {max(20.0, timeout_s * 1e2):.0f} ms"
        figures.append(Figure(name, "ms", late_ms, bar))
    return figures


def bare_reads(pid: int, sources: Sequence[Piece], targets: Sequence[Piece]) -> Callable[[], float]:
    """The system call alone, on the same pieces, 8 MiB a call: what no reader can do without."""

    class Vector(ctypes.Structure):
        _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))

    libc = ctypes.CDLL(None, use_errno=True)
    batch = max((8 << 20) // sources[0][1], 1)
    calls = []
    for at in range(0, len(sources), batch):
        count = len(sources[at : at + batch])
        vectors = [
            (Vector * count)(*(Vector(*piece) for piece in pieces[at : at + batch]))
            for pieces in (targets, sources)
        ]
        calls.append((vectors[0], ctypes.c_ulong(count), vectors[1], ctypes.c_ulong(count)))

    def read() -> float:
        begin_s = time.perf_counter()
        copied = sum(
            libc.process_vm_readv(ctypes.c_int(pid), *call, ctypes.c_ulong(0)) for call in calls
        )
        assert copied == COPIED_BYTES // sources[0][1] * sources[0][1], copied
        return COPIED_BYTES / (time.perf_counter() - begin_s) / 1e9

    return read


def copies_here(size: int) -> Callable[[], float]:
    """memcpy of as many pieces within this process, by native code."""
    memory = mapped(TOTAL_BYTES, size)
    geometry = memory.geometry
    ids = [
        geometry.first_id(page) + at
        for page in range(geometry.pages)
        for at in range(geometry.blocks_per_page)
    ][1:]
    count = COPIED_BYTES // size
    rng = random.Random(2)
    picked = rng.sample(ids, 2 * count)

    def copy() -> float:
        begin_s = time.perf_counter()
        memory.copy(picked[:count], picked[count:])
        return COPIED_BYTES / (time.perf_counter() - begin_s) / 1e9

    return copy


PARTS = {"copies": ("Copies between processes", measure)}

if __name__ == "__main__":
    given = arguments("transfer", __doc__, PARTS, has_quick=False)
    sys.exit(run("transfer", "Transfer benchmark", given, PARTS))
