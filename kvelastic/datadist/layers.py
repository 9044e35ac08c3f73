"""Layered transfers: send a cache layer by layer while later layers are still being computed.

    class Computed(LayerSynchronizer):
        def synchronize_layer(self, layer_index, timeout_in_millis):
            return events[layer_index].wait()

    task = manager.transfer_cache_async(cache, Computed(), [TransferConfig(2, addrs)])
    task.synchronize()

Each task has a thread (`LayerSender`). For each layer in a configuration, in order, the thread
calls the synchronizer. If that returns True, the thread pushes the layer to each configuration that
names it: a row to a row, blocks to blocks, or a row to blocks, one after the other. The task ends
at the first False or failure.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from kvelastic.datadist import cache_layout, checks
from kvelastic.datadist.cache_layout import TENSORS_PER_LAYER, LayerRanges, Part
from kvelastic.datadist.descriptors import BlocksCacheKey, CacheKeyByIdAndIndex
from kvelastic.datadist.enums import Placement
from kvelastic.datadist.links import Links
from kvelastic.datadist.local_caches import Entry
from kvelastic.datadist.peer import Transfer
from kvelastic.datadist.status import LLMException, LLMParamError, LLMStatusCode, failure, status_of

_log = logging.getLogger("kvelastic")


class LayerSynchronizer(ABC):
    """Waits until a layer of the cache is computed. Users derive from this class."""

    @abstractmethod
    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        """Block until the layer may be sent; return False if it will not be, which ends the task.

        Called in the task's thread with a timeout of None: the caller sets its own deadline. An
        exception is logged and counts as False.
        """


@dataclass(eq=False)
class TransferConfig:
    """A transfer of layers to raw addresses of a peer: K and V of each layer, in order.

    Raises `TypeError`, `LLMParamError`. `transfer_cache_async` copies the configuration, checks it
    again, and checks the number of addresses against the cache. So fields may be assigned before.
    """

    dst_cluster_id: int
    dst_addrs: Sequence[int]
    src_layer_range: range | None = None
    src_batch_index: int = 0

    def __post_init__(self) -> None:
        checks.integer("dst_cluster_id", self.dst_cluster_id)
        self.dst_addrs = tuple(checks.integers("dst_addrs", self.dst_addrs, least=1))
        checks.step_one("src_layer_range", self.src_layer_range)
        checks.integer("src_batch_index", self.src_batch_index, most=checks.MAX_UINT32)


@dataclass(eq=False)
class TransferWithCacheKeyConfig:
    """A transfer of layers to a cache that a peer has registered or allocated.

    Both ranges are required and must be equally long. Raises `TypeError`, `LLMParamError`. Fields
    may be assigned, as in a `TransferConfig`.
    """

    cache_key: BlocksCacheKey | CacheKeyByIdAndIndex
    src_layer_range: range | None = None
    dst_layer_range: range | None = None
    src_batch_index: int = 0

    def __post_init__(self) -> None:
        checks.instance("cache_key", self.cache_key, (BlocksCacheKey, CacheKeyByIdAndIndex))
        source = checks.step_one("src_layer_range", self.src_layer_range)
        target = checks.step_one("dst_layer_range", self.dst_layer_range)
        if source is None or target is None or len(source) != len(target):
            raise LLMParamError(
                f"src_layer_range={source} and dst_layer_range={target} must both be given, and"
                " be equally long"
            )
        checks.integer("src_batch_index", self.src_batch_index, most=checks.MAX_UINT32)
        if isinstance(self.cache_key, BlocksCacheKey) and self.src_batch_index:
            raise LLMParamError("with a BlocksCacheKey src_batch_index must be 0")

    @property
    def dst_cluster_id(self) -> int:
        """The id of the peer."""
        return self.cache_key.cluster_id


Config: TypeAlias = TransferConfig | TransferWithCacheKeyConfig


class CacheTask:
    """Result of `transfer_cache_async`. Any thread may wait for it."""

    def __init__(self, configs: int) -> None:
        self._changed = threading.Condition()
        self._results: list[LLMStatusCode | None] = [None] * configs
        self._ended: list[bool] = [False] * configs
        self._status: LLMStatusCode | None = None

    def synchronize(self, timeout_in_millis: int | None = None) -> LLMStatusCode:
        """Block until the task has ended; return the first failure or `LLM_SUCCESS`.

        Returns `LLM_TIMEOUT` if the task is still running at the timeout. None waits without limit.
        """
        self._wait(timeout_in_millis)
        with self._changed:
            return LLMStatusCode.LLM_TIMEOUT if self._status is None else self._status

    def get_results(self, timeout_in_millis: int | None = None) -> list[LLMStatusCode | None]:
        """Block as `synchronize` does; return the result of each configuration.

        None: none of its layers was started. `LLM_TIMEOUT`: it is still running. A configuration in
        progress when the task failed has the failure's code.
        """
        self._wait(timeout_in_millis)
        with self._changed:
            if self._status is not None:
                return list(self._results)
            return [
                result if ended else LLMStatusCode.LLM_TIMEOUT
                for result, ended in zip(self._results, self._ended, strict=True)
            ]

    def _wait(self, timeout_in_millis: int | None) -> None:
        if timeout_in_millis is not None:
            checks.integer("timeout_in_millis", timeout_in_millis, most=checks.MAX_UINT32)
        with self._changed:
            self._changed.wait_for(
                lambda: self._status is not None,
                None if timeout_in_millis is None else timeout_in_millis / 1000,
            )

    def note(self, config: int, status: LLMStatusCode, *, ended: bool) -> None:
        """Set the result of a configuration so far. For the sender."""
        with self._changed:
            if self._status is None:
                self._results[config] = status
                self._ended[config] = ended

    def end(self, status: LLMStatusCode) -> None:
        """End the task; configurations in progress get `status`. For the sender.

        Only the first call has an effect.
        """
        with self._changed:
            if self._status is not None:
                return
            self._status = status
            for at, result in enumerate(self._results):
                if result is not None and not self._ended[at]:
                    self._results[at] = status
            self._changed.notify_all()


Push = Callable[[int, int], None]
"""Pushes a layer of the cache to a configuration: arguments are (configuration index, layer)."""


class LayerSender:
    """Runs each layered transfer in a new thread. Any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[CacheTask] = set()
        self._ended = False

    def send(
        self, synchronizer: LayerSynchronizer, layers: Sequence[range], push: Push
    ) -> CacheTask:
        """Start to push the layers of each configuration. Never blocks.

        After `end` the task fails at once. Raises `LLM_FAILED` if no thread can be started.
        """
        task = CacheTask(len(layers))
        # A daemon thread, because a synchronizer may block forever and must not delay the exit.
        thread = threading.Thread(
            target=self._run,
            args=(task, synchronizer, layers, push),
            name="kvelastic-layers",
            daemon=True,
        )
        with self._lock:
            if self._ended:
                task.end(LLMStatusCode.LLM_ENGINE_FINALIZED)
                return task
            self._running.add(task)
        try:
            thread.start()
        except RuntimeError as error:
            self._forget(task)
            raise failure(
                LLMStatusCode.LLM_FAILED,
                f"a layered transfer cannot begin: {error}; wait for others, or raise `ulimit -u`",
            ) from error
        return task

    def end(self) -> None:
        """Stop sending layers; tasks end with `LLM_ENGINE_FINALIZED`. Idempotent.

        Does not wait for a blocked synchronizer; its result is ignored.
        """
        with self._lock:
            self._ended = True
            running = list(self._running)
        for task in running:
            task.end(LLMStatusCode.LLM_ENGINE_FINALIZED)

    def _run(
        self, task: CacheTask, synchronizer: LayerSynchronizer, layers: Sequence[range], push: Push
    ) -> None:
        try:
            for layer in sorted({one for each in layers for one in each}):
                configs = [at for at, each in enumerate(layers) if layer in each]
                if not _is_computed(synchronizer, layer):
                    _fail(task, configs, LLMStatusCode.LLM_PARAM_INVALID)
                    return
                for config in configs:
                    status = LLMStatusCode.LLM_ENGINE_FINALIZED
                    if not self._ended:
                        status = _pushed(push, config, layer)
                    if status is not LLMStatusCode.LLM_SUCCESS:
                        _fail(task, [config], status)
                        return
                    task.note(config, status, ended=layer == layers[config][-1])
            task.end(LLMStatusCode.LLM_SUCCESS)
        finally:
            self._forget(task)

    def _forget(self, task: CacheTask) -> None:
        with self._lock:
            self._running.discard(task)


def _is_computed(synchronizer: LayerSynchronizer, layer: int) -> bool:
    try:
        return bool(synchronizer.synchronize_layer(layer, None))
    except BaseException:  # also SystemExit: whoever waits for the transfer must learn of it
        _log.exception("synchronize_layer(%d) failed: the transfer ends there", layer)
        return False


def _pushed(push: Push, config: int, layer: int) -> LLMStatusCode:
    try:
        push(config, layer)
    except Exception as error:
        expected = isinstance(error, LLMException)
        _log.warning("layer %d could not be pushed: %s", layer, error, exc_info=not expected)
        return status_of(error)
    return LLMStatusCode.LLM_SUCCESS


def _fail(task: CacheTask, configs: Sequence[int], status: LLMStatusCode) -> None:
    for config in configs:
        task.note(config, status, ended=True)
    task.end(status)


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
        *,
        by_key: bool,
    ) -> None:
        """The arguments are those of `transfer_cache_async`. Raises `TypeError`, `LLMParamError`.

        `by_key`: whether peers' caches are named by keys, and not by addresses.
        """
        self._links = links
        self._entry = entry
        self._configs = [replace(one) for one in configs]  # checks fields that were assigned
        if not configs:
            raise LLMParamError("transfer_configs is empty; name at least one")
        kind = TransferWithCacheKeyConfig if by_key else TransferConfig
        if not all(isinstance(config, kind) for config in configs):
            raise LLMParamError(
                "transfer_configs must be TransferWithCacheKeyConfig with"
                " enable_remote_cache_accessible, TransferConfig without it"
            )
        if entry.desc.placement is Placement.HOST:
            raise LLMParamError("src_cache lies in host memory; the call is for device caches")
        if len(entry.addrs) > 1:
            raise LLMParamError("transfer_cache_async is not for a process with several devices")
        if entry.desc.num_tensors % TENSORS_PER_LAYER:
            raise LLMParamError(
                f"src_cache has {entry.desc.num_tensors} tensors; K and V of each layer are needed"
            )
        self._set_blocks(source_blocks, target_blocks, target_block_bytes)
        every = range(entry.desc.num_tensors // TENSORS_PER_LAYER)
        self.layers = [config.src_layer_range or every for config in self._configs]
        for at, (config, layers) in enumerate(zip(self._configs, self.layers, strict=True)):
            self._check(f"transfer_configs[{at}]", config, layers, every)

    def _set_blocks(
        self,
        source_blocks: Sequence[int] | None,
        target_blocks: Sequence[int] | None,
        target_block_bytes: int | None,
    ) -> None:
        """Check and keep the blocks on both sides, and the bytes of a block or row in a tensor."""
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
        elif of is not None:
            raise LLMParamError("src_block_indices are of a blocks cache, and src_cache is none")
        elif into is not None and not (len(into) - 1) * size < desc.row_bytes <= len(into) * size:
            raise LLMParamError(
                f"a row of {desc.row_bytes} bytes does not fill {len(into)} blocks of {size} bytes;"
                " give dst_block_memory_size"
            )
        self._source_blocks, self._theirs = of, Part(into)
        self._size = desc.row_bytes if self._entry.is_blocks or into is None else size

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
        elif (self._theirs.blocks is not None) is not isinstance(config.cache_key, BlocksCacheKey):
            raise LLMParamError(
                f"{name}: dst_block_indices go with a BlocksCacheKey, and it with them"
            )

    def push_layer(self, config_at: int, layer: int) -> None:
        """Push K and V of one layer of the cache. Blocks. Raises `LLMException`."""
        config, layers = self._configs[config_at], self.layers[config_at]
        at = layer - layers.start
        ours = Part(self._source_blocks, config.src_batch_index)
        with self._links.call(config.dst_cluster_id, is_layered=True) as peer:
            if isinstance(config, TransferConfig):
                sources = ours.runs(self._entry.desc, _tensors(layer), self._size, self._theirs)
                offsets = [one * self._size for one in self._theirs.blocks or (0,)]
                targets = [
                    config.dst_addrs[tensor] + offset
                    for tensor in _tensors(at)
                    for offset in offsets
                ]
                peer.push_to_addresses(self._entry, list(zip(sources, targets, strict=True)))
                return
            assert config.dst_layer_range is not None
            to_layer = config.dst_layer_range.start + at
            ranges = LayerRanges(range(layer, layer + 1), range(to_layer, to_layer + 1))
            key, own = config.cache_key, self._entry
            peer.transfer(Transfer(key, own, ranges, ours, self._theirs, self._size, is_push=True))


def _tensors(layer: int) -> range:
    """Return K and V of a layer."""
    return range(TENSORS_PER_LAYER * layer, TENSORS_PER_LAYER * (layer + 1))
