"""SGLang's KV cache on elastic memory: addresses for every id, pages only for used blocks.

Imports SGLang, so only its scheduler's process may import this module.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from kvelastic import _vmm, config
from kvelastic.integration.sglang.refusals import ends_process, refuse_pool
from kvelastic.pool import engine_pool, tensor_views, tensors
from kvelastic.pool.engine_pool import EnginePool
from kvelastic.shared import device_set


class ElasticMHATokenToKVPool(MHATokenToKVPool):  # type: ignore[misc]  # SGLang is untyped here
    """The pool for multi-head and grouped-query attention, created by SGLang's configurator.

    K and V of a layer are dense tensors of token rows, as in stock SGLang. They are longer because
    ids are sparse. Reading a row of a block that is not allocated faults. `size` stays the value
    that SGLang was configured with.
    """

    elastic: EnginePool
    size: int
    page_size: int

    def _create_buffers_normal(self) -> None:
        self._open()

    @ends_process
    def _open(self) -> None:
        refuse_pool(self)
        settings = config.load()
        device = engine_pool.device_for(settings, "SGLang", gpu=None)
        blocks = self.size // self.page_size
        plan = tensor_views.plan(
            ((blocks + 1) * self.page_size, self.head_num, self.head_dim),
            engine="sglang",
            block_size=self.page_size,
            itemsize=self.store_dtype.itemsize,
            num_layers=self.layer_num,
            page_size_bytes=device_set.page_size_bytes(settings, [device]),
            per_buffer=not settings.contiguous_layout,
        )
        self.elastic = engine_pool.open_engine_pool(
            settings,
            device,
            plan.layout,
            block_tokens=self.page_size,
            wanted_blocks=blocks,
            engine="SGLang",
            model=_model_name(),
            has_tiers=True,
        )
        memory = self.elastic.pool.memory
        assert isinstance(memory, _vmm.Range)
        whole_range = tensors.whole_range(memory)
        keys, values = plan.views(self.elastic.pages)
        self.k_buffer = [tensors.view_of(whole_range, key, self.store_dtype) for key in keys]
        self.v_buffer = [tensors.view_of(whole_range, value, self.store_dtype) for value in values]

    def _build_kv_buffer_descs(self) -> Any:
        """Return SGLang's descriptions of the tensors, which have a row for every id."""
        configured, self.size = self.size, len(self.k_buffer[0]) - self.page_size
        try:
            return super()._build_kv_buffer_descs()
        finally:
            self.size = configured

    def get_kv_size_bytes(self) -> tuple[int, int]:
        """Return the maximum bytes of K and of V: the blocks' size, not the address range's."""
        layout = self.elastic.layout
        most_bytes = self.elastic.capacity_blocks * layout.block_bytes * layout.buffers
        return most_bytes // 2, most_bytes // 2


def _model_name() -> str:
    from sglang.srt.runtime_context import get_model, get_serving

    return str(get_serving().served_model_name or get_model().model_path)
