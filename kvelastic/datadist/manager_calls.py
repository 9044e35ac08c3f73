"""What both generations' managers do alike: copies, and transfers by rows, blocks and layers.

Every call may be made from any thread.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

from kvelastic.datadist import checks, pieces
from kvelastic.datadist.caches import CacheHandle
from kvelastic.datadist.descriptors import (
    BlocksCacheKey,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
)
from kvelastic.datadist.enums import Placement
from kvelastic.datadist.layer_pushes import Config, LayerPushes, block_lists
from kvelastic.datadist.layers import (
    CacheTask,
    LayeredTransfer,
    LayerSender,
    LayerSynchronizer,
    TransferConfig,
    TransferWithCacheKeyConfig,
)
from kvelastic.datadist.local_caches import LocalCaches
from kvelastic.datadist.options import Options
from kvelastic.datadist.pieces import TENSORS_PER_LAYER
from kvelastic.datadist.remote import Remote
from kvelastic.datadist.status import (
    LLMException,
    LLMParamError,
    LLMStatusCode,
    as_llm_exceptions,
)

_log = logging.getLogger("kvelastic")


class LayerArguments:
    """`src_layer_range`, `dst_layer_range` and `tensor_num_per_layer` of a call, checked."""

    def __init__(
        self,
        src_layer_range: object = None,
        dst_layer_range: object = None,
        tensor_num_per_layer: object = TENSORS_PER_LAYER,
    ) -> None:
        self._sources = checks.step_one("src_layer_range", src_layer_range)
        self._targets = checks.step_one("dst_layer_range", dst_layer_range)
        self._per_layer = checks.integer(
            "tensor_num_per_layer", tensor_num_per_layer, least=1, most=checks.MAX_UINT32
        )

    @property
    def is_same(self) -> bool:
        """Whether both ranges are equally long, or neither is given."""
        of, to = self._sources, self._targets
        return (of is None and to is None) or (
            of is not None and to is not None and len(of) == len(to)
        )

    def sources(self, desc: CacheDesc) -> range:
        """The tensors to be copied from."""
        return pieces.layer_tensors("src_layer_range", desc, self._sources, self._per_layer)

    def targets(self, desc: CacheDesc) -> range:
        """The tensors to be copied to."""
        return pieces.layer_tensors("dst_layer_range", desc, self._targets, self._per_layer)


def only_layers(call: str, kwargs: dict[str, object]) -> LayerArguments:
    """The layer arguments of a call that takes them by name. Raises `TypeError` for others."""
    known = {"src_layer_range", "dst_layer_range", "tensor_num_per_layer"}
    if others := sorted(kwargs.keys() - known):
        raise TypeError(f"{call}() got unexpected keyword arguments: {', '.join(others)}")
    return LayerArguments(**kwargs)


class ManagerCalls:
    """The base of `KvCacheManager` and `CacheManager`; made by `LLMDataDist.init` only."""

    def __init__(self, caches: LocalCaches, remote: Remote, options: Options) -> None:
        self._caches = caches
        self._remote = remote
        self._options = options
        self._sender = LayerSender()
        self._initialized = True

    def finalize(self) -> None:
        """No call is accepted any more; layered transfers end. Repeatable."""
        self._initialized = False
        self._sender.end()

    def check_integrity(self) -> None:
        """References, keys and memory agree. Not while calls are on their way."""
        self._caches.check_integrity()

    def _refuse_finalized(self) -> None:
        if not self._initialized:
            raise LLMException(
                "the LLMDataDist of this manager was finalized; init another one",
                status_code=LLMStatusCode.LLM_ENGINE_FINALIZED,
            )

    # --- copies in this process --------------------------------------------------------------

    def _copy_cache(
        self,
        dst: CacheHandle,
        src: CacheHandle,
        dst_batch_index: int,
        src_batch_index: int,
        offset: int,
        size: int,
        req_id: int | None,
    ) -> None:
        self._refuse_finalized()
        checks.integer("offset", offset, most=(1 << 63) - 1)
        checks.size("size", size)
        if req_id is not None:
            checks.integer("req_id", req_id)
        _refuse_blocks("copy_cache", dst, src)
        source, target = src.cache_desc, dst.cache_desc
        from_row = pieces.row_index("src_batch_index", source, src_batch_index)
        to_row = pieces.row_index("dst_batch_index", target, dst_batch_index)
        pairs = pieces.copied_rows(source, target, from_row, to_row, offset, size)
        with as_llm_exceptions("copy_cache"):
            self._caches.copy(pairs, src, dst)
        if req_id is not None:
            _log.debug(
                "copy_cache: cache %d to %d for request %d", src.cache_id, dst.cache_id, req_id
            )

    def _copy_blocks(
        self, cache: CacheHandle, copy_block_info: Mapping[int, Sequence[int]]
    ) -> None:
        self._refuse_finalized()
        checks.instance("copy_block_info", copy_block_info, dict)
        if not cache.is_blocks_cache:
            raise LLMParamError("copy_blocks needs a blocks cache")
        desc = cache.cache_desc
        if not copy_block_info:
            return
        pieces.block_indices("the keys of copy_block_info", desc, list(copy_block_info))
        for source, targets in copy_block_info.items():
            pieces.block_indices(f"copy_block_info[{source}]", desc, targets)
        pairs = pieces.copied_blocks(desc, copy_block_info)
        with as_llm_exceptions("copy_blocks"):
            self._caches.copy(pairs, cache, cache)

    def _swap_blocks(
        self, src_cache: CacheHandle, dst_cache: CacheHandle, src_to_dst: Mapping[int, int]
    ) -> None:
        self._refuse_finalized()
        checks.instance("src_to_dst", src_to_dst, dict)
        source, target = src_cache.cache_desc, dst_cache.cache_desc
        if source.placement is target.placement:
            raise LLMParamError(
                "swap_blocks copies between host and device; both caches are"
                f" {source.placement.name} caches"
            )
        for name, cache in (("src_cache", src_cache), ("dst_cache", dst_cache)):
            if not cache.is_blocks_cache:
                raise LLMParamError(f"{name} is no blocks cache")
        if not src_to_dst:
            return
        pieces.block_indices("the keys of src_to_dst", source, list(src_to_dst))
        pieces.block_indices("the values of src_to_dst", target, list(src_to_dst.values()))
        with as_llm_exceptions("swap_blocks"):
            self._caches.copy(
                pieces.swapped_blocks(source, target, src_to_dst), src_cache, dst_cache
            )

    # --- transfers ---------------------------------------------------------------------------

    def _pull_row(
        self,
        key: CacheKey | CacheKeyByIdAndIndex,
        cache: CacheHandle,
        batch_index: int,
        size: int,
        layers: LayerArguments,
        offsets: tuple[int, int] = (0, 0),
    ) -> None:
        if isinstance(key, CacheKey):
            key.index  # noqa: B018 - refused before anything is asked
        entry = self._caches.own("cache", cache)
        _refuse_blocks("pull_cache", cache)
        row = pieces.row_index("batch_index", entry.desc, batch_index)
        source_offset, target_offset = offsets
        if size == -1:
            size = entry.row_bytes - target_offset
            if size < 1:
                raise LLMParamError(f"dst_cache_offset={target_offset} is beyond the row's end")
        target_tensors = layers.targets(entry.desc)
        targets = pieces.row_runs(entry.desc, target_tensors, row, target_offset, size)
        with self._remote.call(key.cluster_id) as peer:
            found = peer.find(key)
            source_tensors = layers.sources(found.desc)
            if found.is_blocks:
                raise LLMParamError("the key leads to a blocks cache; use pull_blocks")
            _refuse_other_count(source_tensors, target_tensors)
            sources = pieces.row_runs(found.desc, source_tensors, found.row, source_offset, size)
            peer.pull(found, entry, pieces.pairs_merged(sources, targets))
            peer.moved(found, source_tensors)

    def _pull_blocks(
        self,
        key: CacheKey | CacheKeyByIdAndIndex | BlocksCacheKey,
        cache: CacheHandle,
        source_blocks: Sequence[int],
        target_blocks: Sequence[int],
        layers: LayerArguments,
    ) -> None:
        if isinstance(key, CacheKey):
            key.index  # noqa: B018 - refused before anything is asked
        entry = self._caches.own("dst_cache", cache)
        _refuse_rows("pull_blocks", cache)
        into = pieces.block_indices("dst_blocks", entry.desc, target_blocks)
        of = checks.integers("src_blocks", source_blocks, most=checks.MAX_UINT32, empty=True)
        is_blocks = isinstance(key, BlocksCacheKey)
        if is_blocks and len(of) != len(into):
            raise LLMParamError(f"{len(of)} src_blocks and {len(into)} dst_blocks are given")
        if not is_blocks and of:
            raise LLMParamError("src_blocks are of a BlocksCacheKey; leave them out")
        target_tensors = layers.targets(entry.desc)
        targets = pieces.block_runs(entry.desc, target_tensors, into)
        with self._remote.call(key.cluster_id) as peer:
            found = peer.find(key)
            source_tensors = layers.sources(found.desc)
            _refuse_other_count(source_tensors, target_tensors)
            if is_blocks:
                pieces.same_rows(found.desc, entry.desc)
                pieces.block_indices("src_blocks", found.desc, of)
                sources = pieces.block_runs(found.desc, source_tensors, of)
            elif found.is_blocks:
                raise LLMParamError("the key leads to a blocks cache; give a BlocksCacheKey")
            else:
                sources = pieces.row_as_blocks(
                    found.desc, source_tensors, found.row, len(into), entry.row_bytes
                )
                targets = pieces.as_long_as(sources, targets)
            peer.pull(found, entry, pieces.pairs_merged(sources, targets))
            if not is_blocks:
                peer.moved(found, source_tensors)

    def _push_row(
        self, key: CacheKeyByIdAndIndex, cache: CacheHandle, row: int, layers: LayerArguments
    ) -> None:
        entry = self._caches.own("src_cache", cache)
        _refuse_blocks("push_cache", cache)
        at = pieces.row_index("src_batch_index", entry.desc, row)
        source_tensors = layers.sources(entry.desc)
        size = entry.row_bytes
        with self._remote.call(key.cluster_id) as peer:
            found = peer.find(key, is_write=True)
            target_tensors = layers.targets(found.desc)
            if found.is_blocks:
                raise LLMParamError("the key leads to a blocks cache; use push_blocks")
            _refuse_other_count(source_tensors, target_tensors)
            pairs = pieces.pairs_merged(
                pieces.row_runs(entry.desc, source_tensors, at, 0, size),
                pieces.row_runs(found.desc, target_tensors, found.row, 0, size),
            )
            peer.push(entry, found, pairs)
            peer.moved(found, target_tensors)

    def _push_blocks(
        self,
        key: BlocksCacheKey,
        cache: CacheHandle,
        source_blocks: Sequence[int],
        target_blocks: Sequence[int],
        layers: LayerArguments,
    ) -> None:
        entry = self._caches.own("src_cache", cache)
        _refuse_rows("push_blocks", cache)
        of = pieces.block_indices("src_blocks", entry.desc, source_blocks)
        into = checks.integers("dst_blocks", target_blocks, most=checks.MAX_UINT32)
        if len(of) != len(into):
            raise LLMParamError(f"{len(of)} src_blocks and {len(into)} dst_blocks are given")
        source_tensors = layers.sources(entry.desc)
        with self._remote.call(key.cluster_id) as peer:
            found = peer.find(key, is_write=True)
            target_tensors = layers.targets(found.desc)
            _refuse_other_count(source_tensors, target_tensors)
            pieces.same_rows(entry.desc, found.desc)
            pieces.block_indices("dst_blocks", found.desc, into)
            pairs = pieces.pairs_merged(
                pieces.block_runs(entry.desc, source_tensors, of),
                pieces.block_runs(found.desc, target_tensors, into),
            )
            peer.push(entry, found, pairs)

    # --- layer by layer ----------------------------------------------------------------------

    def _transfer_cache_async(
        self,
        src_cache: CacheHandle,
        layer_synchronizer: LayerSynchronizer,
        transfer_configs: Sequence[Config],
        src_block_indices: Sequence[int] | None,
        dst_block_indices: Sequence[int] | None,
        dst_block_memory_size: int | None,
    ) -> CacheTask:
        self._refuse_finalized()
        checks.instance("layer_synchronizer", layer_synchronizer, (LayerSynchronizer,))
        given: list[Config] = checks.instances(
            "transfer_configs", transfer_configs, (TransferConfig, TransferWithCacheKeyConfig)
        )
        configs = [replace(one) for one in given]  # checks what was assigned since it was made
        entry = self._caches.own("src_cache", src_cache)
        if not configs:
            raise LLMParamError("transfer_configs is empty; name at least one")
        by_key = self._options.remembers_remote_caches
        for at, config in enumerate(configs):
            if isinstance(config, TransferWithCacheKeyConfig) is not by_key:
                raise LLMParamError(
                    f"transfer_configs[{at}] is a {type(config).__name__}: with"
                    " enable_remote_cache_accessible it must be a TransferWithCacheKeyConfig,"
                    " without it a TransferConfig"
                )
        if entry.desc.placement is Placement.HOST:
            raise LLMParamError("src_cache lies in host memory; the call is for device caches")
        if len(entry.addrs) > 1:
            raise LLMParamError("transfer_cache_async is not for a process with several devices")
        if entry.desc.num_tensors % TENSORS_PER_LAYER:
            raise LLMParamError(
                f"src_cache has {entry.desc.num_tensors} tensors; K and V of each layer are needed"
            )
        sending = LayerPushes(
            self._remote,
            entry,
            configs,
            *block_lists(src_cache, src_block_indices, dst_block_indices, dst_block_memory_size),
        )
        task = CacheTask(len(configs))
        self._sender.send(
            LayeredTransfer(task, layer_synchronizer, sending.layers, sending.push_layer)
        )
        return task


def _refuse_blocks(call: str, *caches: CacheHandle) -> None:
    if not all(cache.is_rows_cache for cache in caches):
        raise LLMParamError(f"{call} is for rows, and a blocks cache is given")


def _refuse_rows(call: str, cache: CacheHandle) -> None:
    if not cache.is_blocks_cache:
        raise LLMParamError(f"{call} needs a blocks cache")


def _refuse_other_count(sources: range, targets: range) -> None:
    if len(sources) != len(targets):
        raise LLMParamError(
            f"{len(sources)} tensors are read and {len(targets)} written; name as many layers of"
            " both"
        )
