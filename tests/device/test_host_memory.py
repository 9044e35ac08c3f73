"""What is left of the machine: the arithmetic on files of our own, and a cgroup that gets full."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from memory_cgroup import MemoryCgroup
from processes import PROGRAMS
from waiting import DEADLINE_S

from kvelastic import _vmm, errors

MIB = 1 << 20
GIB = 1 << 30


class Machine:
    """Files as the kernel writes them, in a folder of our own."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write(
            "proc/meminfo", f"MemTotal: {64 << 20} kB\nMemFree: 1 kB\nMemAvailable: {32 << 20} kB\n"
        )

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def v2(self, folder: str, limit: object, used: int, inactive: int = 0, active: int = 0) -> None:
        top = f"sys/fs/cgroup{folder}"
        self.write(f"{top}/memory.max", f"{limit}\n")
        self.write(f"{top}/memory.current", f"{used}\n")
        self.write(
            f"{top}/memory.stat",
            f"anon 7\nfile {used}\ninactive_anon 9\n"
            f"active_file {active}\ninactive_file {inactive}\n",
        )

    def v1(self, folder: str, limit: object, used: int, inactive: int = 0) -> None:
        top = f"sys/fs/cgroup/memory{folder}"
        self.write(f"{top}/memory.limit_in_bytes", f"{limit}\n")
        self.write(f"{top}/memory.usage_in_bytes", f"{used}\n")
        self.write(
            f"{top}/memory.stat",
            f"cache 5\ninactive_file 1\nactive_file 1\ntotal_inactive_file {inactive}\n"
            "total_active_file 0\n",
        )

    def look(self) -> list[dict]:
        return _vmm.HostMemory(str(self.root)).look()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_without_cgroups_machine_memory_is_the_bound(machine: Machine) -> None:
    (room,) = machine.look()
    assert (room["where"], room["total_bytes"], room["left_bytes"]) == (
        "the machine",
        64 * GIB,
        32 * GIB,
    )
    assert room["spare_bytes"] == 32 * GIB - 256 * MIB


def test_every_parent_cgroup_bounds_memory_in_v2(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/a/b\n")
    machine.v2("/a/b", "max", GIB)
    machine.v2("/a", 2 * GIB, GIB)
    (tightest, _) = machine.look()
    assert tightest["where"].endswith("/a")
    assert tightest["left_bytes"] == GIB
    assert tightest["spare_bytes"] == GIB - 64 * MIB, "1/32 of the limit stays free"


def test_reclaimable_page_cache_counts_as_free(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/a\n")
    machine.v2("/a", 2 * GIB, 2 * GIB, inactive=300 * MIB, active=200 * MIB)
    assert machine.look()[0]["left_bytes"] == 400 * MIB


def test_cgroup_v1_is_hierarchical_and_ignores_huge_limit(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "5:cpu,memory:/x/y\n0::/\n1:name=systemd:/x\n")
    machine.v1("/x/y", 9223372036854771712, GIB)
    machine.v1("/x", GIB, GIB, inactive=100 * MIB)
    (tightest, other) = machine.look()
    assert tightest["where"].endswith("/memory/x")
    assert tightest["left_bytes"] == 100 * MIB
    assert other["where"] == "the machine"


def test_container_uses_the_root_cgroup(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/kubepods/pod1\n")
    machine.v2("", GIB, 100 * MIB)
    assert machine.look()[0]["left_bytes"] == GIB - 100 * MIB


@pytest.mark.parametrize("text", ["", "garbage", "-1\n", "max"])
def test_unreadable_limits_are_ignored(machine: Machine, text: str) -> None:
    machine.write("proc/self/cgroup", "0::/a\nnonsense\n::\n:\n")
    machine.v2("/a", text, 0)
    machine.write("proc/meminfo", text)
    assert machine.look() == []
    _vmm.HostMemory(str(machine.root)).refuse_if_tight(1 << 50)


def test_allocation_near_the_cgroup_limit_is_refused(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/a\n")
    memory = _vmm.HostMemory(str(machine.root))
    machine.v2("/a", GIB, GIB - 32 * MIB - 100 * MIB)  # 32 MiB stay free, 100 are to be had
    memory = _vmm.HostMemory(str(machine.root))
    memory.refuse_if_tight(50 * MIB)
    with pytest.raises(
        errors.OutOfMemoryError, match=r"51\.00 MiB.*/a has 132\.00 MiB of 1\.00 GiB"
    ):
        memory.refuse_if_tight(51 * MIB)  # another process may look at the same moment
    # What others take or give back is seen, and a lower limit too.
    machine.v2("/a", GIB, GIB - 100 * MIB)
    with pytest.raises(errors.OutOfMemoryError):
        memory.refuse_if_tight(50 * MIB)
    machine.v2("/a", GIB, 0)
    memory.refuse_if_tight(50 * MIB)


@pytest.fixture
def cgroup() -> Iterator[MemoryCgroup]:
    with MemoryCgroup.make() as made:
        yield made


IN_A_CGROUP = """
import os, sys
open(sys.argv[1] + "/cgroup.procs", "w").write(str(os.getpid()))
os.execv(sys.executable, [sys.executable, "-c", *sys.argv[2:]])
"""

FILL = """
import sys
sys.path.insert(0, {programs!r})
from kvelastic import _vmm
from kvelastic.pool.layout import PageLayout
from kvelastic.pool.pool import native_geometry
layout = PageLayout(block_bytes=64 << 10, buffers=4, blocks_per_page=8, extent_bytes=2 << 20)
pages = 1024
memory = _vmm.Range.reserve(_vmm.HostDriver(), native_geometry(layout, pages))
total = pages * layout.page_bytes
pool = _vmm.Pool(memory, max_blocks=pages * 8, limit_bytes=total, capacity_bytes=total)
blocks = 0
while (ids := pool.alloc(8)) is not None:
    blocks += len(ids)
junk = bytearray(4 << 20)  # there is room for what else a process does
pool.check_integrity()
assert pool.stats()["pages_mapped"] * layout.page_bytes == pool.mapped_bytes
print(pool.mapped_bytes >> 20, flush=True)
sys.stdin.read()  # what it holds is held until all have filled theirs
"""


def run_in(
    cgroup: MemoryCgroup, limit_bytes: int, program: str, count: int = 1
) -> list[subprocess.Popen]:
    cgroup.limit(limit_bytes)
    text = textwrap.dedent(program).format(programs=str(PROGRAMS))
    return [
        subprocess.Popen(
            [sys.executable, "-c", IN_A_CGROUP, str(cgroup.path), text],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(count)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_pool_filling_its_cgroup_is_not_oom_killed(cgroup: MemoryCgroup, count: int) -> None:
    filling = run_in(cgroup, 200 * MIB, FILL, count)
    outputs = [process.stdout for process in filling if process.stdout]
    filled_mib = sum(int(output.readline() or 0) for output in outputs)
    for process in filling:
        _, err = process.communicate(timeout=DEADLINE_S)
        assert process.returncode != -signal.SIGKILL, "the kernel killed it"
        assert process.returncode == 0, err
    assert 60 <= filled_mib <= 184, "what was there to be had, less what stays free"
