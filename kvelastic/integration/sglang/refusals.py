"""Refuses unsupported SGLang settings, and ends the process for them.

A model that works on stock SGLang must never return wrong results on kvelastic, nor run without
kvelastic if it was requested.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final, NamedTuple, ParamSpec, TypeVar

from kvelastic.errors import EngineError, KvelasticError
from kvelastic.integration.hooks.probe import refuse

_P = ParamSpec("_P")
_R = TypeVar("_R")

_refuse: Final = functools.partial(refuse, "kvelastic does not support these settings of SGLang:")

_RANKS: Final = "each rank schedules separately, and a limit would reach them at different steps"
_STORES: Final = "it copies pages and would read unmapped ones"
_WHOLE: Final = "it registers or moves the whole KV cache, and most of it has no memory"
_LAYOUT: Final = "it lays the KV cache out differently"
_LORA: Final = "on a CPU stock SGLang 0.5.23 fails too: its LoRA layers need pinned memory"
_SPECULATION: Final = (
    "a draft model has a separate KV cache; n-grams need kernels that SGLang 0.5.23 has no CPU"
    " build of"
)
_UNTRIED: Final = "it is not tested with pages that are unmapped"


class Covered(NamedTuple):
    """An argument of SGLang, its supported values, and why others are not supported."""

    field: str
    values: tuple[Any, ...]
    why: str


COVERED: Final = (
    Covered("device", ("cpu",), "SGLang on kvelastic is tested on CPUs only"),
    Covered("tp_size", (1,), _RANKS),
    Covered("pp_size", (1,), _RANKS),
    Covered("dp_size", (1,), "its ranks would share one name"),
    Covered("dcp_size", (1,), _RANKS),
    Covered("attn_cp_size", (1,), _RANKS),
    Covered("nnodes", (1,), _RANKS),
    Covered("use_ray", (False,), "its processes load plugins in an unknown way"),
    Covered("disaggregation_mode", ("null",), _WHOLE),
    Covered("decoupled_spec_role", ("null",), _UNTRIED),
    Covered("enable_pdmux", (False,), _UNTRIED),
    Covered("encoder_only", (False,), "it has no KV cache"),
    Covered("is_embedding", (False, None), _UNTRIED),
    Covered("speculative_algorithm", (None,), _SPECULATION),
    Covered("dllm_algorithm", (None,), _UNTRIED),
    Covered("kv_cache_dtype", ("auto", "bf16", "bfloat16"), "a quantised KV cache has scales too"),
    Covered("enable_hierarchical_cache", (False,), _STORES),
    Covered("hicache_storage_backend", (None,), _STORES),
    Covered("enable_unified_cache_external_linker", (False,), _STORES),
    Covered("enable_lmcache", (False,), _STORES),
    Covered("enable_flexkv", (False,), _STORES),
    Covered("enable_hisparse", (False,), _STORES),
    Covered("radix_cache_backend", (None,), "its eviction is unknown to kvelastic"),
    Covered("enable_session_radix_cache", (False,), _UNTRIED),
    Covered("enable_streaming_session", (False,), _UNTRIED),
    Covered("enable_unified_memory", (False,), _LAYOUT),
    Covered("enable_page_major_kv_layout", (False,), _LAYOUT),
    Covered("enable_kv_cache_sharding", (False,), _LAYOUT),
    Covered("prefill_only_disable_kv_cache", (False,), "it has no KV cache"),
    Covered("enable_memory_saver", (False,), "it would free the KV cache a second time"),
    Covered("enable_two_batch_overlap", (False,), _UNTRIED),
    Covered("enable_lora", (False, None), _LORA),
    Covered("kv_canary", ("none",), "it writes to pages that have no memory"),
)
"""Every argument that affects where KV lies, which code reads it, or scheduling."""


def refuse_arguments(resolved: Any) -> None:
    """Raise `UnsupportedEngineError` naming every unsupported argument.

    `resolved` is SGLang's view of its resolved arguments.
    """
    found = [
        f"{each.field}={value!r}: {each.why}"
        for each in COVERED
        if (value := getattr(resolved, each.field)) not in each.values
    ]
    if resolved.page_size == 1:
        found.append(
            "page_size=1: SGLang's allocator for single tokens cannot be replaced. Set"
            " --page-size 16 or 32, or omit it"
        )
    _refuse(found)


def refuse_cache(
    scheduler: Any, cache_class: type, allocator_class: type, tree_class: type
) -> None:
    """Raise `UnsupportedEngineError` unless this scheduler's KV cache is entirely kvelastic's.

    SGLang chooses the kind of cache only when it creates it. The classes are the elastic ones.
    """
    found = []
    if scheduler.is_hybrid_swa:
        found.append("a model with sliding windows: its two caches are not one pool")
    if scheduler.is_hybrid_ssm:
        found.append("a model with recurrent states beside attention")
    allocator = scheduler.token_to_kv_pool_allocator
    cache = allocator.get_kvcache()
    if not found and type(cache) is not cache_class:
        found.append(
            f"a KV cache of the kind {type(cache).__name__}; supported are multi-head and"
            " grouped-query attention in bfloat16, float16 or float32"
        )
    if not found and type(allocator) is not allocator_class:
        found.append(f"a KV cache whose pages come from {type(allocator).__name__}")
    if not found and type(scheduler.tree_cache) is not tree_class:
        found.append(f"a radix cache of the kind {type(scheduler.tree_cache).__name__}")
    _refuse(found)


def refuse_tiers(tree_cache: Any) -> None:
    """Raise `UnsupportedEngineError` if the radix cache is disabled: tiers store its blocks."""
    if tree_cache.disable:
        _refuse(["KVELASTIC_TIERS without a radix cache: tiers store only its blocks"])


def refuse_pool(pool: Any) -> None:
    """Raise `UnsupportedEngineError` for an unsupported layout of an MHA cache.

    `pool` is an `MHATokenToKVPool` that is about to create its tensors.
    """
    found = []
    if pool.kv_cache_layout != "nhd":
        found.append(f"the KV cache layout {pool.kv_cache_layout!r}: {_LAYOUT}")
    if pool.head_dim != pool.v_head_dim:
        found.append(f"heads of {pool.head_dim} for K and of {pool.v_head_dim} for V")
    _refuse(found)


def ends_process(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Wrap a function: a kvelastic error in it ends this process with status 1 and the message.

    SGLang catches exceptions of plugins and of some hooked functions, and would continue.
    """

    @functools.wraps(function)
    def ending(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return function(*args, **kwargs)
        except KvelasticError as error:
            raise SystemExit(f"kvelastic: {error}") from error
        except Exception as error:
            reason = EngineError(
                f"kvelastic could not be loaded into SGLang: {type(error).__name__}: {error}."
                " Run kvctl doctor to find the reason; unset ENABLE_KVELASTIC to run SGLang without"
                " kvelastic."
            )
            raise SystemExit(f"kvelastic: {reason}") from error

    return ending
