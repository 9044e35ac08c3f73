"""Configuration of FlexKV's interface: the shape of a model's KV, and the tiers that keep it.

    model = ModelConfig(num_layers=32, num_kv_heads=8, head_size=128, dtype="bfloat16")
    cache = CacheConfig(num_cpu_blocks=4096, enable_ssd=True, ssd_cache_dir="/mnt/nvme/kv")
    check_supported(model, cache)

Names and defaults are FlexKV's. A feature that kvelastic lacks raises `UnsupportedError`, which
names the replacement.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Final

from kvelastic.errors import ConfigError, InvalidArgumentError, UnsupportedError
from kvelastic.flexkv.common.known_settings import BY_NAME, EVICTION_POLICIES
from kvelastic.flexkv.common.user_config import (
    GLOBAL_CONFIG_FROM_ENV,
    UserConfig,
    load_user_config_from_env,
    load_user_config_from_file,
    update_default_config_from_user_config,
)

__all__ = [
    "GLOBAL_CONFIG_FROM_ENV", "CacheConfig", "ModelConfig", "UserConfig", "check_supported",
    "dtype_name", "item_bytes", "load_user_config_from_env", "load_user_config_from_file",
    "update_default_config_from_user_config",
]  # fmt: skip

_ITEM_BYTES: Final = {
    **dict.fromkeys(("float64", "double"), 8),
    **dict.fromkeys(("float32", "float"), 4),
    **dict.fromkeys(("bfloat16", "float16", "half"), 2),
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "fp8", "int8", "uint8"), 1),
}
MOONCAKE_PREFIX: Final = "mooncake:"


_MODEL_COUNTS: Final = (
    *("num_layers", "num_kv_heads", "head_size", "tp_size"),
    *("pp_size", "dp_size", "cp_size", "nnodes", "instance_num"),
)


@dataclass
class ModelConfig:
    """The shape of a model's KV. The first seven fields are in FlexKV's order.

    Fields may be set one by one; a manager copies them. Setting an invalid value or an unknown
    field raises `InvalidArgumentError`.
    """

    num_layers: int = 1
    num_kv_heads: int = 1
    head_size: int = 1
    use_mla: bool | int | None = None
    """True: K and V in one fused row. None: derived from `kv_dim`. A bool after construction.

    Newer FlexKV has `kv_dim` in this position, so 1 and 2 are accepted as values of `kv_dim`.
    """
    dtype: Any = "bfloat16"
    """A name, or a dtype of torch or NumPy."""
    tp_size: int = 1
    dp_size: int = 1
    kv_dim: int = 2
    """2: K and V; 1: one fused row (MLA, packed). Setting it sets `use_mla`, and the reverse."""
    pp_size: int = 1
    cp_size: int = 1
    nnodes: int = 1
    instance_num: int = 1
    model: str = ""
    """The model's name, for `kvctl tiers erase --model`."""
    weights: str = ""
    """Fingerprint of the weights. Required to find blocks on disk or remote after a restart.

    Without it, two models with the same shape could not be distinguished.
    """
    engine: str = ""
    """Text for everything else that changes a block's bytes: engine, version, byte order.

    An engine finds only blocks that were stored with the same text.
    """

    def __post_init__(self) -> None:
        given_dim = None if self.use_mla is None else _kv_dim(self.use_mla)
        if given_dim == 2 and self.kv_dim == 1:
            raise InvalidArgumentError(
                f"use_mla={self.use_mla!r} and kv_dim=1 contradict each other; give one of them"
            )
        self.kv_dim = self.kv_dim if given_dim is None else given_dim
        self.check()

    def __setattr__(self, name: str, value: Any) -> None:
        """Check the value and set it. Raises `InvalidArgumentError`."""
        if name in _MODEL_COUNTS:
            _check_count(name, value)
        elif name == "dtype":
            item_bytes(value)
        elif name == "kv_dim":
            if isinstance(value, bool) or value not in (1, 2):
                raise InvalidArgumentError(f"kv_dim={value!r}; give 2 for K and V, 1 for one row")
            is_made = "engine" in vars(self)  # the last field is set, so `use_mla` has been read
            if is_made:
                object.__setattr__(self, "use_mla", value == 1)
        elif name == "use_mla":
            given_dim = None if value is None else _kv_dim(value)
            if "kv_dim" in vars(self) and given_dim is not None:
                self.kv_dim = given_dim
                return
        elif name not in ("model", "weights", "engine"):
            raise InvalidArgumentError(
                f"ModelConfig has no field {name!r}; it has"
                f" {', '.join(one.name for one in fields(self))}"
            )
        elif not isinstance(value, str):
            raise InvalidArgumentError(f"{name}={value!r} is not accepted; give a text")
        object.__setattr__(self, name, value)

    def check(self) -> None:
        """Raise `InvalidArgumentError` if fields contradict each other."""
        if self.kv_dim == 2 and self.num_kv_heads % self.tp_size:
            raise InvalidArgumentError(
                f"num_kv_heads={self.num_kv_heads} cannot be divided by tp_size={self.tp_size};"
                " give the heads of all ranks together, replicated ones included"
            )

    @property
    def clients(self) -> int:
        """Number of data-parallel clients of all instances."""
        return self.dp_size * self.instance_num

    def check_client(self, dp_client_id: object) -> None:
        """Raise `InvalidArgumentError` unless this is one of the data-parallel clients."""
        is_number = isinstance(dp_client_id, int) and not isinstance(dp_client_id, bool)
        if not is_number or dp_client_id not in range(self.clients):
            raise InvalidArgumentError(
                f"data-parallel client {dp_client_id!r} is none of {self.clients}; dp_client_id is"
                " instance_id * dp_size + dp_rank"
            )

    @property
    def dtype_name(self) -> str:
        """The dtype's name without its module."""
        return dtype_name(self.dtype)

    @property
    def heads_per_rank(self) -> int:
        """KV heads of one tensor-parallel rank. A fused row is not divided among ranks."""
        return self.num_kv_heads if self.kv_dim == 1 else self.num_kv_heads // self.tp_size

    @property
    def ranks_in_a_record(self) -> int:
        """Number of ranks whose bytes a record holds: 1 if all ranks have the same fused row."""
        return 1 if self.kv_dim == 1 else self.tp_size

    @property
    def attn_tp_size(self) -> int:
        """FlexKV's name for the number of ranks that divide a token's heads: `tp_size`."""
        return self.tp_size

    tp_size_per_node = attn_tp_size

    @property
    def attn_cp_size(self) -> int:
        """FlexKV's name for the number of context-parallel ranks: `cp_size`."""
        return self.cp_size

    @property
    def token_size_in_bytes(self) -> int:
        """Bytes of one token, summed over layers and ranks."""
        row = self.num_kv_heads * self.head_size * item_bytes(self.dtype)
        return self.num_layers * self.kv_dim * row

    @property
    def rank_token_bytes(self) -> int:
        """Bytes of one token in one rank, summed over layers."""
        return self.token_size_in_bytes // self.ranks_in_a_record


def _kv_dim(use_mla: object) -> int:
    if isinstance(use_mla, bool):
        return 1 if use_mla else 2
    if isinstance(use_mla, int) and use_mla in (1, 2):
        return use_mla
    raise InvalidArgumentError(
        f"use_mla={use_mla!r} is not accepted; give True or False, or kv_dim (1 or 2). The dtype"
        " comes after it"
    )


@dataclass
class CacheConfig:
    """The tiers and their sizes. Values are checked by `check()`, which `KVManager` calls."""

    tokens_per_block: int = 16
    enable_cpu: bool = True
    enable_ssd: bool = False
    enable_gds: bool = False
    enable_nixl: bool = False
    enable_remote: bool = False
    enable_p2p_cpu: bool = False
    enable_p2p_ssd: bool = False
    enable_3rd_remote: bool = False
    use_mooncake_store_backend: bool = False
    num_cpu_blocks: int = 1_000_000
    """A limit, not a reservation: host memory is allocated as blocks are stored."""
    num_ssd_blocks: int = 10_000_000
    num_remote_blocks: int | None = None
    """None: the remote store sets its own limit."""
    ssd_cache_dir: str | list[str] | None = None
    """One folder or several; in one string they are separated by `;`."""
    remote_cache_path: str | None = None
    """A shared folder, or `mooncake:HOST:PORT`."""
    eviction_policy: str = "lru"
    staging_bytes: int = 64 << 20
    """Host memory for copies in progress."""
    cpu_name: str | None = None
    """Name of the CPU tier in `kvctl`; None: automatic."""
    trace_path: str | None = None
    """File in which requests are recorded (`common.tracer`); None: no recording."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Data of integrations. kvelastic does not read it."""

    @property
    def enable_kv_sharing(self) -> bool:
        """True if peers read each other's tiers. The name is FlexKV's."""
        return self.enable_p2p_cpu or self.enable_p2p_ssd

    @property
    def ssd_folders(self) -> list[str]:
        """`ssd_cache_dir` as a list."""
        if self.ssd_cache_dir is None:
            return []
        if isinstance(self.ssd_cache_dir, str):
            return [part.strip() for part in self.ssd_cache_dir.split(";") if part.strip()]
        return list(self.ssd_cache_dir)

    def check(self) -> None:
        """Raise `ConfigError` for an invalid value, or a setting that requires another one.

        Raise `UnsupportedError`, which names the replacement, for a feature that kvelastic lacks.
        """
        for name, value in vars(self).items():
            if value and name in BY_NAME and BY_NAME[name].instead:
                raise UnsupportedError(f"{name}={value}: use {BY_NAME[name].instead}")
        for name in ("tokens_per_block", "num_cpu_blocks", "num_ssd_blocks", "staging_bytes"):
            _check_count(name, getattr(self, name), ConfigError)
        if self.num_remote_blocks is not None:
            _check_count("num_remote_blocks", self.num_remote_blocks, ConfigError)
        if self.eviction_policy not in EVICTION_POLICIES:
            raise ConfigError(
                f"eviction_policy={self.eviction_policy!r} is not accepted; give one of"
                f" {', '.join(EVICTION_POLICIES)}"
            )
        if not self.enable_cpu:
            raise ConfigError("enable_cpu=False: every transfer passes the CPU tier; leave it on")
        if self.enable_ssd and not self.ssd_folders:
            raise ConfigError("enable_ssd=True without ssd_cache_dir; name a folder or several")
        if self.enable_remote and not self.remote_cache_path:
            raise ConfigError(
                "enable_remote=True without remote_cache_path; name a shared folder, or"
                f" {MOONCAKE_PREFIX}HOST:PORT"
            )


def check_supported(model: ModelConfig, cache: CacheConfig) -> None:
    """Check both configurations and how they are combined.

    Raises `UnsupportedError` for a feature that kvelastic lacks, `ConfigError` for an invalid value
    in `cache`, and `InvalidArgumentError` if fields of `model` contradict each other.
    """
    model.check()
    for name, instead in _MOST_ONE.items():
        if getattr(model, name) > 1:
            raise UnsupportedError(f"{name}={getattr(model, name)}: {instead}")
    cache.check()


_MOST_ONE: Final = {
    "nnodes": "ranks of one model on several machines are not served; run one instance a machine"
    " and share what they keep by enable_remote",
    "cp_size": "a block that is spread over context-parallel ranks is not served; use tensor"
    " parallelism",
    "pp_size": "give each pipeline stage its own KVManager, with the layers of that stage",
}


def dtype_name(dtype: Any) -> str:
    """Return the plain name of `torch.bfloat16`, `numpy.float16` or `"float16"`."""
    if isinstance(dtype, str):
        return dtype.removeprefix("torch.")
    if isinstance(dtype, type):
        return dtype.__name__
    name = getattr(dtype, "name", None)
    return name if isinstance(name, str) else str(dtype).removeprefix("torch.")


def item_bytes(dtype: Any) -> int:
    """Return the bytes of one element. Raises `InvalidArgumentError` for an unknown dtype."""
    known = _ITEM_BYTES.get(dtype_name(dtype))
    if known is not None:
        return known
    size = getattr(dtype, "itemsize", None)
    if isinstance(size, int) and size > 0:
        return size
    raise InvalidArgumentError(
        f"dtype={dtype!r} is not accepted; give a dtype of torch or NumPy, or one of"
        f" {', '.join(_ITEM_BYTES)}"
    )


def _check_count(
    name: str, value: object, error: type[InvalidArgumentError | ConfigError] = InvalidArgumentError
) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise error(f"{name}={value!r} is not accepted; give a whole number from 1 on")
