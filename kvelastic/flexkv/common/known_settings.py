"""FlexKV's settings: a table of names, parsers, defaults, and the effect of each one here.

In a file, a setting has its name. In the environment, it is `FLEXKV_` and the name in capitals. The
rows are those of FlexKV v1.2.1 and of August 2026 together, and `weights`, which is kvelastic's
own. A parser raises `ValueError` with a text that lists the accepted values.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final, NamedTuple

_TRUE: Final = frozenset({"1", "true", "yes", "on"})
_FALSE: Final = frozenset({"0", "false", "no", "off"})
_LONGEST_TEXT: Final = 4096
Reader = Callable[[object], Any]


def boolean(value: object) -> bool:
    """Parse 0 or 1, true or false, yes or no, on or off."""
    word = str(value).strip().lower() if isinstance(value, bool | int | str) else ""
    if word not in _TRUE | _FALSE:
        raise ValueError("0 or 1, true or false")
    return word in _TRUE


def _whole(least: int) -> Reader:
    return _number("a whole number", int, least=least)


def _number(
    what: str = "a number",
    kind: type[float] = float,
    *,
    above: float = -math.inf,
    least: float = -math.inf,
    most: float = math.inf,
) -> Reader:
    bounds = {"above {:g}": above, "{:g} or more": least, "{:g} at most": most}
    finite = [text.format(value) for text, value in bounds.items() if math.isfinite(value)]
    accepted = ", ".join([what, *finite])

    def read(value: object) -> float:
        try:
            number = kind(value) if isinstance(value, str) else value
        except ValueError:
            number = None
        if not isinstance(number, (int, kind)) or isinstance(number, bool):
            raise ValueError(accepted)
        if not (abs(number) < math.inf and number > above and least <= number <= most):
            raise ValueError(accepted)
        return int(number) if number == int(number) else number

    return read


def _choice(*words: str) -> Reader:
    known = {word.lower(): word for word in words}

    def read(value: object) -> str:
        word = known.get(value.strip().lower()) if isinstance(value, str) else None
        if word is None:
            raise ValueError(", ".join(words[:-1]) + f" or {words[-1]}")
        return word

    return read


def _text(value: object) -> str:
    if not isinstance(value, str) or len(value) > _LONGEST_TEXT or "\0" in value:
        raise ValueError("a line of text")
    return value


def _folders(value: object) -> list[str]:
    parts = value.split(";") if isinstance(value, str) else value
    found = []
    if isinstance(parts, list) and all(isinstance(part, str) for part in parts):
        found = [_text(part.strip()) for part in parts if part.strip()]
    if not found:
        raise ValueError("a folder, or several with ; between them")
    return found


class Setting(NamedTuple):
    """One row of the table."""

    name: str
    read: Reader
    """Parses the text of a variable or the value in a file."""
    default: Any
    idle: str = ""
    """Why it has no effect here; empty if it has one."""
    instead: str = ""
    """For a setting that is refused if on: what to use instead."""
    only: str = ""
    """`environment` or `file` if FlexKV reads it only there."""
    legacy: tuple[str, ...] = ()
    """Earlier names in FlexKV."""

    @property
    def variable(self) -> str:
        """Name of the environment variable."""
        return f"FLEXKV_{self.name.upper()}"


def _idle(why: str, read: Reader, only: str = "", **defaults: Any) -> list[Setting]:
    return [
        Setting(name, read, default, idle=why, only=only, legacy=_LEGACY.get(name, ()))
        for name, default in defaults.items()
    ]


_LEGACY: Final = {
    "transfer_num_cta_h2d": ("transfer_sms_h2d",),
    "transfer_num_cta_d2h": ("transfer_sms_d2h",),
    "ce_segment_threshold": ("transfer_segment_threshold",),
    "ce_path_opt": ("transfer_path_opt",),
    "enable_ce_memcpy2d": ("enable_memcpy2d",),
    "iouring_entries": ("ioring_entries",),
    "iouring_flags": ("ioring_flags",),
}

_CUDA_COPY: Final = "copies to a device go by its copy engine, in one call"
_DISK: Final = "the disk tier sizes its files and its queue itself"
_PEERS: Final = "there are no peer tiers"
_OWN_METRICS: Final = "statistics are in kvctl and its exporter (docs/metrics.md)"
_STORE: Final = "remote_cache_path=mooncake:HOST:PORT names the store"
_SHMEM: Final = "there is no radix index in shared memory"
_EVICTION: Final = "an eviction takes what is asked for, from the tier's policy"
_TRACE: Final = "a trace is one file"
_PINNED: Final = "the disk tier without it; blocks pass pinned host memory"
_SHARED_STORE: Final = (
    "enable_remote with a shared folder or mooncake:HOST:PORT as remote_cache_path"
)
EVICTION_POLICIES: Final = ("lru", "lfu", "slru", "fifo")
_LAYOUTS: Final = ("BLOCKFIRST", "LAYERFIRST", "LAYERBLOCK")

# fmt: off
# ruff: noqa: E501
SETTINGS: Final[tuple[Setting, ...]] = (
    Setting("cpu_cache_gb", _number(above=0), 16),
    Setting("ssd_cache_gb", _number(least=0), 0),
    Setting("ssd_cache_dir", _folders, ["./flexkv_ssd"]),
    Setting("config_path", _text, None, only="environment"),
    Setting("server_client_mode", boolean, False),
    Setting("server_launch_mode", _choice("embedded", "external"), "embedded"),
    Setting("server_recv_port", _text, ""),
    Setting("instance_num", _whole(1), 1),
    Setting("instance_id", _whole(0), 0),
    Setting("eviction_policy", _choice(*EVICTION_POLICIES), "lru"),
    Setting("enable_trace", boolean, False),
    Setting("trace_file_path", _text, "./flexkv_trace.log"),
    Setting("log_level", _choice("debug", "info", "warning", "error", "critical", "off"), "info", only="environment"),
    Setting("num_log_interval_requests", _whole(1), 200),
    Setting("weights", _text, ""),
    Setting("enable_remote", boolean, False),
    Setting("remote_cache_path", _text, None),
    Setting("num_remote_blocks", _whole(1), None),
    Setting("enable_gds", boolean, False, instead=_PINNED),
    Setting("enable_nixl", boolean, False, instead=_PINNED),
    Setting("enable_p2p_cpu", boolean, False, instead=_SHARED_STORE),
    Setting("enable_p2p_ssd", boolean, False, instead=_SHARED_STORE),
    Setting("enable_3rd_remote", boolean, False, instead=_SHARED_STORE),
    Setting("use_mooncake_store_backend", boolean, False, instead=_SHARED_STORE),
    Setting("enable_radixshmem", boolean, False, instead="FLEXKV_SERVER_CLIENT_MODE=1, where several engines share one server's index"),
    Setting("enable_layerwise_transfer", boolean, False, instead="all layers of a block, which come in one copy"),
    Setting("swa_multi_group", boolean, None, instead="a model without sliding windows"),
    *_idle(_EVICTION, _number(least=0, most=1), evict_ratio=0.0),
    *_idle(_EVICTION, _number(above=0, most=1), evict_start_threshold=1.0),
    *_idle(_EVICTION, _whole(0), hit_reward_seconds=0),
    *_idle(_EVICTION, _whole(1), slru_protected_threshold=2),
    *_idle(_TRACE, _whole(1), trace_max_file_size_mb=100, trace_max_files=5),
    *_idle(_TRACE, _whole(0), trace_flush_interval_ms=1000),
    *_idle("lines of the log begin as all of kvelastic's do", _text, "environment", logging_prefix="FLEXKV"),
    *_idle("the index is native always", boolean, index_accel=True),
    *_idle("a record is BLOCKFIRST in every tier", _choice(*_LAYOUTS), cpu_layout="BLOCKFIRST", ssd_layout="BLOCKFIRST", remote_layout="BLOCKFIRST", gds_layout="BLOCKFIRST"),
    *_idle(_CUDA_COPY, boolean, use_ce_transfer_h2d=False, use_ce_transfer_d2h=False, ce_path_opt=True, enable_ce_memcpy2d=True, ce_gather_nt=True, enable_collective_sync=True),
    *_idle(_CUDA_COPY, _whole(1), transfer_num_cta_h2d=4, transfer_num_cta_d2h=4, ce_gather_threads=4),
    *_idle(_CUDA_COPY, _whole(0), ce_segment_threshold=8),
    *_idle(_CUDA_COPY, _text, mla_d2h_mode="sharded"),
    *_idle("layers are not copied one by one", _text, layerwise_notify_mode="hostfunc"),
    *_idle("copies need no kernel, so no MPS daemon is started", boolean, enable_mps=True),
    *_idle("a load is waited for as vLLM waits", boolean, "environment", sync_get=False),
    *_idle("a put is never skipped by a file in /tmp", boolean, "environment", maybe_skip_put=False),
    *_idle(_DISK, _whole(0), iouring_entries=512, iouring_flags=0),
    *_idle(_DISK, _text, ssd_io_opt=""),
    *_idle(_DISK, _number(), max_file_size_gb=-1.0),
    *_idle("the host pool takes huge pages where the kernel has some", boolean, use_hugepage_cpu_buffer=False, use_hugepage_tmp_buffer=False),
    *_idle("the host pool takes huge pages where the kernel has some", _whole(1), hugepage_size_bytes=2 << 20),
    *_idle(_PEERS, _whole(0), lt_pool_initial_capacity=10_000_000, idle_sleep_ms=10, safety_ttl_ms=100),
    *_idle(_PEERS, _whole(1), refresh_batch_size=256, rebuild_interval_ms=2000, lease_ttl_ms=30_000, renew_lease_ms=4000),
    *_idle(_PEERS, _text, "file", local_zmq_ip=None, redis_host=None, redis_password=None, local_ip=None),
    *_idle(_PEERS, _whole(0), "file", local_zmq_port=None, redis_port=None),
    *_idle(_PEERS, _whole(1), "file", node_ttl_seconds=None),
    *_idle(_PEERS, boolean, enable_p2p=False),
    *_idle(_STORE, _text, mooncake_store_config_path=None),
    *_idle(_STORE, _whole(0), "file", mooncake_store_pp_rank=0, mooncake_store_node_layer_start=0, mooncake_store_node_layer_end=0, mooncake_store_total_layers=0),
    *_idle(_STORE, _whole(1), "file", mooncake_store_pp_size=1),
    *_idle(_SHMEM, _text, radixshmem_server_name="", radix_registry="", radix_cluster_id="flexkv"),
    *_idle(_SHMEM, _whole(0), radix_rank=0, num_extra_te_channels=1),
    *_idle(_SHMEM, _whole(1), radix_world_size=1),
    *_idle("a match looks at every tier", boolean, prefetch_enabled=False),
    *_idle("records are not compressed", _whole(0), nvcomp_batch_size=0),
    *_idle("the dtype is the registered tensors'", _text, kv_cache_dtype=None),
    *_idle("windows have no pool of their own", boolean, enable_swa_transfer=False),
    *_idle("one node is served", _text, "environment", master_host="localhost", master_ports="5556,5557,5558"),
    *_idle(_OWN_METRICS, boolean, enable_metrics=False),
    *_idle(_OWN_METRICS, _whole(0), py_metrics_port=8080, cpp_metrics_port=8081),
)
# fmt: on

BY_NAME: Final[dict[str, Setting]] = {
    name: setting for setting in SETTINGS for name in (setting.name, *setting.legacy)
}
