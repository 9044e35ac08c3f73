"""What the plugin refuses, and what it does when it is not asked to do anything."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
from changed_engine import outcomes_of
from vllm_server import VllmServer, engine_environment

END_DEADLINE_S = 300.0


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=engine_environment(**environment),
        capture_output=True,
        text=True,
        timeout=END_DEADLINE_S,
    )


def refused_start(server: VllmServer) -> str:
    """Wait for the server to end by itself, badly; answers everything it printed."""
    with server:
        status = server.process.wait(END_DEADLINE_S)
    assert status != 0
    return server.log.read_text(errors="replace")


def test_not_enabled_it_imports_and_patches_nothing() -> None:
    done = run_python("""
        import sys
        from kvelastic.integration.vllm.plugin import register
        before, finders = set(sys.modules), list(sys.meta_path)
        register()
        new = {name for name in set(sys.modules) - before}
        assert not any(name.startswith(("torch", "vllm")) for name in new), new
        assert "kvelastic._vmm" not in new and "kvelastic.integration.vllm.versions" not in new
        import vllm.v1.engine.core as core
        from vllm.v1.core import block_pool, kv_cache_coordinator
        assert kv_cache_coordinator.BlockPool is block_pool.BlockPool
        assert not hasattr(core.EngineCore.step, "kvelastic_original")
        assert sys.meta_path == finders
    """)
    assert done.returncode == 0, done.stderr


def test_enabled_it_patches_once_when_the_engine_is_imported() -> None:
    done = run_python(
        """
        import sys
        from kvelastic.integration.vllm.plugin import register
        register()
        assert "vllm.v1.engine.core" not in sys.modules
        import vllm.v1.engine.core as core
        register()
        from vllm.v1.core import block_pool, kv_cache_coordinator
        assert kv_cache_coordinator.BlockPool is not block_pool.BlockPool
        step = core.EngineCore.step
        assert not hasattr(step.kvelastic_original, "kvelastic_original")
        import vllm.v1.worker.gpu_worker as worker
        assert hasattr(worker.Worker.initialize_from_config, "kvelastic_original")
        """,
        ENABLE_KVELASTIC="true",
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("module", "changes"),
    [
        (
            "vllm.v1.engine.core",
            {
                "block_pool.BlockPool.touch = lambda self, blocks, twice: None": (
                    "'twice' after them"
                ),
                "del block_pool.BlockPool.unpin_blocks": "unpin_blocks: expected to exist",
                "block_pool.BlockPool.peek = lambda self: self.free_block_queue": (
                    "found ['__init__', 'free_blocks', 'get_new_blocks', 'get_num_free_blocks',"
                    " 'peek'"
                ),
            },
        ),
        (
            "vllm.v1.worker.gpu_worker",
            {
                "del tables.BlockTables.append_block_ids": "append_block_ids: expected to exist",
                "tables.BlockTables.gather_block_tables = lambda self, mapping, padded: None": (
                    "expected parameters"
                    " ('self', 'idx_mapping', 'num_reqs_padded', 'out', 'out_ptrs')"
                ),
                "mem_utils.MemorySnapshot.measure = lambda self: None": (
                    "MemorySnapshot.measure: expected it to use ['get_memory_info']"
                ),
            },
        ),
    ],
    ids=["engine core", "gpu worker"],
)
def test_an_engine_built_differently_is_refused_with_what_was_found(
    module: str, changes: dict[str, str]
) -> None:
    outcomes = outcomes_of(
        changes,
        engine_environment(ENABLE_KVELASTIC="true", KVELASTIC_STRICT="false"),
        "vllm",
        module,
    )
    for (change, found), (status, text) in zip(changes.items(), outcomes, strict=True):
        assert status != 0, change
        assert "UnsupportedEngineError" in text, change
        assert found in text, change
        assert "unset ENABLE_KVELASTIC" in text, change


def test_an_unknown_version_ends_the_server_with_the_reason(tiny_model, log_folder, tmp_path):
    # Python runs this at its start, in every process: the plugin finds another table then.
    tmp_path.joinpath("sitecustomize.py").write_text(
        "from kvelastic import engines\n"
        "engines.ENGINES = (engines.Engine('vllm', 'vLLM', tried=('0.31',)),)\n"
    )
    environment = {"ENABLE_KVELASTIC": "true", "PYTHONPATH": str(tmp_path)}
    text = refused_start(VllmServer(tiny_model, log_folder / "version.log", environment))
    assert "kvelastic does not know vLLM 0.32" in text
    assert "tried with vLLM 0.31.x" in text
    assert "KVELASTIC_STRICT=false" in text


def test_a_bad_variable_ends_the_server_with_its_name(tiny_model, log_folder) -> None:
    environment = {"ENABLE_KVELASTIC": "true", "KVELASTIC_PAGE_SIZE_MB": "3"}
    text = refused_start(VllmServer(tiny_model, log_folder / "variable.log", environment))
    assert "KVELASTIC_PAGE_SIZE_MB='3' is not accepted" in text
