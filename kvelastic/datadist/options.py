"""Options of `LLMDataDist.init`: one table, which `LLMConfig` writes and `read_options` reads.

    config = LLMConfig()
    config.device_id = 0
    config.enable_cache_manager = True
    options = config.generate_options()          # {"ge.exec.deviceId": "0", ...}
    read_options(options, LLMRole.MIX).device_ids

An option is a text. `LLMConfig` checks the type of a value, and the text's parser checks the rest,
once for both.
"""

# ruff: noqa: E501  # a table
from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from msgspec import UNSET, UnsetType

from kvelastic.datadist import checks
from kvelastic.datadist.descriptors import listen_addresses
from kvelastic.datadist.enums import LLMRole
from kvelastic.datadist.memory_config import (
    BufferTier,
    MemPool,
    parse_buffer_tiers,
    parse_json,
    parse_mem_pool,
)
from kvelastic.datadist.status import LLMParamError
from kvelastic.logs import log_once

FLOW_GRAPH_KEY: Final = "ge.flowGraphMemMaxSize"
DEFAULT_LINK_TOTAL_S: Final = 120
_WITHOUT_EFFECT: Final = ("rdma_traffic_class", "rdma_service_level", "global_resource_config")


class _Option:
    """An attribute of `LLMConfig` with its option's key, parser and form as text."""

    def __init__(
        self,
        key: str,
        types: type | tuple[type, ...],
        parse: Callable[[str, str], Any],
        doc: str,
        *,
        default: Any = None,
        counts_if_empty: bool = False,
    ) -> None:
        """If the default is "", an empty text stands for it, unless `counts_if_empty`.

        `parse` raises `LLMParamError`.
        """
        self.key, self.parse, self.default = key, parse, default
        self._types = types
        self._can_be_empty = default == "" and not counts_if_empty
        self.__doc__ = doc

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, config: object | None, owner: type) -> Any:
        return self if config is None else config.__dict__.get(self._name, self.default)

    def __set__(self, config: object, value: Any) -> None:
        text = self.text_of(value)
        if text or not self._can_be_empty:
            self.parse(self._name, text)
            config.__dict__[self._name] = value
        else:
            config.__dict__.pop(self._name, None)

    def text_of(self, value: Any) -> str:
        """Return the option's text. Raises `TypeError`."""
        checks.instance(self._name, value, self._types)
        if isinstance(value, bool):
            if self._types is not bool:
                raise TypeError(f"{self._name} is a bool, must be a number")
            return str(int(value))
        if isinstance(value, (list, tuple)):
            return ";".join(map(str, checks.integers(self._name, value)))
        return str(float(value) if self._types == (float, int) else value)

    def read(self, options: dict[str, str]) -> Any:
        """Return the parsed option; None if it is not set. Raises `LLMParamError`."""
        text = options.get(self.key)
        if text is None or (not text and self._can_be_empty):
            return None
        return self.parse(self._name, text)


def _devices(name: str, text: str) -> tuple[int, ...]:
    each = text.replace(",", ";").split(";")
    found = tuple(_number(0, checks.MAX_UINT16)(name, one) for one in each)
    if len(set(found)) != len(found):
        raise LLMParamError(f"{name}={text} names a device twice")
    return found


def _flag(name: str, text: str) -> bool:
    if text.lower() not in {"0", "1", "true", "false"}:
        raise LLMParamError(f"{name}={text!r} is not accepted; write 1 or 0")
    return text.lower() in {"1", "true"}


def _number(least: int, most: int, step: int = 1) -> Callable[[str, str], int]:
    def parse(name: str, text: str) -> int:
        is_number = text.isascii() and text.isdigit() and len(text) <= 20
        if not is_number or not least <= int(text) <= most or int(text) % step:
            raise LLMParamError(
                f"{name}={text!r} is not accepted; it must be a number from {least} to {most}"
                + (f", a multiple of {step}" if step > 1 else "")
            )
        return int(text)

    return parse


def _fraction(name: str, text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = 0
    if not 0 < found <= 1:
        raise LLMParamError(f"{name}={text} is not accepted; it must be above 0 and at most 1")
    return found


def _json_or_empty(name: str, text: str) -> dict[str, Any]:
    return parse_json(name, text, dict[str, Any]) if text else {}


def _backend(name: str, text: str) -> str:
    if text != "hixl":
        raise LLMParamError(f"{name}={text!r} is not accepted; the only one is 'hixl'")
    return text


class LLMConfig:
    """Configuration of `LLMDataDist`.

    An unset attribute reads as its default and generates no option. If the default is "", setting
    "" resets the attribute. Setting an attribute raises `TypeError` or `LLMParamError`.
    """

    # fmt: off
    device_id = _Option("ge.exec.deviceId", (int, list, tuple), _devices, "The process's device, or a list of them.")
    listen_ip_info = _Option("llm.listenIpInfo", str, listen_addresses, "Where peers link to, as ip:port.", default="")
    sync_kv_timeout = _Option("llm.SyncKvCacheWaitTime", (int, str), _number(1, (1 << 31) - 1), "Deadline of a call in milliseconds; 1000.")
    enable_switch_role = _Option("llm.EnableSwitchRole", bool, _flag, "Whether `switch_role` may be called.", default=False)
    mem_utilization = _Option("llm.MemoryUtilization", (float, int), _fraction, "The part of `ge.flowGraphMemMaxSize` that caches may take.", default=0.95)
    buf_pool_cfg = _Option("llm.BufPoolCfg", str, parse_buffer_tiers, "Size classes of tensors, as JSON.", default="")
    mem_pool_cfg = _Option("llm.MemPoolConfig", str, parse_mem_pool, "The pool of device caches, as JSON.", default="")
    host_mem_pool_cfg = _Option("llm.HostMemPoolConfig", str, parse_mem_pool, "The pool of host caches, as JSON.", default="")
    enable_cache_manager = _Option("llm.EnableCacheManager", bool, _flag, "Use `cache_manager`, the second generation.", default=False)
    enable_remote_cache_accessible = _Option("llm.EnableRemoteCacheAccessible", bool, _flag, "Remember what caches a peer has, and let peers write into ours.", default=False)
    rdma_traffic_class = _Option("llm.RdmaTrafficClass", int, _number(0, 255, 4), "Of RDMA: no effect.")
    rdma_service_level = _Option("llm.RdmaServiceLevel", int, _number(0, 7), "Of RDMA: no effect.")
    local_comm_res = _Option("llm.LocalCommRes", str, _json_or_empty, "A rank table; it implies both `enable_` options for caches, also if it is set to nothing.", default="", counts_if_empty=True)
    link_total_time = _Option("llm.LinkTotalTime", int, _number(0, checks.MAX_UINT32), "Seconds that `link` tries; 0: 120.", default=0)
    link_retry_count = _Option("llm.LinkRetryCount", int, _number(1, 100), "Rounds in which `link` tries within them.", default=1)
    transfer_backend = _Option("llm.TransferBackend", str, _backend, 'Only "hixl"; it has to listen.', default="")
    global_resource_config = _Option("llm.GlobalResourceConfig", str, _json_or_empty, "Of Ascend devices: no effect.", default="")
    # fmt: on

    def __init__(self) -> None:
        self._ge_options: dict[str, str] = {}

    @property
    def ge_options(self) -> dict[str, str]:
        """Further options, to which callers may add.

        `ge.flowGraphMemMaxSize` bounds all caches, in bytes.
        """
        return self._ge_options

    @ge_options.setter
    def ge_options(self, value: dict[str, str]) -> None:
        self._ge_options = dict(_texts("ge_options", value))

    def generate_options(self) -> dict[str, str]:
        """Return the options that were set; an attribute overrides the same key in `ge_options`."""
        given = {name: option for name, option in _OPTIONS.items() if name in self.__dict__}
        return self._ge_options | {
            option.key: option.text_of(self.__dict__[name]) for name, option in given.items()
        }


_OPTIONS: Final = {
    name: value for name, value in vars(LLMConfig).items() if isinstance(value, _Option)
}


@dataclass(frozen=True)
class Options:
    """The parsed options of `init`."""

    device_ids: tuple[int, ...]
    is_cache_manager: bool
    """True for the second generation."""
    listen: tuple[tuple[str, int], ...]
    sync_kv_timeout_s: float
    may_switch_role: bool
    remembers_remote_caches: bool
    """`enable_remote_cache_accessible`."""
    device_pool: MemPool | None
    """None: device caches cannot be allocated."""
    host_pool: MemPool | None
    tiers: Sequence[BufferTier]
    link_total_s: int
    link_rounds: int


def read_options(options: dict[str, str], role: LLMRole) -> Options:
    """Parse and check options for `role`. Raises `TypeError`, `LLMParamError`.

    In the first generation a `PROMPT` needs an address to listen at.
    """
    known = {option.key for option in _OPTIONS.values()}
    for key in _texts("options", options):
        if key.startswith("llm.") and key not in known:
            log_once(logging.WARNING, f"LLMDataDist: option {key} is not known and does nothing.")
    found = {name: option.read(options) for name, option in _OPTIONS.items()}
    for name in _WITHOUT_EFFECT:
        if found[name] is not None:
            log_once(
                logging.INFO, f"LLMDataDist: {_OPTIONS[name].key} is checked and has no effect."
            )
    has_comm_res = found["local_comm_res"] is not None
    is_second = has_comm_res if (flag := found["enable_cache_manager"]) is None else flag
    if has_comm_res and not is_second:
        raise LLMParamError("local_comm_res needs enable_cache_manager; leave out one of the two")
    remembers = has_comm_res if (flag := found["enable_remote_cache_accessible"]) is None else flag
    listen = listen_option(options)
    if found["transfer_backend"] and not listen:
        raise LLMParamError("transfer_backend=hixl needs listen_ip_info")
    if not is_second and role is LLMRole.PROMPT and not listen:
        raise LLMParamError("a PROMPT needs listen_ip_info, as 127.0.0.1:26000")
    devices = found["device_id"]
    if devices is None:
        raise LLMParamError("device_id is missing; set LLMConfig.device_id")
    if is_second and (len(devices) > 1 or len(listen) > 1):
        raise LLMParamError(
            "with enable_cache_manager a process has one device and one address; start a process"
            " for each device"
        )
    most_bytes: int | UnsetType = UNSET
    if FLOW_GRAPH_KEY in options:
        part = found["mem_utilization"] or _OPTIONS["mem_utilization"].default
        given = _number(0, checks.MAX_UINT64)(FLOW_GRAPH_KEY, options[FLOW_GRAPH_KEY])
        most_bytes = int(given * part)
    return Options(
        device_ids=devices,
        is_cache_manager=is_second,
        listen=listen,
        sync_kv_timeout_s=(found["sync_kv_timeout"] or 1000) / 1000,
        may_switch_role=bool(found["enable_switch_role"]),
        remembers_remote_caches=is_second and remembers,
        device_pool=found["mem_pool_cfg"] if is_second else MemPool(most_bytes),
        host_pool=found["host_mem_pool_cfg"] if is_second else None,
        tiers=() if is_second else found["buf_pool_cfg"] or (),
        link_total_s=found["link_total_time"] or DEFAULT_LINK_TOTAL_S,
        link_rounds=found["link_retry_count"] or 1,
    )


def listen_option(options: dict[str, str]) -> tuple[tuple[str, int], ...]:
    """Return the addresses to listen at; empty for none. Raises `TypeError`, `LLMParamError`."""
    option = _OPTIONS["listen_ip_info"]
    value = options.get(option.key, options.get("listen_ip_info", ""))
    text = checks.instance(option.key, value, str)
    return tuple(listen_addresses(option.key, text)) if text else ()


def _texts(name: str, value: object) -> dict[str, str]:
    """Return a dict of texts. Raises `TypeError`."""
    found: dict[str, str] = checks.instance(name, value, dict)
    for key, one in found.items():
        checks.instance(f"a key of {name}", key, str)
        checks.instance(f"{name}[{key!r}]", one, str)
    return found
