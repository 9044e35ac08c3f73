"""What the SGLang integration refuses, when, and how the processes end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import needs
import pytest
from changed_engine import outcomes_of
from sglang_server import command_of, run_in_sglang, sglang_environment

from kvelastic.errors import UnsupportedEngineError
from kvelastic.integration.sglang.refusals import COVERED, ends_process, refuse_arguments

pytestmark = [pytest.mark.slow, needs.sglang, pytest.mark.timeout(600)]

PROGRAMS = Path(__file__).parents[1] / "programs"
DEADLINE_S = 300.0


def covered(**changed: object) -> SimpleNamespace:
    values = {each.field: each.values[0] for each in COVERED}
    return SimpleNamespace(**{**values, "page_size": 32, **changed})


def test_every_unsupported_argument_is_named() -> None:
    refuse_arguments(covered())
    with pytest.raises(UnsupportedEngineError, match="Unset ENABLE_KVELASTIC") as refused:
        refuse_arguments(covered(**{each.field: "something else" for each in COVERED}))
    for each in COVERED:
        assert f"  - {each.field}='something else': {each.why}" in str(refused.value)
    with pytest.raises(UnsupportedEngineError, match="Set --page-size 16 or 32"):
        refuse_arguments(covered(page_size=1))


def test_any_error_ends_the_process() -> None:
    """SGLang logs an exception of a plugin, and goes on without it."""

    @ends_process
    def fail(error: Exception) -> None:
        raise error

    with pytest.raises(SystemExit, match=r"^kvelastic: of kvelastic's$"):
        fail(UnsupportedEngineError("of kvelastic's"))
    with pytest.raises(SystemExit, match=r"kvelastic could not be loaded .*: ValueError: other\."):
        fail(ValueError("other"))


@pytest.mark.matrix
def test_unexpected_sglang_code_is_rejected_with_the_difference() -> None:
    changes = {
        "del batch.ScheduleBatch.check_decode_mem": "check_decode_mem: expected to exist",
        "paged.PagedTokenToKVPoolAllocator.more = lambda self: self.free_pages": (
            "expected 'free_pages' to be used by"
        ),
        "batch.ScheduleBatch.retract_decode = lambda self: None": (
            "expected a message that begins 'Out of memory even after retracting"
        ),
        "platform.SRTPlatform.get_kv_pool_cls = lambda self: None": (
            "expected parameters ('self', 'kind')"
        ),
        "del arguments.ServerArgs.enable_lmcache": "enable_lmcache: expected to exist",
        "scheduler.Scheduler.event_loop_overlap = lambda self: None": (
            "expected it to use ['get_next_batch_to_run', 'ingest_requests']"
        ),
    }
    outcomes = outcomes_of(
        changes,
        sglang_environment(ENABLE_KVELASTIC="true", KVELASTIC_STRICT="false"),
        "sglang",
        python=needs.SGLANG_PYTHON,
    )
    for (change, found), (status, text) in zip(changes.items(), outcomes, strict=True):
        assert status != 0, change
        assert "SystemExit: kvelastic: " in text, change
        assert found in text, change
        assert "docs/sglang.md" in text, change


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny_model_for_sglang")
    subprocess.run([sys.executable, PROGRAMS / "tiny_model.py", folder], check=True)
    return folder


@pytest.mark.matrix
def test_rejected_server_exits_1_with_the_reason(model: Path) -> None:
    done = subprocess.run(
        command_of(model, 1, ["--tp-size", "2", "--enable-two-batch-overlap"]),
        env=sglang_environment(ENABLE_KVELASTIC="true"),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 1, done.stderr
    assert "kvelastic does not support these settings of SGLang" in done.stderr
    assert "tp_size=2: each rank schedules separately" in done.stderr
    assert "enable_two_batch_overlap=True" in done.stderr
    assert "load weight" not in done.stderr.lower()


@pytest.mark.matrix
def test_unsupported_kv_cache_kind_is_rejected() -> None:
    """SGLang knows only after it has loaded a model which kind of cache that needs."""
    program = """
from types import SimpleNamespace as Made
from kvelastic.integration.sglang.refusals import refuse_cache
from kvelastic.integration.sglang.kv_pool import ElasticMHATokenToKVPool
from kvelastic.integration.sglang.allocator import ElasticPagedAllocator
from kvelastic.integration.sglang.radix_cache import ElasticRadixCache
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

def look(cache, allocator=ElasticPagedAllocator, swa=False, ssm=False, tree=ElasticRadixCache):
    made = allocator.__new__(allocator)
    made._kvcache = cache.__new__(cache)
    scheduler = Made(is_hybrid_swa=swa, is_hybrid_ssm=ssm, tree_cache=tree.__new__(tree),
                     token_to_kv_pool_allocator=made)
    try:
        refuse_cache(scheduler, ElasticMHATokenToKVPool, ElasticPagedAllocator, ElasticRadixCache)
    except Exception as error:
        print(str(error).splitlines()[1])
    else:
        print("covered")

ours = ElasticMHATokenToKVPool
look(ours)
look(MLATokenToKVPool)
look(ours, PagedTokenToKVPoolAllocator)
look(ours, tree=UnifiedRadixCache)
look(ours, swa=True)
look(ours, ssm=True)
"""
    ours, mla, allocator, tree, windows, states = run_in_sglang(program, 6)
    assert ours == "covered"
    assert "a KV cache of the kind MLATokenToKVPool" in mla
    assert "whose pages come from PagedTokenToKVPoolAllocator" in allocator
    assert "a radix cache of the kind UnifiedRadixCache" in tree
    assert "a model with sliding windows" in windows
    assert "a model with recurrent states" in states
