"""The machine's memory runs short for another reason than pages: caches go, then requests make way.

In a memory cgroup of the test's own. Without the keeper's looks each of these waits in vain, or the
kernel kills the process.
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
        "caches_make_way",
        "requests_make_way",
        "what_comes_again_is_kept_free",
        "who_was_refused_a_page_hears_when_there_is_one",
        "a_lower_limit_of_the_cgroup_is_kept",
    ],
)
def test_before_the_kernel_kills(cgroup: MemoryCgroup, scenario: str) -> None:
    run_in(cgroup, scenario)


def test_the_limit_of_a_cgroup_further_up_counts(cgroup: MemoryCgroup) -> None:
    with cgroup.child() as inner:
        run_in(inner, "caches_make_way")
