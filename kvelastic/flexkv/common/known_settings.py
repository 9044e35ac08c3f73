"""Every setting of FlexKV's file and environment, and what becomes of it here.

One row a setting. In the file it has its name, in the environment `FLEXKV_` and that in capitals.
The rows are FlexKV's of v1.2.1 and of August 2026 together, and `weights`, which is kvelastic's own; a
name that is in none is a mistake.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from kvelastic.flexkv.common.setting_values import (
    boolean,
    choice,
    folders,
    number,
    text,
    whole,
)


@dataclass(frozen=True)
class Setting:
    """One row: how its value is read, and what it does."""

    name: str
    read: Callable[[object], Any]
    """From the text of a variable or the value in a file; raises `ValueError` saying what fits."""
    default: Any
    idle: str = ""
    """Why it does nothing here; empty where it does something."""
    instead: str = ""
    """For what is refused once it is switched on: what to use instead."""
    only: str = ""
    """`environment` for what FlexKV reads there alone, `file` for what it reads there alone."""
    legacy: tuple[str, ...] = ()
    """Other spellings that FlexKV had."""

    @property
    def variable(self) -> str:
        """Its name in the environment."""
        return f"FLEXKV_{self.name.upper()}"


_NATIVE: Final = "the index is native always"
_CUDA_COPY: Final = "copies to a device go by its copy engine, in one call"
_DISK: Final = "the disk tier sizes its files and its queue itself"
_PEERS: Final = "there are no peer tiers"
_OWN_METRICS: Final = "figures are in kvctl and its exporter (docs/metrics.md)"
_ONE_NODE: Final = "one node is served"
_RECORDS: Final = "a record is BLOCKFIRST in every tier"
_STORE: Final = "remote_cache_path=mooncake:HOST:PORT names the store"
_COMPRESSION: Final = "records are not compressed"
_SHMEM: Final = "there is no radix index in shared memory"
_WINDOWS: Final = "windows have no pool of their own"

_EVICTION: Final = "an eviction takes what is asked for, from the tier's policy"
_TRACE: Final = "a trace is one file"

LAYERS: Final = "all layers of a block, which come in one copy"
SHARED_INDEX: Final = "FLEXKV_SERVER_CLIENT_MODE=1, where several engines share one server's index"
WINDOWS: Final = "a model without sliding windows"

_LAYOUTS: Final = ("BLOCKFIRST", "LAYERFIRST", "LAYERBLOCK")
_POLICIES: Final = ("lru", "lfu", "slru", "fifo")
_MIB: Final = 1 << 20

# fmt: off
# ruff: noqa: E501
SETTINGS: Final[tuple[Setting, ...]] = (
    Setting("cpu_cache_gb", number(above=0), 16),
    Setting("ssd_cache_gb", number(least=0), 0),
    Setting("ssd_cache_dir", folders, ["./flexkv_ssd"]),
    Setting("config_path", text, None, only="environment"),
    Setting("server_client_mode", boolean, False),
    Setting("server_launch_mode", choice("embedded", "external"), "embedded"),
    Setting("server_recv_port", text, ""),
    Setting("instance_num", whole(least=1), 1),
    Setting("instance_id", whole(least=0), 0),
    Setting("eviction_policy", choice(*_POLICIES), "lru"),
    Setting("evict_ratio", number(least=0, most=1), 0.0, idle=_EVICTION),
    Setting("evict_start_threshold", number(above=0, most=1), 1.0, idle=_EVICTION),
    Setting("hit_reward_seconds", whole(least=0), 0, idle=_EVICTION),
    Setting("slru_protected_threshold", whole(least=1), 2, idle=_EVICTION),
    Setting("enable_trace", boolean, False),
    Setting("trace_file_path", text, "./flexkv_trace.log"),
    Setting("trace_max_file_size_mb", whole(least=1), 100, idle=_TRACE),
    Setting("trace_max_files", whole(least=1), 5, idle=_TRACE),
    Setting("trace_flush_interval_ms", whole(least=0), 1000, idle=_TRACE),
    Setting("log_level", choice("debug", "info", "warning", "error", "critical", "off"), "info", only="environment"),
    Setting("logging_prefix", text, "FLEXKV", only="environment", idle="lines of the log begin as all of kvelastic's do"),
    Setting("num_log_interval_requests", whole(least=1), 200),

    Setting("weights", text, ""),
    Setting("enable_remote", boolean, False),
    Setting("remote_cache_path", text, None),
    Setting("num_remote_blocks", whole(least=1), None),

    # CacheConfig refuses these and says what to use instead.
    Setting("enable_gds", boolean, False),
    Setting("enable_nixl", boolean, False),
    Setting("enable_p2p_cpu", boolean, False),
    Setting("enable_p2p_ssd", boolean, False),
    Setting("enable_3rd_remote", boolean, False),
    Setting("use_mooncake_store_backend", boolean, False),
    Setting("enable_radixshmem", boolean, False, instead=SHARED_INDEX),
    Setting("enable_layerwise_transfer", boolean, False, instead=LAYERS),
    Setting("swa_multi_group", boolean, None, instead=WINDOWS),

    Setting("index_accel", boolean, True, idle=_NATIVE),
    Setting("cpu_layout", choice(*_LAYOUTS), "BLOCKFIRST", idle=_RECORDS),
    Setting("ssd_layout", choice(*_LAYOUTS), "BLOCKFIRST", idle=_RECORDS),
    Setting("remote_layout", choice(*_LAYOUTS), "BLOCKFIRST", idle=_RECORDS),
    Setting("gds_layout", choice(*_LAYOUTS), "BLOCKFIRST", idle=_RECORDS),
    Setting("use_ce_transfer_h2d", boolean, False, idle=_CUDA_COPY),
    Setting("use_ce_transfer_d2h", boolean, False, idle=_CUDA_COPY),
    Setting("transfer_num_cta_h2d", whole(least=1), 4, idle=_CUDA_COPY, legacy=("transfer_sms_h2d",)),
    Setting("transfer_num_cta_d2h", whole(least=1), 4, idle=_CUDA_COPY, legacy=("transfer_sms_d2h",)),
    Setting("ce_segment_threshold", whole(least=0), 8, idle=_CUDA_COPY, legacy=("transfer_segment_threshold",)),
    Setting("ce_path_opt", boolean, True, idle=_CUDA_COPY, legacy=("transfer_path_opt",)),
    Setting("enable_ce_memcpy2d", boolean, True, idle=_CUDA_COPY, legacy=("enable_memcpy2d",)),
    Setting("ce_gather_threads", whole(least=1), 4, idle=_CUDA_COPY),
    Setting("ce_gather_nt", boolean, True, idle=_CUDA_COPY),
    Setting("mla_d2h_mode", text, "sharded", idle=_CUDA_COPY),
    Setting("layerwise_notify_mode", text, "hostfunc", idle="layers are not copied one by one"),
    Setting("enable_collective_sync", boolean, True, idle=_CUDA_COPY),
    Setting("enable_mps", boolean, True, idle="copies need no kernel, so no MPS daemon is started"),
    Setting("sync_get", boolean, False, only="environment", idle="a load is waited for as vLLM waits"),
    Setting("maybe_skip_put", boolean, False, only="environment", idle="a put is never skipped by a file in /tmp"),
    Setting("iouring_entries", whole(least=0), 512, idle=_DISK, legacy=("ioring_entries",)),
    Setting("iouring_flags", whole(least=0), 0, idle=_DISK, legacy=("ioring_flags",)),
    Setting("ssd_io_opt", text, "", idle=_DISK),
    Setting("max_file_size_gb", number(), -1.0, idle=_DISK),
    Setting("use_hugepage_cpu_buffer", boolean, False, idle="the host pool takes huge pages where the kernel has some"),
    Setting("use_hugepage_tmp_buffer", boolean, False, idle="the host pool takes huge pages where the kernel has some"),
    Setting("hugepage_size_bytes", whole(least=1), 2 * _MIB, idle="the host pool takes huge pages where the kernel has some"),
    Setting("lt_pool_initial_capacity", whole(least=0), 10_000_000, idle=_PEERS),
    Setting("refresh_batch_size", whole(least=1), 256, idle=_PEERS),
    Setting("rebuild_interval_ms", whole(least=1), 2000, idle=_PEERS),
    Setting("idle_sleep_ms", whole(least=0), 10, idle=_PEERS),
    Setting("lease_ttl_ms", whole(least=1), 30_000, idle=_PEERS),
    Setting("safety_ttl_ms", whole(least=0), 100, idle=_PEERS),
    Setting("renew_lease_ms", whole(least=1), 4000, idle=_PEERS),
    Setting("local_zmq_ip", text, None, only="file", idle=_PEERS),
    Setting("local_zmq_port", whole(least=0), None, only="file", idle=_PEERS),
    Setting("redis_host", text, None, only="file", idle=_PEERS),
    Setting("redis_port", whole(least=0), None, only="file", idle=_PEERS),
    Setting("redis_password", text, None, only="file", idle=_PEERS),
    Setting("local_ip", text, None, only="file", idle=_PEERS),
    Setting("node_ttl_seconds", whole(least=1), None, only="file", idle=_PEERS),
    Setting("enable_p2p", boolean, False, idle=_PEERS),
    Setting("mooncake_store_config_path", text, None, idle=_STORE),
    Setting("mooncake_store_pp_rank", whole(least=0), 0, only="file", idle=_STORE),
    Setting("mooncake_store_pp_size", whole(least=1), 1, only="file", idle=_STORE),
    Setting("mooncake_store_node_layer_start", whole(least=0), 0, only="file", idle=_STORE),
    Setting("mooncake_store_node_layer_end", whole(least=0), 0, only="file", idle=_STORE),
    Setting("mooncake_store_total_layers", whole(least=0), 0, only="file", idle=_STORE),
    Setting("radixshmem_server_name", text, "", idle=_SHMEM),
    Setting("radix_rank", whole(least=0), 0, idle=_SHMEM),
    Setting("radix_world_size", whole(least=1), 1, idle=_SHMEM),
    Setting("radix_registry", text, "", idle=_SHMEM),
    Setting("radix_cluster_id", text, "flexkv", idle=_SHMEM),
    Setting("num_extra_te_channels", whole(least=0), 1, idle=_SHMEM),
    Setting("prefetch_enabled", boolean, False, idle="a match looks at every tier"),
    Setting("nvcomp_batch_size", whole(least=0), 0, idle=_COMPRESSION),
    Setting("kv_cache_dtype", text, None, idle="the dtype is the registered tensors'"),
    Setting("enable_swa_transfer", boolean, False, idle=_WINDOWS),
    Setting("master_host", text, "localhost", only="environment", idle=_ONE_NODE),
    Setting("master_ports", text, "5556,5557,5558", only="environment", idle=_ONE_NODE),
    Setting("enable_metrics", boolean, False, idle=_OWN_METRICS),
    Setting("py_metrics_port", whole(least=0), 8080, idle=_OWN_METRICS),
    Setting("cpp_metrics_port", whole(least=0), 8081, idle=_OWN_METRICS),
)
# fmt: on

BY_NAME: Final[dict[str, Setting]] = {
    name: setting for setting in SETTINGS for name in (setting.name, *setting.legacy)
}
