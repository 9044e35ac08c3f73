"""vLLM's executor with an instance of kvelastic: a subclass of whichever executor vLLM chooses.

The executor is the first part of an engine core. It names kvelastic's scheduler, worker and
connector in vLLM's settings before vLLM makes these, so only this class must be handed to
vLLM.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from kvelastic.integration.vllm import in_engine_core, in_worker, tier_adapters
from kvelastic.integration.vllm.connector_settings import exchanges, is_ours, name_our_class
from kvelastic.integration.vllm.subclasses import Subclasses

if TYPE_CHECKING:
    from vllm.v1.executor.abstract import Executor

    from kvelastic.integration.vllm.scheduler_side import Instance
    from kvelastic.tiers.weights_fingerprint import WeightFiles
else:
    Executor = object

_log = logging.getLogger("kvelastic.vllm")

_KV_CACHE = "kv_cache"
"""vLLM's sleep and wake tag for KV cache memory."""

_T = TypeVar("_T")


class ElasticExecutor(Executor):  # type: ignore[misc]  # vLLM has no type information here
    """Overrides vLLM's executor: the instance's life, sleep and wake."""

    kvelastic_instance: Instance | None = None
    kvelastic_ranks: list[int]
    """The ranks that take part in the instance."""
    kvelastic_weights: WeightFiles | None = None
    """With tiers, the weight files as they were before loading."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        """Refuse unsupported settings before a worker starts or a model loads.

        With tiers it also records the state of the weight files. If a file changes later, its
        contents are treated as unknown.
        """
        from kvelastic import config
        from kvelastic.integration.vllm.start_checks import check_start

        check_start(vllm_config, [int(vllm_config.parallel_config.data_parallel_index)])
        if config.load().has_tiers:
            from kvelastic.integration.vllm.tier_namespace import weight_files_of

            self.kvelastic_weights = weight_files_of(vllm_config)
        _name_classes(vllm_config)
        in_engine_core.expect_pool(None)
        super().__init__(vllm_config, *args, **kwargs)

    def initialize_from_config(self, kv_cache_configs: list[Any]) -> None:
        """Create the instance; give each worker the paged layout and the segment to attach to."""
        from kvelastic.integration.vllm import scheduler_side
        from kvelastic.integration.vllm.refusals import refuse_cache_configuration
        from kvelastic.integration.vllm.tier_refusals import refuse_cache_for_tiers

        # A stage or a model without attention has no KV cache and takes no part.
        ranks = [rank for rank, config in enumerate(kv_cache_configs) if config.kv_cache_tensors]
        if not ranks:
            super().initialize_from_config(kv_cache_configs)
            return
        vllm_config = self.vllm_config
        has_tiers = is_ours(vllm_config.kv_transfer_config)
        with_cache = [kv_cache_configs[rank] for rank in ranks]
        for config in with_cache:
            refuse_cache_configuration(vllm_config, config)
            if has_tiers:
                refuse_cache_for_tiers(config)
        facts = self._on_each_worker(in_worker.device_facts)
        instance = scheduler_side.start_instance(
            vllm_config, with_cache, [facts[rank] for rank in ranks]
        )
        try:
            for rank, config in enumerate(with_cache):
                instance.rewrite(config, rank)
            super().initialize_from_config(kv_cache_configs)
            instance.wait_for_workers()
            tensors = []
            if exchanges(vllm_config.kv_transfer_config):
                from kvelastic.integration.vllm.record_split import layer_tensors

                of_rank = self._on_each_worker(layer_tensors)
                tensors = [of_rank[rank] for rank in ranks]
            instance.open_tiers(vllm_config, with_cache[0], self.kvelastic_weights, tensors)
        except BaseException:
            instance.close()
            raise
        self.kvelastic_instance = instance
        self.kvelastic_ranks = ranks
        # If the worker shares this process, the scheduler would otherwise read the id span here.
        vllm_config.cache_config.num_gpu_blocks = instance.num_blocks
        in_engine_core.expect_pool(instance)

    def compile_or_warm_up_model(self) -> None:
        """Start the maintenance thread after vLLM's warm-up.

        From then on the instance maps pages ahead, handles requests and gives memory to others. Not
        earlier: a driver call during CUDA graph capture can abort the capture.
        """
        from kvelastic.integration.vllm import end_with_starter

        instance = self.kvelastic_instance
        super().compile_or_warm_up_model()
        end_with_starter.note_start()
        if instance is None:
            return
        try:
            instance.begin(self._held_bytes())
        except BaseException:
            instance.close()
            raise

    def sleep(self, *args: Any, **kwargs: Any) -> None:
        """Release the whole KV cache after the workers have offloaded what vLLM itself manages.

        If the workers now hold less than at their start, the next wake reserves that smaller
        amount.
        """
        instance = self.kvelastic_instance
        if instance is not None and instance.is_on_gpu and not self.is_sleeping:
            instance.lower_reserve(self._held_bytes())
        super().sleep(*args, **kwargs)
        if instance is not None:
            instance.sleep()
            instance.report_engine_asleep(self.is_sleeping)
            if not instance.is_on_gpu:
                _log.info("Asleep: no KV cache is held; weights stay in memory on the CPU.")

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Allow block allocation again; pages are mapped when requests need them.

        On a GPU this also runs when only the weights wake: their reserve is requested first.
        """
        instance = self.kvelastic_instance
        if instance is not None and (
            tags is None or _KV_CACHE in tags or (instance.is_on_gpu and self.is_sleeping)
        ):
            instance.wake()
        super().wake_up(tags)
        if instance is not None:
            instance.report_engine_asleep(self.is_sleeping)

    def discard(self, tags: tuple[str, ...]) -> None:
        """Release the KV cache alone (`release_kv_cache_memory`); workers keep none of it."""
        instance = self.kvelastic_instance
        others = tuple(tag for tag in tags if tag != _KV_CACHE)
        if instance is None or len(others) == len(tags):
            super().discard(tags)
            return
        if others:
            super().discard(others)
        instance.sleep()
        self.sleeping_tags |= {_KV_CACHE}
        instance.report_engine_asleep(self.is_sleeping)

    def collective_rpc(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a worker method, which may change the weights that the tiers' blocks belong to."""
        try:
            return super().collective_rpc(method, *args, **kwargs)
        finally:
            instance = self.kvelastic_instance
            if instance is not None and instance.tiers is not None:
                instance.tiers.called_workers(method)

    def add_lora(self, lora_request: Any) -> bool:
        """Load an adapter, possibly in place of a loaded one."""
        tier_adapters.adds(lora_request)
        return bool(super().add_lora(lora_request))

    def remove_lora(self, lora_id: int) -> bool:
        """Remove an adapter: another one may get its number."""
        tier_adapters.forget(lora_id)
        return bool(super().remove_lora(lora_id))

    def _held_bytes(self) -> list[int]:
        """End the workers' start reserves; return what each rank of the instance holds."""
        held_bytes = self._on_each_worker(in_worker.hand_over_reserve)
        return [held_bytes[rank] for rank in self.kvelastic_ranks]

    def _on_each_worker(self, function: Callable[[Any], _T]) -> list[_T]:
        """Call a function of a module in each worker; return the results by rank."""
        results: list[_T] = super().collective_rpc(partial(_on_worker, function))
        return results


def _on_worker(function: Callable[[Any], _T], wrapper: Any) -> _T:
    """Run in a worker. `wrapper` is vLLM's `WorkerWrapperBase`."""
    return function(wrapper.worker)


def _name_classes(vllm_config: Any) -> None:
    """Name kvelastic's subclasses in vLLM's settings, which are final by now."""
    from kvelastic.integration.vllm import scheduler_class, worker_class

    parallel, scheduling = vllm_config.parallel_config, vllm_config.scheduler_config
    parallel.worker_cls = worker_class.path(parallel.worker_cls)
    scheduling.scheduler_cls = scheduler_class.path_over(scheduling.get_scheduler_cls())
    name_our_class(vllm_config.kv_transfer_config)


_subclasses = Subclasses(ElasticExecutor)
__getattr__ = _subclasses.find


def get_class(original: Callable[[Any], type], vllm_config: Any) -> type:
    """Wrap `Executor.get_class`: return the subclass of the executor that vLLM chooses."""
    return _subclasses.over(original(vllm_config))
