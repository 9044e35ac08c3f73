"""The machine's memory runs short for another reason than pages: caches go, then requests make way.

In a memory cgroup of the test's own. If the maintenance thread did not look at the memory left,
each test would wait without end, or the kernel would kill the process.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pool_in_a_cgroup
import pytest
from memory_cgroup import MemoryCgroup
from processes import run_python

pytestmark = pytest.mark.slow


@pytest.fixture
def cgroup() -> Iterator[MemoryCgroup]:
    with MemoryCgroup.make() as made:
        made.limit(pool_in_a_cgroup.LIMIT_BYTES)
        yield made


def run_in(cgroup: MemoryCgroup, scenario: str) -> None:
    done = run_python(pool_in_a_cgroup.__file__, cgroup.path, scenario, exit_code=None)
    assert done.returncode != -signal.SIGKILL, "the kernel killed it"
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "scenario",
    [
        "caches_are_evicted_for_the_heap",
        "requests_are_preempted_for_the_heap",
        "recurring_peak_stays_free",
        "refused_alloc_is_notified_of_free_memory",
        "lowered_cgroup_limit_is_respected",
    ],
)
def test_pool_shrinks_before_the_kernel_kills(cgroup: MemoryCgroup, scenario: str) -> None:
    run_in(cgroup, scenario)


def test_limit_of_a_parent_cgroup_counts(cgroup: MemoryCgroup) -> None:
    with cgroup.child() as inner:
        run_in(inner, "caches_are_evicted_for_the_heap")
