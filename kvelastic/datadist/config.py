"""`LLMConfig`: attributes that become the options of `LLMDataDist.init`.

    config = LLMConfig()
    config.device_id = 0
    config.enable_cache_manager = True
    datadist.init(config.generate_options())

An unset attribute reads as its default and generates no option. If the default is "", setting ""
resets the attribute. Values are checked when they are set.
"""

# ruff: noqa: E501  # a table
from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from kvelastic.datadist import checks, memory_config
from kvelastic.datadist.clusters import listen_addresses
from kvelastic.datadist.status import LLMParamError

DEFAULT_MEM_UTILIZATION: Final = 0.95


class _Option:
    """An attribute with its option's key, check and text form."""

    def __init__(
        self,
        key: str,
        check: Callable[[str, Any], Any],
        doc: str,
        form: Callable[[Any], str] = str,
        *,
        default: Any = None,
        counts_if_empty: bool = False,
    ) -> None:
        """With `counts_if_empty`, "" generates an option instead of resetting to the default."""
        self.key = key
        self.counts_if_empty = counts_if_empty
        self._check = check
        self.form = form
        self.default = default
        self.__doc__ = doc

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, config: object | None, owner: type) -> Any:
        return self if config is None else config.__dict__.get(self._name, self.default)

    def __set__(self, config: object, value: Any) -> None:
        if value == "" and self.default == "" and not self.counts_if_empty:
            config.__dict__.pop(self._name, None)
        else:
            config.__dict__[self._name] = self.check(value)

    def check(self, value: object) -> Any:
        """Return the value in its stored form. Raises `TypeError`, `LLMParamError`."""
        return self._check(self._name, value)


def _bit(value: bool) -> str:
    return "1" if value else "0"


def _device_ids(name: str, value: object) -> int | list[int]:
    if isinstance(value, (list, tuple)):
        found = checks.integers(name, value, most=checks.MAX_UINT16)
        if len(set(found)) != len(found):
            raise LLMParamError(f"{name}={found} names a device twice")
        return found
    return checks.integer(name, value, most=checks.MAX_UINT16)


def _device_text(value: int | list[int]) -> str:
    return str(value) if isinstance(value, int) else ";".join(map(str, value))


def _milliseconds(name: str, value: object) -> int:
    if isinstance(value, str):
        if not (value.isascii() and value.isdigit() and len(value) <= 10):
            raise LLMParamError(f"{name}={value!r} is not accepted; give milliseconds")
        value = int(value)
    return checks.integer(name, value, least=1, most=(1 << 31) - 1)


def _listen(name: str, value: str) -> str:
    listen_addresses(value)
    return value


def _fraction(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} is a {type(value).__name__}, must be a float")
    if not 0 < value <= 1:
        raise LLMParamError(f"{name}={value} is not accepted; it must be above 0 and at most 1")
    return float(value)


def _ge_options(name: str, value: object) -> dict[str, str]:
    found = checks.instance(name, value, dict)
    for key, one in found.items():
        checks.text(f"{name}: a key", key)
        checks.text(f"{name}[{key!r}]", one)
    return dict(found)


def _pool(name: str, value: str) -> str:
    memory_config.parse_mem_pool(name, value)
    return value


def _tiers(name: str, value: str) -> str:
    memory_config.parse_buffer_tiers(value)
    return value


def _json_or_empty(name: str, value: str) -> str:
    if checks.text(name, value):
        memory_config.parse_json_object(name, value)
    return value


def _traffic_class(name: str, value: object) -> int:
    found = checks.integer(name, value, most=255)
    if found % 4:
        raise LLMParamError(f"{name}={found} is no multiple of 4")
    return found


def _backend(name: str, value: str) -> str:
    if checks.text(name, value) != "hixl":
        raise LLMParamError(f"{name}={value!r} is not accepted; the only one is 'hixl'")
    return value


def _within(least: int, most: int) -> Callable[[str, object], int]:
    return lambda name, value: checks.integer(name, value, least=least, most=most)


class LLMConfig:
    """Configuration of `LLMDataDist`.

    Setting an attribute raises `TypeError` or `LLMParamError`.
    """

    # fmt: off
    device_id = _Option("ge.exec.deviceId", _device_ids, "The process's device, or a list of them.", _device_text)
    listen_ip_info = _Option("llm.listenIpInfo", _listen, "Where peers link to, as ip:port.", default="")
    sync_kv_timeout = _Option("llm.SyncKvCacheWaitTime", _milliseconds, "Deadline of a call in milliseconds; 1000.")
    enable_switch_role = _Option("llm.EnableSwitchRole", checks.flag, "Whether `switch_role` may be called.", _bit, default=False)
    ge_options = _Option("", _ge_options, "Further options; `ge.flowGraphMemMaxSize` bounds all caches, in bytes.")
    mem_utilization = _Option("llm.MemoryUtilization", _fraction, "The part of that which caches may take.", default=DEFAULT_MEM_UTILIZATION)
    buf_pool_cfg = _Option("llm.BufPoolCfg", _tiers, "Size classes of tensors, as JSON.", default="")
    mem_pool_cfg = _Option("llm.MemPoolConfig", _pool, "The pool of device caches, as JSON.", default="")
    host_mem_pool_cfg = _Option("llm.HostMemPoolConfig", _pool, "The pool of host caches, as JSON.", default="")
    enable_cache_manager = _Option("llm.EnableCacheManager", checks.flag, "Use `cache_manager`, the second generation.", _bit, default=False)
    enable_remote_cache_accessible = _Option("llm.EnableRemoteCacheAccessible", checks.flag, "Remember what caches a peer has, and let peers write into ours.", _bit, default=False)
    rdma_traffic_class = _Option("llm.RdmaTrafficClass", _traffic_class, "Of RDMA: no effect.")
    rdma_service_level = _Option("llm.RdmaServiceLevel", _within(0, 7), "Of RDMA: no effect.")
    local_comm_res = _Option("llm.LocalCommRes", _json_or_empty, "A rank table; it implies both `enable_` options for caches, also if it is set to nothing.", default="", counts_if_empty=True)
    link_total_time = _Option("llm.LinkTotalTime", _within(0, checks.MAX_UINT32), "Seconds that `link` tries; 0: 120.", default=0)
    link_retry_count = _Option("llm.LinkRetryCount", _within(1, 100), "Rounds in which `link` tries within them.", default=1)
    transfer_backend = _Option("llm.TransferBackend", _backend, 'Only "hixl"; it has to listen.', default="")
    global_resource_config = _Option("llm.GlobalResourceConfig", _json_or_empty, "Of Ascend devices: no effect.", default="")
    # fmt: on

    def __init__(self) -> None:
        self.ge_options = {}  # one per instance: callers may add options to it

    def generate_options(self) -> dict[str, str]:
        """Return the options that were set; an attribute overrides the same key in `ge_options`."""
        found = dict(self.ge_options or {})
        for name, option in OPTIONS.items():
            value = self.__dict__.get(name)
            if value is not None and option.key:
                found[option.key] = option.form(value)
        return found


OPTIONS: Final[dict[str, _Option]] = {
    name: value for name, value in vars(LLMConfig).items() if isinstance(value, _Option)
}
"""All attributes of `LLMConfig` by name."""
