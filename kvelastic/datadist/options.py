"""Parsing and checks of the options of `LLMDataDist.init`. Pure.

options = read_options({"ge.exec.deviceId": "0", "llm.EnableCacheManager": "1"}, LLMRole.MIX)
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Final

from kvelastic.datadist import checks
from kvelastic.datadist.clusters import listen_addresses
from kvelastic.datadist.config import DEFAULT_MEM_UTILIZATION, OPTIONS
from kvelastic.datadist.enums import LLMRole
from kvelastic.datadist.memory_config import BufferTier, MemPool, parse_buffer_tiers, parse_mem_pool
from kvelastic.datadist.status import LLMParamError
from kvelastic.logs import log_once

LISTEN_KEY: Final = "llm.listenIpInfo"
FLOW_GRAPH_KEY: Final = "ge.flowGraphMemMaxSize"
DEFAULT_SYNC_KV_TIMEOUT_MS: Final = 1000
DEFAULT_LINK_TOTAL_S: Final = 120
_KEYS: Final = {name: option.key for name, option in OPTIONS.items() if option.key}
_WITHOUT_EFFECT: Final = ("rdma_traffic_class", "rdma_service_level", "global_resource_config")


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
    tiers: tuple[BufferTier, ...]
    link_total_s: int
    link_rounds: int


def read_options(options: dict[str, str], role: LLMRole) -> Options:
    """Parse and check options for `role`. Raises `TypeError`, `LLMParamError`.

    In the first generation a `PROMPT` needs an address to listen at.
    """
    checks.instance("options", options, dict)
    for key, value in options.items():
        checks.text("a key of options", key)
        checks.text(f"options[{key!r}]", value)
        if key.startswith("llm.") and key not in _KEYS.values():
            log_once(logging.WARNING, f"LLMDataDist: option {key} is not known and does nothing.")
    for name in _WITHOUT_EFFECT:
        if _KEYS[name] in options:
            log_once(logging.INFO, f"LLMDataDist: {_KEYS[name]} is checked and has no effect.")
    local_comm_res = options.get(_KEYS["local_comm_res"])
    is_second = _flag(options, "enable_cache_manager", default=local_comm_res is not None)
    if local_comm_res is not None and not is_second:
        raise LLMParamError("local_comm_res needs enable_cache_manager; leave out one of the two")
    remembers = _flag(options, "enable_remote_cache_accessible", default=local_comm_res is not None)
    listen = listen_option(options)
    if options.get(_KEYS["transfer_backend"]) and not listen:
        raise LLMParamError("transfer_backend=hixl needs listen_ip_info")
    if not is_second and role is LLMRole.PROMPT and not listen:
        raise LLMParamError("a PROMPT needs listen_ip_info, as 127.0.0.1:26000")
    devices = _devices(options)
    if is_second and (len(devices) > 1 or len(listen) > 1):
        raise LLMParamError(
            "with enable_cache_manager a process has one device and one address; start a process"
            " for each device"
        )
    return Options(
        device_ids=devices,
        is_cache_manager=is_second,
        listen=listen,
        sync_kv_timeout_s=_number(options, "sync_kv_timeout", DEFAULT_SYNC_KV_TIMEOUT_MS) / 1000,
        may_switch_role=_flag(options, "enable_switch_role", default=False),
        remembers_remote_caches=is_second and remembers,
        device_pool=_device_pool(options, is_second=is_second),
        host_pool=_pool(options, "host_mem_pool_cfg") if is_second else None,
        tiers=() if is_second else _tiers(options),
        link_total_s=_number(options, "link_total_time", 0) or DEFAULT_LINK_TOTAL_S,
        link_rounds=_number(options, "link_retry_count", 1),
    )


def listen_option(options: dict[str, str]) -> tuple[tuple[str, int], ...]:
    """Return the addresses to listen at; empty for none. Raises `TypeError`, `LLMParamError`."""
    value = options.get(LISTEN_KEY, options.get("listen_ip_info", ""))
    return tuple(listen_addresses(value)) if checks.text(LISTEN_KEY, value) else ()


def _devices(options: dict[str, str]) -> tuple[int, ...]:
    value = options.get(_KEYS["device_id"])
    if value is None:
        raise LLMParamError("device_id is missing; set LLMConfig.device_id")
    found = tuple(_digits("device_id", one) for one in value.replace(",", ";").split(";"))
    if len(set(found)) != len(found):
        raise LLMParamError(f"device_id={value} names a device twice")
    return found


def _device_pool(options: dict[str, str], *, is_second: bool) -> MemPool | None:
    if is_second:
        return _pool(options, "mem_pool_cfg")
    most = options.get(FLOW_GRAPH_KEY)
    text = options.get(_KEYS["mem_utilization"], str(DEFAULT_MEM_UTILIZATION))
    try:
        part = OPTIONS["mem_utilization"].check(float(text))
    except ValueError:
        raise LLMParamError(f"mem_utilization={text!r} must be above 0 and at most 1") from None
    return MemPool(None if most is None else int(_digits(FLOW_GRAPH_KEY, most) * part))


def _pool(options: dict[str, str], name: str) -> MemPool | None:
    value = options.get(_KEYS[name])
    return parse_mem_pool(name, value) if value else None


def _tiers(options: dict[str, str]) -> tuple[BufferTier, ...]:
    value = options.get(_KEYS["buf_pool_cfg"])
    return parse_buffer_tiers(value) if value else ()


def _flag(options: dict[str, str], name: str, *, default: bool) -> bool:
    value = options.get(_KEYS[name])
    if value is None:
        return default
    if value.lower() not in {"0", "1", "true", "false"}:
        raise LLMParamError(f"{_KEYS[name]}={value!r} is not accepted; write 1 or 0")
    return value.lower() in {"1", "true"}


def _number(options: dict[str, str], name: str, default: int) -> int:
    value = options.get(_KEYS[name])
    if value is None:
        return default
    number = _digits(name, value)
    OPTIONS[name].check(number)
    return number


def _digits(name: str, value: str) -> int:
    if not (value.isascii() and value.isdigit() and len(value) <= 20):
        raise LLMParamError(f"{name}={value!r} is not accepted; it must be a number")
    return int(value)
