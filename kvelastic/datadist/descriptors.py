"""Descriptions of caches (`CacheDesc`), the keys by which caches are found, and peers to link.

    CacheDesc(80, [4, 2048, 1, 128], DataType.DT_FLOAT16)      # 80 tensors: K0, V0, K1, V1, ...
    CacheKey(1, req_id=7)                   # of cluster 1, the row of request 7
    CacheKeyByIdAndIndex(1, cache_id, 2)    # row 2 of a cache
    BlocksCacheKey(1)                       # the blocks cache of model 0

    cluster = LLMClusterInfo()
    cluster.remote_cluster_id = 1
    cluster.append_remote_ip_info("127.0.0.1", 26000)

Descriptions and keys are immutable values: hashable and equal by value.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Annotated, Final, Literal, NamedTuple, TypeAlias, cast

from msgspec import Meta

from kvelastic.datadist import checks
from kvelastic.datadist.enums import DataType, LLMRole, Memtype, Placement
from kvelastic.datadist.status import LLMParamError

INVALID_ID: Final = checks.MAX_UINT64
"""A `req_id` or `prefix_id` that means none.

A key with both set to it leaves its row without key.
"""

MAX_CACHE_BYTES: Final = 1 << 50
"""Maximum size of a described cache, so that sums of bytes never overflow at a peer."""

MAX_TENSORS: Final = 1 << 16

_ELEMENTS: Final = {
    DataType.DT_FLOAT: ("float32", 4),
    DataType.DT_FLOAT16: ("float16", 2),
    DataType.DT_INT8: ("int8", 1),
    DataType.DT_INT32: ("int32", 4),
    DataType.DT_UINT8: ("uint8", 1),
    DataType.DT_INT16: ("int16", 2),
    DataType.DT_UINT16: ("uint16", 2),
    DataType.DT_UINT32: ("uint32", 4),
    DataType.DT_INT64: ("int64", 8),
    DataType.DT_UINT64: ("uint64", 8),
    DataType.DT_DOUBLE: ("float64", 8),
    DataType.DT_BOOL: ("bool", 1),
    DataType.DT_BF16: ("uint16", 2),  # raw bits: numpy has no bfloat16
}


def numpy_name(data_type: DataType) -> str:
    """Return the numpy dtype of an element. Raises `KeyError` for `DT_STRING`, which has none."""
    return _ELEMENTS[data_type][0]


def item_bytes(data_type: DataType) -> int:
    """Return the bytes of an element; 0 for `DT_STRING`, whose elements have no fixed size."""
    return _ELEMENTS.get(data_type, ("", 0))[1]


@dataclass(frozen=True)
class CacheDesc:
    """A cache of `num_tensors` contiguous tensors of `shape`.

    Along `batch_dim_index` (default: the first dimension) a tensor has rows; in a blocks cache
    these are its blocks. Raises `TypeError` and `LLMParamError`.
    """

    num_tensors: int
    shape: Annotated[Sequence[int], Meta(max_length=16)]  # the bound is for a peer's message
    data_type: DataType
    placement: Placement = Placement.DEVICE
    batch_dim_index: int = 0
    seq_len_dim_index: int = -1
    kv_tensor_format: str | None = None

    def __post_init__(self) -> None:
        checks.integer("num_tensors", self.num_tensors, least=1, most=MAX_TENSORS)
        object.__setattr__(self, "shape", tuple(checks.integers("shape", self.shape, least=1)))
        checks.instance("data_type", self.data_type, DataType)
        checks.instance("placement", self.placement, Placement)
        last = len(self.shape) - 1
        checks.integer("batch_dim_index", self.batch_dim_index, most=last)
        checks.integer("seq_len_dim_index", self.seq_len_dim_index, least=-1, most=last)
        if self.kv_tensor_format is not None:
            checks.instance("kv_tensor_format", self.kv_tensor_format, str)
        if not item_bytes(self.data_type):
            raise LLMParamError(f"data_type={self.data_type.name} has no size; use a numeric type")
        if self.size * self.num_tensors > MAX_CACHE_BYTES:
            raise LLMParamError(
                f"{self.num_tensors} tensors of {self.size} bytes are more than"
                f" {MAX_CACHE_BYTES} bytes; describe a smaller cache"
            )

    @property
    def size(self) -> int:
        """Bytes of one tensor."""
        return prod(self.shape) * item_bytes(self.data_type)

    @property
    def batch_size(self) -> int:
        """Rows of a tensor; blocks in a blocks cache."""
        return self.shape[self.batch_dim_index]

    @property
    def row_bytes(self) -> int:
        """Bytes of a row or block in one tensor."""
        return self.size // self.batch_size


class Index(NamedTuple):
    """A key without its cluster, as the cluster's table and messages to it have it."""

    kind: Literal["request", "prefix", "row", "blocks"]
    value: int
    """The request, the prefix, the cache's id, or the model of a blocks cache."""
    detail: int
    """The model of a request or prefix, the row of a cache's id, else 0."""


@dataclass(frozen=True)
class _PeerKey:
    """A key that takes its cluster under either generation's name, and has it under both."""

    cluster_id: int = cast("int", None)
    prompt_cluster_id: int = field(
        default=cast("int", None), kw_only=True, compare=False, repr=False
    )

    def __post_init__(self) -> None:
        if (self.cluster_id is None) == (self.prompt_cluster_id is None):
            raise TypeError("give cluster_id, or prompt_cluster_id, and not both")
        cluster = self.prompt_cluster_id if self.cluster_id is None else self.cluster_id
        for name in ("cluster_id", "prompt_cluster_id"):
            object.__setattr__(self, name, checks.integer("cluster_id", cluster))

    @property
    def is_placeholder(self) -> bool:
        """Whether the key only leaves a row without a key."""
        return False


@dataclass(frozen=True)
class CacheKey(_PeerKey):
    """A row of a cache, identified by the request or the prefix whose KV it holds.

    `cluster_id` (`prompt_cluster_id` in the first generation) only selects the peer to ask.
    """

    req_id: int = cast("int", None)
    model_id: int = 0
    prefix_id: int = INVALID_ID

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("req_id", "model_id", "prefix_id"):
            checks.integer(name, getattr(self, name))

    @property
    def is_placeholder(self) -> bool:
        """Whether the key only leaves a row without a key: neither id is valid."""
        return self.req_id == INVALID_ID and self.prefix_id == INVALID_ID

    @property
    def index(self) -> Index:
        """The key without its cluster.

        Raises `LLMParamError` unless exactly one of the two ids is valid.
        """
        if (self.req_id == INVALID_ID) == (self.prefix_id == INVALID_ID):
            raise LLMParamError(
                f"req_id={self.req_id} and prefix_id={self.prefix_id}: exactly one of them must be"
                " valid, the other 2**64-1"
            )
        if self.prefix_id == INVALID_ID:
            return Index("request", self.req_id, self.model_id)
        return Index("prefix", self.prefix_id, self.model_id)


@dataclass(frozen=True)
class CacheKeyByIdAndIndex:
    """A row of a cache, identified by the cache's id in its cluster."""

    cluster_id: int
    cache_id: int
    batch_index: int = 0

    def __post_init__(self) -> None:
        checks.integer("cluster_id", self.cluster_id)
        checks.integer("cache_id", self.cache_id, most=checks.MAX_INT64)
        checks.integer("batch_index", self.batch_index, most=checks.MAX_UINT32)

    @property
    def index(self) -> Index:
        """The key without its cluster."""
        return Index("row", self.cache_id, self.batch_index)


@dataclass(frozen=True)
class BlocksCacheKey(_PeerKey):
    """A blocks cache, identified by the model whose KV it holds."""

    model_id: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.integer("model_id", self.model_id)

    @property
    def index(self) -> Index:
        """The key without its cluster."""
        return Index("blocks", self.model_id, 0)


AnyKey: TypeAlias = CacheKey | CacheKeyByIdAndIndex | BlocksCacheKey


@dataclass(frozen=True)
class MemInfo:
    """A piece of memory for `remap_registered_memory`, which is not supported.

    Raises `TypeError` and `LLMParamError`.
    """

    mem_type: Memtype
    addr: int
    size: int

    def __post_init__(self) -> None:
        checks.instance("mem_type", self.mem_type, Memtype)
        checks.integer("addr", self.addr)
        checks.integer("size", self.size, least=1)


class LLMClusterInfo:
    """A peer, as an argument of `link_clusters` and `unlink_clusters`.

    The n-th remote address is that of the peer's n-th device, or of its host. Local addresses have
    no effect on links.
    """

    def __init__(self) -> None:
        self._remote_cluster_id: int | None = None
        self._remote_role_type: LLMRole | None = None
        self._local: list[tuple[str, int]] = []
        self._remote: list[tuple[str, int]] = []

    @property
    def remote_cluster_id(self) -> int | None:
        """The peer's id; None until set."""
        return self._remote_cluster_id

    @remote_cluster_id.setter
    def remote_cluster_id(self, remote_cluster_id: int) -> None:
        self._remote_cluster_id = checks.integer("remote_cluster_id", remote_cluster_id)

    @property
    def remote_role_type(self) -> LLMRole | None:
        """The expected role of the peer; linking fails for another role. None: any role."""
        return self._remote_role_type

    @remote_role_type.setter
    def remote_role_type(self, remote_role_type: LLMRole) -> None:
        self._remote_role_type = checks.instance("remote_role_type", remote_role_type, LLMRole)

    @property
    def local_ip_infos(self) -> list[tuple[str, int]]:
        """Addresses added by `append_local_ip_info`."""
        return list(self._local)

    @property
    def remote_ip_infos(self) -> list[tuple[str, int]]:
        """Addresses added by `append_remote_ip_info`."""
        return list(self._remote)

    def append_local_ip_info(self, ip: str | int, port: int) -> None:
        """Add an address of this host; `ip` as text or as a number (`address_text`)."""
        self._local.append((address_text(ip), _port(port)))

    def append_remote_ip_info(self, ip: str | int, port: int) -> None:
        """Add an address of the peer; `ip` as text or as a number (`address_text`)."""
        self._remote.append((address_text(ip), _port(port)))


def address_text(ip: str | int) -> str:
    """Return an IP address as text. Raises `TypeError` and `LLMParamError`.

    A number is an IPv4 address with its first part in the lowest byte: 127.0.0.1 is 0x0100007F.
    """
    if isinstance(ip, bool) or not isinstance(ip, (str, int)):
        raise TypeError(f"ip is a {type(ip).__name__}, must be a str or an int")
    try:
        return str(ipaddress.ip_address(ip if isinstance(ip, str) else ip.to_bytes(4, "little")))
    except (ValueError, OverflowError):
        raise LLMParamError(
            f"ip={ip!r} is no IP address; write it as 192.168.1.1 or as a 32-bit number"
        ) from None


def listen_addresses(name: str, text: str) -> list[tuple[str, int]]:
    """Parse "ip:port", several separated by ";". Raises `LLMParamError`."""
    found = []
    for one in text.split(";"):
        host, _, port = one.strip().rpartition(":")
        if not port.isascii() or not port.isdigit() or len(port) > 5:
            raise LLMParamError(
                f"{name}={text!r} is not accepted; write ip:port, as 127.0.0.1:26000"
            )
        found.append((address_text(host.strip("[]")), _port(int(port))))
    return found


def _port(port: int) -> int:
    return checks.integer("port", port, most=checks.MAX_UINT16)
