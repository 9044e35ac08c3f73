"""What the SGLang integration does not cover, and how a process ends because of it.

A model that would run on stock SGLang must never run on kvelastic with wrong answers instead, nor
without kvelastic when it was asked for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final, NamedTuple, ParamSpec, TypeVar

from kvelastic.errors import EngineError, KvelasticError, UnsupportedEngineError

_P = ParamSpec("_P")
_R = TypeVar("_R")

_RANKS: Final = "each rank schedules for itself, and a limit would reach them at different steps"
_STORES: Final = "it keeps copies of pages, and would read pages without memory"
_WHOLE: Final = "it registers or moves the whole KV cache, and most of it has no memory"
_LAYOUT: Final = "it lays the KV cache out differently"
_LORA: Final = "on a CPU stock SGLang 0.5.23 ends at it, too: its LoRA layers want pinned memory"
_UNTRIED: Final = "it was not tried with pages that come and go"


class Covered(NamedTuple):
    """An argument of SGLang, the values that are covered, and why others are not."""

    field: str
    values: tuple[Any, ...]
    why: str


COVERED: Final = (
    Covered("device", ("cpu",), "SGLang on kvelastic has run on CPUs only so far"),
    Covered("tp_size", (1,), _RANKS),
    Covered("pp_size", (1,), _RANKS),
    Covered("dp_size", (1,), "its ranks would share one name"),
    Covered("dcp_size", (1,), _RANKS),
    Covered("attn_cp_size", (1,), _RANKS),
    Covered("nnodes", (1,), _RANKS),
    Covered("use_ray", (False,), "its processes load no plugins that are known here"),
    Covered("disaggregation_mode", ("null",), _WHOLE),
    Covered("decoupled_spec_role", ("null",), _UNTRIED),
    Covered("enable_pdmux", (False,), _UNTRIED),
    Covered("encoder_only", (False,), "it has no KV cache"),
    Covered("is_embedding", (False, None), _UNTRIED),
    Covered("speculative_algorithm", (None,), "its draft has a separate KV cache"),
    Covered("dllm_algorithm", (None,), _UNTRIED),
    Covered("kv_cache_dtype", ("auto", "bf16", "bfloat16"), "a quantised KV cache has scales too"),
    Covered("enable_hierarchical_cache", (False,), _STORES),
    Covered("hicache_storage_backend", (None,), _STORES),
    Covered("enable_unified_cache_external_linker", (False,), _STORES),
    Covered("enable_lmcache", (False,), _STORES),
    Covered("enable_flexkv", (False,), _STORES),
    Covered("enable_hisparse", (False,), _STORES),
    Covered("radix_cache_backend", (None,), "how it evicts is not known here"),
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
"""Every argument that has a say in where KV lies, who reads it, or who schedules."""


def refuse_arguments(resolved: Any) -> None:
    """Raise `UnsupportedEngineError` naming every argument that is not covered.

    `resolved` is SGLang's view of its arguments after it has resolved them.
    """
    found = [
        f"{each.field}={value!r}: {each.why}"
        for each in COVERED
        if (value := getattr(resolved, each.field)) not in each.values
    ]
    if resolved.page_size == 1:
        found.append(
            "page_size=1: SGLang's allocator for single tokens cannot be replaced. Give"
            " --page-size 16 or 32, or leave it out"
        )
    _refuse(found)


def refuse_cache(scheduler: Any) -> None:
    """Raise `UnsupportedEngineError` unless this scheduler's KV cache is kvelastic's, and whole.

    What kind of cache a model needs SGLang knows only once it has made it.
    """
    from kvelastic.integration.sglang.allocator import ElasticPagedAllocator
    from kvelastic.integration.sglang.kv_pool import ElasticMHATokenToKVPool
    from kvelastic.integration.sglang.radix_cache import ElasticRadixCache

    found = []
    if scheduler.is_hybrid_swa:
        found.append("a model with sliding windows: its two caches are not one pool")
    if scheduler.is_hybrid_ssm:
        found.append("a model with recurrent states beside attention")
    allocator = scheduler.token_to_kv_pool_allocator
    cache = allocator.get_kvcache()
    if not found and type(cache) is not ElasticMHATokenToKVPool:
        found.append(
            f"a KV cache of the kind {type(cache).__name__}: multi-head and grouped-query attention"
            " in bfloat16, float16 or float32 are covered"
        )
    if not found and type(allocator) is not ElasticPagedAllocator:
        found.append(f"a KV cache whose pages come from {type(allocator).__name__}")
    if not found and type(scheduler.tree_cache) is not ElasticRadixCache:
        found.append(f"a radix cache of the kind {type(scheduler.tree_cache).__name__}")
    _refuse(found)


def refuse_tiers(tree_cache: Any) -> None:
    """Raise `UnsupportedEngineError` where this radix cache holds nothing that tiers could keep."""
    if tree_cache.disable:
        _refuse(["KVELASTIC_TIERS without a radix cache: tiers keep what that one holds"])


def refuse_pool(pool: Any) -> None:
    """Raise `UnsupportedEngineError` for an MHA cache that SGLang lays out in a way not covered.

    `pool` is an `MHATokenToKVPool` that is about to make its tensors.
    """
    found = []
    if pool.kv_cache_layout != "nhd":
        found.append(f"the KV cache layout {pool.kv_cache_layout!r}: {_LAYOUT}")
    if pool.head_dim != pool.v_head_dim:
        found.append(f"heads of {pool.head_dim} for K and of {pool.v_head_dim} for V")
    _refuse(found)


def ends_process(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """The function, whose errors of kvelastic's end this process with status 1 and the message.

    SGLang catches exceptions of plugins, and of some of what is hooked, and would go on.
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
                " kvctl doctor looks for the reason; unset ENABLE_KVELASTIC to run SGLang without"
                " kvelastic."
            )
            raise SystemExit(f"kvelastic: {reason}") from error

    return ending


def _refuse(found: list[str]) -> None:
    if not found:
        return
    raise UnsupportedEngineError(
        "kvelastic does not cover what this SGLang was started with:\n"
        + "\n".join(f"  - {line}" for line in found)
        + "\nUnset ENABLE_KVELASTIC to run this without kvelastic."
    )
