"""What the plugin refuses, and what it does when it is not asked to do anything."""

from __future__ import annotations

import textwrap

import needs
import pytest
from changed_engine import outcomes_of
from processes import run_python
from vllm_server import engine_environment

pytestmark = [pytest.mark.slow, needs.vllm]


@pytest.mark.matrix
def test_disabled_plugin_imports_and_patches_nothing() -> None:
    code = """
        import sys
        from kvelastic.integration.vllm.plugin import register
        before, finders = set(sys.modules), list(sys.meta_path)
        register()
        new = {name for name in set(sys.modules) - before}
        assert not any(name.startswith(("torch", "vllm")) for name in new), new
        assert "kvelastic._vmm" not in new and "kvelastic.integration.hooks.versions" not in new
        import vllm.v1.engine.core as core
        from vllm.v1.core import block_pool, kv_cache_coordinator
        assert kv_cache_coordinator.BlockPool is block_pool.BlockPool
        assert not hasattr(core.EngineCore.step, "kvelastic_original")
        assert sys.meta_path == finders
    """
    invalid = {"KVELASTIC_LIMIT": "8X", "KVCACHED_PAGE_SIZE_MB": "1"}  # nothing reads them
    run_python("-c", textwrap.dedent(code), environment=engine_environment() | invalid)


@pytest.mark.matrix
def test_enabled_plugin_patches_once_at_engine_import() -> None:
    code = """
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
        import vllm.v1.worker.gpu_worker
        from vllm.v1.worker.block_table import BlockTable
        assert hasattr(BlockTable.add_row, "kvelastic_original")
        """
    environment = engine_environment(ENABLE_KVELASTIC="true")
    run_python("-c", textwrap.dedent(code), environment=environment)


@pytest.mark.matrix
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
def test_unexpected_vllm_code_is_rejected_with_the_difference(
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
