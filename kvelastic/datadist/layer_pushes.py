"""Pushes of a layered transfer: each layer's runs of the cache and their targets at each peer.

row -> row, blocks -> blocks, row -> blocks      (the last fills one block after the other)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from kvelastic.datadist import cache_layout, checks, wire
from kvelastic.datadist.cache_layout import TENSORS_PER_LAYER, Run
from kvelastic.datadist.cache_table import Entry
from kvelastic.datadist.descriptors import BlocksCacheKey
from kvelastic.datadist.layers import TransferConfig, TransferWithCacheKeyConfig
from kvelastic.datadist.links import Links
from kvelastic.datadist.peer import TransferRuns
from kvelastic.datadist.status import LLMParamError

Config: TypeAlias = TransferConfig | TransferWithCacheKeyConfig


class LayerPushes:
    """A layered transfer's checked arguments. `push_layer` pushes one layer to one peer."""

    def __init__(
        self,
        links: Links,
        entry: Entry,
        configs: Sequence[Config],
        source_blocks: Sequence[int] | None,
        target_blocks: Sequence[int] | None,
        target_block_bytes: int | None,
    ) -> None:
        """The last three arguments are those of `transfer_cache_async`."""
        self._links = links
        self._entry = entry
        self._configs = configs
        self._set_blocks(source_blocks, target_blocks, target_block_bytes)
        every = range(entry.desc.num_tensors // TENSORS_PER_LAYER)
        self.layers = [config.src_layer_range or every for config in configs]
        for at, (config, layers) in enumerate(zip(configs, self.layers, strict=True)):
            self._check(f"transfer_configs[{at}]", config, layers, every)

    def _set_blocks(
        self,
        source_blocks: Sequence[int] | None,
        target_blocks: Sequence[int] | None,
        target_block_bytes: int | None,
    ) -> None:
        """Check and keep the blocks on both sides, and the bytes of a target block in a tensor."""
        size = checks.integer("dst_block_memory_size", target_block_bytes or 0, most=(1 << 50))
        desc, of, into = self._entry.desc, None, None
        if source_blocks is not None:
            of = cache_layout.block_indices("src_block_indices", desc, source_blocks)
        if target_blocks is not None:
            into = checks.integers("dst_block_indices", target_blocks, most=checks.MAX_UINT32)
        if self._entry.is_blocks:
            if of is None or into is None or len(of) != len(into):
                raise LLMParamError(
                    "a blocks cache is sent to a blocks cache: give src_block_indices and as many"
                    " dst_block_indices"
                )
            if size not in {0, desc.row_bytes}:
                raise LLMParamError(
                    f"dst_block_memory_size={size} is another than {desc.row_bytes}, that of"
                    " src_cache"
                )
            size = desc.row_bytes
        elif of is not None:
            raise LLMParamError("src_block_indices are of a blocks cache, and src_cache is none")
        elif into is not None and not (len(into) - 1) * size < desc.row_bytes <= len(into) * size:
            raise LLMParamError(
                f"a row of {desc.row_bytes} bytes does not fill {len(into)} blocks of {size} bytes;"
                " give dst_block_memory_size"
            )
        self._source_blocks, self._target_blocks, self._target_block_bytes = of, into, size

    def _check(self, name: str, config: Config, layers: range, every: range) -> None:
        if layers.stop > every.stop:
            raise LLMParamError(
                f"{name}: src_layer_range={layers} is beyond the {every.stop} layers of src_cache"
            )
        cache_layout.row_index(f"{name}: src_batch_index", self._entry.desc, config.src_batch_index)
        if isinstance(config, TransferConfig):
            if len(config.dst_addrs) != TENSORS_PER_LAYER * len(layers):
                raise LLMParamError(
                    f"{name}: {len(config.dst_addrs)} dst_addrs are given for {len(layers)} layers;"
                    " give two for each"
                )
        elif (self._target_blocks is not None) is not isinstance(config.cache_key, BlocksCacheKey):
            raise LLMParamError(
                f"{name}: dst_block_indices go with a BlocksCacheKey, and it with them"
            )

    def push_layer(self, config_at: int, layer: int) -> None:
        """Push K and V of one layer of the cache. Blocks. Raises `LLMException`."""
        config, layers = self._configs[config_at], self.layers[config_at]
        at = layer - layers.start
        sources = self._sources(_tensors(layer), config.src_batch_index)
        with self._links.call(config.dst_cluster_id, is_layered=True) as peer:
            if isinstance(config, TransferConfig):
                offsets = [one * self._target_block_bytes for one in self._target_blocks or (0,)]
                targets = [
                    config.dst_addrs[tensor] + offset
                    for tensor in _tensors(at)
                    for offset in offsets
                ]
                peer.push_to_addresses(self._entry, list(zip(sources, targets, strict=True)))
                return
            assert config.dst_layer_range is not None
            to_layer = config.dst_layer_range.start + at

            def runs(found: wire.Cache) -> TransferRuns:
                tensors = cache_layout.layer_tensors(
                    "dst_layer_range", found.desc, range(to_layer, to_layer + 1), TENSORS_PER_LAYER
                )
                return sources, self._targets(found, tensors, sources), tensors

            peer.transfer(config.cache_key, self._entry, runs, is_push=True)

    def _sources(self, tensors: range, row: int) -> list[Run]:
        desc = self._entry.desc
        if self._source_blocks is not None:
            return cache_layout.block_runs(desc, tensors, self._source_blocks)
        if self._target_blocks is not None:
            return cache_layout.row_as_blocks(
                desc, tensors, row, len(self._target_blocks), self._target_block_bytes
            )
        return cache_layout.row_runs(desc, tensors, row, 0, desc.row_bytes)

    def _targets(self, found: wire.Cache, tensors: range, sources: list[Run]) -> list[Run]:
        if self._target_blocks is None:
            if found.is_blocks:
                raise LLMParamError("the key leads to a blocks cache, and no blocks are named")
            return cache_layout.row_runs(found.desc, tensors, found.row, 0, self._entry.row_bytes)
        if found.desc.row_bytes != self._target_block_bytes:
            raise LLMParamError(
                f"dst_block_memory_size is {self._target_block_bytes}, and the peer's blocks have"
                f" {found.desc.row_bytes} bytes"
            )
        cache_layout.block_indices("dst_block_indices", found.desc, self._target_blocks)
        blocks = cache_layout.block_runs(found.desc, tensors, self._target_blocks)
        return cache_layout.as_long_as(sources, blocks)


def _tensors(layer: int) -> range:
    """Return K and V of a layer."""
    return range(TENSORS_PER_LAYER * layer, TENSORS_PER_LAYER * (layer + 1))
