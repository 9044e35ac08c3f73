"""kvelastic's environment variables, in one table.

    if is_enabled(): ...             # whether the engine is to use kvelastic at all
    config = load()                  # reads os.environ; raises ConfigError for an invalid value
    configure_logging(config)

`VARIABLES` defines all names, defaults and accepted values. `load` and `markdown_table` use it. An
empty value counts as unset.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from kvelastic.device.host_memory import default_host_capacity_bytes, machine_memory_bytes
from kvelastic.errors import ConfigError, InvalidArgumentError
from kvelastic.logs import configure_logging, log_once
from kvelastic.tier_list import TIERS_FORMS, TierListError, TierSpec, parse_tiers
from kvelastic.units import (
    MAX_PRIORITY,
    MIB_BYTES,
    SIZE_FORMS,
    format_size,
    parse_percent,
    parse_size,
)

__all__ = [
    "VARIABLES", "Config", "Percent", "configure_logging", "is_enabled", "load", "markdown_table",
]  # fmt: skip


HOST_PAGE_SIZE_MB: Final = 2
"""Size of a huge page of the host."""
_MOST_NAME_BESIDE_KVCACHED: Final = 50
"""Longest name of an instance that keeps kvcached's segment too; numbers of ranks are appended."""


class Percent(NamedTuple):
    """A part of a device's capacity, 0 to 100."""

    value: float


@dataclass(frozen=True)
class Config:
    """The values of the variables. Immutable; an instance loads them once."""

    enabled: bool = False
    autopatch: bool = False
    ipc_name: str | None = None
    kvcached_segment: bool = False
    """Whether the instance also keeps kvcached's segment."""
    gpu_utilization: float = 0.95
    page_size_mb: int | None = None
    """None: 2 on the host; on a GPU, chosen by the driver's costs (`page_size`)."""
    log_level: str = "INFO"
    page_prealloc_enabled: bool = True
    min_reserved_pages: int = 5
    max_reserved_pages: int = 10
    contiguous_layout: bool = True
    sanity_check: bool = False
    log_color: bool = True
    max_cached_tokens: int = -1
    """-1: no bound. 0: caches nothing."""
    cache_idle_s: float | None = 600.0
    """None: never."""
    ipc_timeout_s: float | None = 60.0
    """None: no deadline."""
    host_memory: int | None = None
    """Bytes, if set; `host_memory_bytes` includes the default."""
    limit: int | Percent | None = None
    """Bytes, or a percentage of the device; `limit_bytes` resolves it."""
    minimum: int = 0
    """Guarantee in bytes."""
    reserve: int | None = None
    """Bytes of the device besides KV cache; None: the engine's integration measures them."""
    priority: int = 0
    """An instance with a higher priority keeps its memory longer."""
    ledger: str = "default"
    """The group of instances that share a device's capacity."""
    reclaim_wait_s: float = 0.05
    """Seconds that an alloc waits for memory of other instances."""
    limit_wait_s: float | None = 0.25
    """Seconds that requests may keep a pool over its limit before preemption; None: no bound."""
    device: str = "auto"
    """`auto`, `host`, `cuda` or `cuda:N`."""
    idle_trim_s: float | None = 5.0
    """None: never."""
    guard_pages: bool = False
    strict: bool | None = None
    """Which untested engine versions are refused: see `engines.served_as`."""
    flexkv_alias: bool = False
    llm_datadist_alias: bool = False
    link_secret: str | None = None
    """Path of the secret file; None: links on this host only."""
    link_allow: tuple[str, ...] = ()
    """Networks whose hosts may link."""
    link_data_ports: tuple[int, int] | None = None
    """First and last port for data over TCP; None: any."""
    tiers: tuple[TierSpec, ...] = ()
    """Tiers for demoted blocks, nearest first; empty: evicted blocks are dropped."""
    tier_policy: str = "write_back"
    tier_copies: str = "all"
    tier_staging: int = 64 * MIB_BYTES
    """Bytes of staging memory between blocks and stores."""
    tier_watermark: float = 10.0
    """Percentage of the blocks."""
    tier_idle_s: float | None = 5.0
    """None: never."""
    tier_reclaim_s: float = 0.02
    tier_limit_s: float = 2.0
    tier_sleep_s: float = 30.0
    tier_exit_s: float = 5.0
    tier_write_rate: int | None = None
    """Bytes per second written ahead of need; None: no bound."""
    tier_daily_write: int | None = None
    """Bytes that a disk tier writes per day; None: no bound."""
    tier_compare: bool = True
    """Whether a tier that is slower than computing is bypassed."""
    role: str | None = None
    """`prefill`, `decode` or `both`; None: vLLM exchanges no blocks with other engines."""
    prefill_address: str | None = None
    """Where a prefill engine listens for decode engines; None: a Unix socket."""
    prefill_hold_s: float = 60.0
    """How long a prefill engine keeps the blocks of a finished request for a decode engine."""

    @property
    def has_tiers(self) -> bool:
        """Whether vLLM loads blocks from elsewhere: from tiers, or from a prefill engine."""
        return bool(self.tiers) or self.role is not None

    @property
    def page_size_bytes(self) -> int:
        """`KVELASTIC_PAGE_SIZE_MB` in bytes, or the host's default.

        `device_set.page_size_bytes` returns the default of GPUs.
        """
        return (self.page_size_mb or HOST_PAGE_SIZE_MB) * MIB_BYTES

    @property
    def host_memory_bytes(self) -> int:
        """Capacity of the host device in bytes; queries the machine if not set."""
        if self.host_memory is not None:
            return self.host_memory
        return default_host_capacity_bytes(machine_memory_bytes())

    def limit_bytes(self, capacity_bytes: int) -> int | None:
        """Return the limit in bytes for a device of `capacity_bytes`; None if none is set."""
        if isinstance(self.limit, Percent):
            return int(capacity_bytes * self.limit.value / 100)
        return self.limit


class Variable(NamedTuple):
    """One environment variable. `parse` raises ValueError for values outside `accepts`."""

    name: str
    legacy: str | None
    """kvcached's name, used if `name` is unset."""
    field: str
    """The field of `Config` that it sets, which has the default."""
    parse: Callable[[str], Any]
    default: str
    """The default as text: `parse(default)` gives the field's default, unless in (parentheses)."""
    accepts: str
    doc: str


def _boolean(text: str) -> bool:
    lowered = text.lower()
    if lowered in ("true", "1", "yes", "on"):
        return True
    if lowered in ("false", "0", "no", "off"):
        return False
    raise ValueError(text)


def _integer(least: int, multiple: int = 1, most: int = 2**31 - 1) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not re.fullmatch(r"-?[0-9]{1,10}", text):
            raise ValueError(text)
        value = int(text)
        if not least <= value <= most or value % multiple:
            raise ValueError(text)
        return value

    return parse


def _number(text: str) -> float:
    if not re.fullmatch(r"[-+]?([0-9]{1,18}\.?[0-9]{0,18}|\.[0-9]{1,18})", text):
        raise ValueError(text)
    return float(text)


def _fraction(text: str) -> float:
    value = _number(text)
    if not 0 < value <= 1:
        raise ValueError(text)
    return value


def _seconds_or_no_deadline(text: str) -> float | None:
    value = _number(text)
    return value if value > 0 else None


def _seconds_or_never(text: str) -> float | None:
    value = _number(text)
    return value if value >= 0 else None


def _ipc_name(text: str) -> str:
    # shm_open treats "." and ".." as directories.
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", text) or text in (".", ".."):
        raise ValueError(text)
    return text


def _log_level(text: str) -> str:
    if text.upper() not in ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"):
        raise ValueError(text)
    return text.upper()


def _capacity(text: str) -> int:
    size_bytes = parse_size(text)
    if size_bytes == 0:
        raise ValueError(text)
    return size_bytes


def _limit(text: str) -> int | Percent | None:
    if text.lower() == "none":
        return None
    return Percent(parse_percent(text)) if text.endswith("%") else parse_size(text)


def _ledger(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,32}", text):
        raise ValueError(text)
    return text


def _seconds(text: str) -> float:
    value = _number(text)
    if not 0 <= value <= 3600:
        raise ValueError(text)
    return value


def _size_or_none(text: str) -> int | None:
    return None if text.lower() == "none" else _capacity(text)


def _one_of(*words: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.lower() not in words:
            raise ValueError(text)
        return text.lower()

    return parse


def _path_or_none(text: str) -> str | None:
    if text.lower() == "none":
        return None
    if not text.startswith("/") or "\0" in text:
        raise ValueError(text)
    return text


def _role(text: str) -> str | None:
    role = _one_of("none", "prefill", "decode", "both")(text)
    return None if role == "none" else role


def _address_or_none(text: str) -> str | None:
    from kvelastic.address import parse_address

    if text.lower() == "automatic":
        return None
    address = parse_address(text)
    # Decode engines use this text: a chosen port, or a name, would mean another address there.
    if not address.is_unix and (address.port == 0 or "localhost" in text):
        raise ValueError(text)
    return text


def _networks(text: str) -> tuple[str, ...]:
    import ipaddress

    if text.lower() == "none":
        return ()
    return tuple(str(ipaddress.ip_network(one.strip())) for one in text.split(","))


def _ports(text: str) -> tuple[int, int] | None:
    if text.lower() == "any":
        return None
    first, dash, last = text.partition("-")
    ports = int(first), int(last if dash else first)
    if not 0 < ports[0] <= ports[1] < 1 << 16:
        raise ValueError(text)
    return ports


def _device(text: str) -> str:
    lowered = text.lower()
    if lowered in ("cpu", "host"):
        return "host"
    if lowered == "auto" or re.fullmatch(r"cuda(:[0-9]{1,4})?", lowered):
        return lowered
    raise ValueError(text)


BOOLEAN: Final = "true, false, 1, 0, yes, no, on or off"

LAUNCHED_BY: Final = "KVELASTIC_LAUNCHED_BY"
ENGINE_KEY: Final = "KVELASTIC_ENGINE_KEY"
FROM_CONTROLLER: Final = frozenset({LAUNCHED_BY, ENGINE_KEY})
"""Set by the controller in engines that it launches; they configure nothing."""

# fmt: off
VARIABLES: Final[tuple[Variable, ...]] = (
    Variable("ENABLE_KVELASTIC", "ENABLE_KVCACHED", "enabled", _boolean, "false", BOOLEAN,
             "Back the engine's KV cache with kvelastic."),
    Variable("KVELASTIC_AUTOPATCH", "KVCACHED_AUTOPATCH", "autopatch", _boolean, "false", BOOLEAN,
             "Kept for compatibility; ENABLE_KVELASTIC implies it."),
    Variable("KVELASTIC_IPC_NAME", "KVCACHED_IPC_NAME", "ipc_name", _ipc_name, "(automatic)",
             "1 to 64 of the characters A-Z a-z 0-9 . _ -",
             "Name of the instance and its shared-memory segment. Data parallel ranks of a dense"
             " model are separate instances: NAME, NAME_dp1, NAME_dp2."),
    Variable("KVELASTIC_KVCACHED_SEGMENT", None, "kvcached_segment", _boolean,
             "false", BOOLEAN,
             "Also keep kvcached's segment, with the instance's name, for programs that drive"
             " kvcached. kvelastic's own is NAME.kvelastic then (docs/kvcached.md). True by default"
             " if ENABLE_KVCACHED counts as ENABLE_KVELASTIC."),
    Variable("KVELASTIC_GPU_UTILIZATION", "KVCACHED_GPU_UTILIZATION", "gpu_utilization", _fraction,
             "0.95", "a number above 0, up to 1",
             "Largest part of a GPU's memory for KV caches; KVELASTIC_HOST_MEMORY is the same for"
             " the host."),
    Variable("KVELASTIC_PAGE_SIZE_MB", "KVCACHED_PAGE_SIZE_MB", "page_size_mb",
             _integer(2, 2, 1024), "(2; by the prices of a GPU)",
             "a multiple of 2, from 2 to 1024",
             "Smallest page size in MiB; pages grow to hold whole blocks of every layer. By default"
             " the first instance of a GPU chooses it by its driver's prices, at most 128."),
    Variable("KVELASTIC_LOG_LEVEL", "KVCACHED_LOG_LEVEL", "log_level", _log_level, "INFO",
             "DEBUG, INFO, WARNING, ERROR or CRITICAL",
             "Least severe message that is logged; docs/log.md lists the lines of DEBUG."),
    Variable("KVELASTIC_PAGE_PREALLOC_ENABLED", "KVCACHED_PAGE_PREALLOC_ENABLED",
             "page_prealloc_enabled", _boolean, "true", BOOLEAN,
             "Map pages ahead of demand in the background."),
    Variable("KVELASTIC_MIN_RESERVED_PAGES", "KVCACHED_MIN_RESERVED_PAGES", "min_reserved_pages",
             _integer(0), "5", "an integer of 0 or more",
             "Lower bound of pages kept mapped ahead of demand."),
    Variable("KVELASTIC_MAX_RESERVED_PAGES", "KVCACHED_MAX_RESERVED_PAGES", "max_reserved_pages",
             _integer(0), "10", "an integer, not below KVELASTIC_MIN_RESERVED_PAGES",
             "Upper bound of pages kept mapped ahead of demand, and at most 256 MiB or one page."),
    Variable("KVELASTIC_CONTIGUOUS_LAYOUT", "KVCACHED_CONTIGUOUS_LAYOUT", "contiguous_layout",
             _boolean, "true", BOOLEAN,
             "One page holds blocks of every layer; false gives each layer separate pages."),
    Variable("KVELASTIC_SANITY_CHECK", "KVCACHED_SANITY_CHECK", "sanity_check", _boolean, "false",
             BOOLEAN, "Check the invariants of every structure while the instance is idle."),
    Variable("KVELASTIC_LOG_COLOR", "KVCACHED_LOG_COLOR", "log_color", _boolean, "true", BOOLEAN,
             "Colour the log on a terminal; NO_COLOR=1 turns it off too."),
    Variable("KVELASTIC_MAX_CACHED_TOKENS", "KVCACHED_MAX_CACHED_TOKENS", "max_cached_tokens",
             _integer(-1), "-1", "an integer; -1 is no bound, 0 is off",
             "Tokens that the prefix cache may hold in blocks that no request uses."),
    Variable("KVELASTIC_CACHE_IDLE_SECONDS", None, "cache_idle_s", _seconds_or_never, "600",
             "seconds; less than 0 is never",
             "Evict cached blocks that no request has used for this long. With tiers they may stay"
             " twice as long until they are copied."),
    Variable("KVELASTIC_IPC_TIMEOUT", "KVCACHED_IPC_TIMEOUT", "ipc_timeout_s",
             _seconds_or_no_deadline, "60", "seconds; 0 or less is no deadline",
             "How long the scheduler waits for a worker's acknowledgement."),
    Variable("KVELASTIC_HOST_MEMORY", None, "host_memory", _capacity, "(80% of memory)",
             f"more than 0: {SIZE_FORMS}",
             "Capacity of the host: bound of every KV cache together, without weights. By default"
             " 80% of the machine's memory or of the tightest cgroup limit."),
    Variable("KVELASTIC_LIMIT", None, "limit", _limit, "none",
             f"none; a percentage of the device (80%); or {SIZE_FORMS}",
             "Limit at the start of an instance; kvctl limit changes it while it runs."),
    Variable("KVELASTIC_MIN", None, "minimum", parse_size, "0", f"0, or {SIZE_FORMS}",
             "Guarantee: memory that the instance gets as soon as it needs it. Others may use it"
             " before. Not above KVELASTIC_LIMIT."),
    Variable("KVELASTIC_RESERVE", None, "reserve", parse_size, "(measured)", f"0, or {SIZE_FORMS}",
             "Memory of the engine on its device besides KV cache (weights, activations). By"
             " default measured: in vLLM's workers after their start, in transformers and SGLang"
             " when they make their cache (on a GPU, transformers' peak); 0 for others."),
    Variable("KVELASTIC_PRIORITY", None, "priority",
             _integer(-MAX_PRIORITY, most=MAX_PRIORITY), "0",
             f"an integer from {-MAX_PRIORITY} to {MAX_PRIORITY}",
             "Instances of a higher priority keep their memory longer and are served first."),
    Variable("KVELASTIC_LEDGER", None, "ledger", _ledger, "default",
             "1 to 32 of the characters A-Z a-z 0-9 _ -",
             "Group of instances that share a device's capacity; by default every instance of a"
             " machine."),
    Variable("KVELASTIC_RECLAIM_WAIT", None, "reclaim_wait_s", _seconds, "0.05",
             "seconds, from 0 to 3600",
             "How long an alloc waits for memory of other instances, and a scheduler before it"
             " preempts."),
    Variable("KVELASTIC_LIMIT_WAIT", None, "limit_wait_s", _seconds_or_never, "0.25",
             "seconds; less than 0 is never",
             "How long running requests may keep an instance over its limit; then requests that"
             " have computed least are preempted until the limit holds."),
    Variable("KVELASTIC_DEVICE", None, "device", _device, "auto", "auto, cpu, host, cuda or cuda:N",
             "Device whose memory backs the KV cache; auto takes a GPU if there is one."),
    Variable("KVELASTIC_IDLE_TRIM_SECONDS", None, "idle_trim_s", _seconds_or_never, "5.0",
             "seconds; less than 0 is never",
             "After this time without an alloc or free, no page is parked. Half of the unneeded"
             " parked pages are released after a fifth of it, the rest as allocs become fewer."),
    Variable("KVELASTIC_GUARD_PAGES", None, "guard_pages", _boolean, "false", BOOLEAN,
             "For finding faults: unmapped addresses read a scratch page, so that a kernel that"
             " reads too far does not fail. Maps and unmaps cost twice as much."),
    Variable("KVELASTIC_STRICT", None, "strict", _boolean, "(newer releases run)", BOOLEAN,
             "An engine version that was not tested: true refuses it; unset, a newer release of"
             " the same major version runs; with false any. One that runs is checked first, and a"
             " line in the log names it."),
    Variable("KVELASTIC_FLEXKV_ALIAS", None, "flexkv_alias", _boolean, "false", BOOLEAN,
             "Let `import flexkv` find kvelastic.flexkv if FlexKV is not installed; read when"
             " Python starts (docs/flexkv.md)."),
    Variable("KVELASTIC_LLM_DATADIST_ALIAS", None, "llm_datadist_alias", _boolean, "false", BOOLEAN,
             "Let `import llm_datadist` find kvelastic.datadist if LLM-DataDist is not installed;"
             " read when Python starts (docs/datadist.md)."),
    Variable("KVELASTIC_LINK_SECRET", None, "link_secret", _path_or_none, "none",
             "none; or an absolute path",
             "A file of mode 0600 with the secret shared with clusters of other hosts. With it"
             " clusters link over TCP, without it only on this host (docs/datadist.md)."),
    Variable("KVELASTIC_LINK_ALLOW", None, "link_allow", _networks, "none",
             "none; or networks with commas between: 10.0.0.0/24",
             "Networks whose hosts may link over TCP, besides this host."),
    Variable("KVELASTIC_LINK_DATA_PORTS", None, "link_data_ports", _ports, "any",
             "any, a port, or a first and a last port: 26100-26131",
             "Ports for data over TCP; each process takes the first free one."),
    Variable("KVELASTIC_TIERS", None, "tiers", parse_tiers, "none", TIERS_FORMS,
             "Where evicted blocks are kept; see docs/tiers.md."),
    Variable("KVELASTIC_TIER_POLICY", None, "tier_policy", _one_of("write_back", "write_through"),
             "write_back", "write_back or write_through",
             "write_back copies blocks as late as possible, write_through as soon as they are"
             " cached."),
    Variable("KVELASTIC_TIER_COPIES", None, "tier_copies", _one_of("all", "first"), "all",
             "all or first",
             "Keep a block in all tiers that accept it, or only in the nearest one."),
    Variable("KVELASTIC_TIER_STAGING", None, "tier_staging", _capacity, "64M",
             f"more than 0: {SIZE_FORMS}",
             "Host memory for copies to and from tiers."),
    Variable("KVELASTIC_TIER_WATERMARK", None, "tier_watermark", parse_percent, "10%",
             "a percentage of the blocks, 0 to 100",
             "write_back copies ahead when fewer blocks than this are free or have a copy."),
    Variable("KVELASTIC_TIER_IDLE_SECONDS", None, "tier_idle_s", _seconds_or_never, "5.0",
             "seconds; less than 0 is never",
             "After this time without an alloc or free, write_back copies the blocks without a"
             " copy."),
    Variable("KVELASTIC_TIER_RECLAIM_SECONDS", None, "tier_reclaim_s", _seconds, "0.02",
             "seconds, from 0 to 3600",
             "How long a reclaim waits for copies; then blocks without a copy are dropped."),
    Variable("KVELASTIC_TIER_LIMIT_SECONDS", None, "tier_limit_s", _seconds, "2.0",
             "seconds, from 0 to 3600", "The same for a lower limit."),
    Variable("KVELASTIC_TIER_SLEEP_SECONDS", None, "tier_sleep_s", _seconds, "30.0",
             "seconds, from 0 to 3600", "The same for a sleep."),
    Variable("KVELASTIC_TIER_EXIT_SECONDS", None, "tier_exit_s", _seconds, "5.0",
             "seconds, from 0 to 3600", "The same for a vLLM that is stopped."),
    Variable("KVELASTIC_TIER_WRITE_RATE", None, "tier_write_rate", _size_or_none, "none",
             f"none; or bytes a second, more than 0: {SIZE_FORMS}",
             "Largest write rate to tiers while nothing waits for the copies."),
    Variable("KVELASTIC_TIER_DAILY_WRITE", None, "tier_daily_write", _size_or_none, "none",
             f"none; or more than 0: {SIZE_FORMS}",
             "Largest number of bytes that each disk tier writes in a day, to protect the medium."),
    Variable("KVELASTIC_TIER_COMPARE", None, "tier_compare", _boolean, "true", BOOLEAN,
             "Bypass a tier while loading blocks takes longer than computing them."),
    Variable("KVELASTIC_ROLE", None, "role", _role, "none", "none, prefill, decode or both",
             "Whether this vLLM computes prompts for other engines, decodes prompts that others"
             " have computed, or does both (docs/prefill_decode.md)."),
    Variable("KVELASTIC_PREFILL_ADDRESS", None, "prefill_address", _address_or_none, "(automatic)",
             "unix:///path, or tcp://a.b.c.d:port with KVELASTIC_LINK_SECRET",
             "Where a prefill engine listens, as decode engines reach it. By default a Unix"
             " socket, for decode engines of the same user on this host."),
    Variable("KVELASTIC_PREFILL_HOLD_SECONDS", None, "prefill_hold_s", _seconds, "60.0",
             "seconds, from 0 to 3600",
             "How long a prefill engine keeps the blocks of a finished request for a decode"
             " engine."),
)
# fmt: on


def is_enabled(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether kvelastic is enabled; no other variable matters if it is not.

    Raises `ConfigError` for a value that is not a boolean. Warns of unknown names as `load` does.
    """
    _warn_of_unknown(environ)
    variable = next(each for each in VARIABLES if each.field == "enabled")
    name, text = _find(variable, environ)
    return text is not None and bool(_parsed(variable, name, text))


def load(environ: Mapping[str, str] = os.environ) -> Config:
    """Read `environ` and return a `Config`. Has no other input and changes nothing.

    Raises `ConfigError`, which names the variable, its value and the accepted values. Logs, once
    per process and cause: a warning for unknown `KVELASTIC_*` names with the most similar known
    name, and at INFO each `KVCACHED_*` name that is used.
    """
    values: dict[str, Any] = {}
    for variable in VARIABLES:
        name, text = _find(variable, environ)
        if text is not None:
            values[variable.field] = _parsed(variable, name, text)
            if name == "ENABLE_KVCACHED":
                values.setdefault("kvcached_segment", values["enabled"])
    _settle_reserved_pages(values)
    _check_guarantee(values)
    _check_name(values)
    if values.get("enabled"):
        values["autopatch"] = True
    if environ.get("NO_COLOR"):  # https://no-color.org: any non-empty value
        values["log_color"] = False
    _warn_of_unknown(environ)
    return Config(**values)


def markdown_table() -> str:
    """Return the reference table of the variables, for the documentation."""
    lines = [
        "| Variable | Default | Accepts | Description |",
        "|----------|---------|---------|-------------|",
    ]
    for v in VARIABLES:
        default = v.default if v.default.startswith("(") else f"`{v.default}`"
        doc = v.doc + (f" (also read as `{v.legacy}`)" if v.legacy else "")
        accepts = v.accepts.replace(SIZE_FORMS, "a size")
        lines.append(f"| `{v.name}` | {default} | {accepts} | {doc} |")
    return "\n".join(lines) + "\n"


def _find(variable: Variable, environ: Mapping[str, str]) -> tuple[str, str | None]:
    """Return the effective name of a variable and its text; the text is None if unset."""
    text = environ.get(variable.name, "").strip()
    if text or variable.legacy is None:
        return variable.name, text or None
    text = environ.get(variable.legacy, "").strip()
    if text:
        log_once(
            logging.INFO,
            f"{variable.legacy} is honoured as {variable.name}, which is not set; rename it.",
        )
    return variable.legacy, text or None


def _parsed(variable: Variable, name: str, text: str) -> object:
    try:
        return variable.parse(text)
    except TierListError as error:
        raise ConfigError(
            f"{name}={text!r} is not accepted: {error}; set it to {variable.accepts}."
        ) from None
    except (ValueError, InvalidArgumentError):
        raise ConfigError(
            f"{name}={text!r} is not accepted; set it to {variable.accepts}."
        ) from None


def _check_guarantee(values: dict[str, Any]) -> None:
    """Raise `ConfigError` if the guarantee is above a limit in bytes, as `kvctl set` does."""
    limit: object = values.get("limit")
    if isinstance(limit, int) and limit < values.get("minimum", 0):
        raise ConfigError(
            f"KVELASTIC_MIN={format_size(values['minimum'])} is above KVELASTIC_LIMIT; set it to"
            f" {format_size(limit)} or less."
        )


def _check_name(values: dict[str, Any]) -> None:
    """Raise `ConfigError` if a name is too long for the segment beside kvcached's."""
    name = values.get("ipc_name") or ""
    if values.get("kvcached_segment") and len(name) > _MOST_NAME_BESIDE_KVCACHED:
        raise ConfigError(
            f"KVELASTIC_IPC_NAME={name} is too long for an instance that keeps kvcached's segment:"
            f" the other one is NAME_dp1.kvelastic; use at most {_MOST_NAME_BESIDE_KVCACHED}"
            " characters."
        )


def _settle_reserved_pages(values: dict[str, Any]) -> None:
    """Adjust an unset bound to the set one; raise `ConfigError` if two set bounds conflict."""
    least: int | None = values.get("min_reserved_pages")
    most: int | None = values.get("max_reserved_pages")
    if least is not None and most is not None and most < least:
        raise ConfigError(
            f"KVELASTIC_MAX_RESERVED_PAGES={most} is not accepted; set it to"
            f" KVELASTIC_MIN_RESERVED_PAGES ({least}) or more."
        )
    if most is None and least is not None:
        values["max_reserved_pages"] = max(least, Config.max_reserved_pages)
    if least is None and most is not None:
        values["min_reserved_pages"] = min(most, Config.min_reserved_pages)


def _warn_of_unknown(environ: Mapping[str, str]) -> None:
    known = {variable.name for variable in VARIABLES}
    for name in sorted(environ.keys() - known - FROM_CONTROLLER):
        if name.startswith("KVELASTIC_"):
            from difflib import get_close_matches

            # Compare the names without their common parts, so that KVELASTIC_ENABLE is similar to
            # ENABLE_KVELASTIC.
            stems = {_stem(other): other for other in sorted(known)}
            near = stems[get_close_matches(_stem(name), stems, n=1, cutoff=0.0)[0]]
            log_once(
                logging.WARNING,
                f"{name} is not a variable of kvelastic and does nothing; is {near} meant?",
            )


def _stem(name: str) -> str:
    return name.removeprefix("KVELASTIC_").removesuffix("_KVELASTIC")


if __name__ == "__main__":
    print(
        "# Configuration\n\n"
        "Every variable of kvelastic; `python -m kvelastic.config` prints this page.\n\n"
        "    KVELASTIC_IPC_NAME=chat KVELASTIC_LIMIT=8G ENABLE_KVELASTIC=true vllm serve MODEL\n\n"
        "An instance reads its variables once, at its start; `kvctl` changes limits later. If a\n"
        "variable is unset, kvcached's name for it applies.\n\n"
        f"A *size* is: {SIZE_FORMS}.\n"
    )
    print(markdown_table(), end="")
