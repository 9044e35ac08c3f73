"""The controller's configuration: one frozen value, fully validated before it takes effect.

Each key is described where it is defined. `settings_file` reads YAML and prints the schema.
Durations are in seconds, sizes in bytes.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
from collections.abc import Iterator
from typing import Annotated, Any, Final, Literal
from urllib.parse import urlsplit

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from kvelastic.address import is_loopback
from kvelastic.errors import InvalidArgumentError
from kvelastic.shared.segment import check_name
from kvelastic.units import (
    DURATION_FORMS,
    MAX_PRIORITY,
    MAX_SIZE_BYTES,
    SIZE_FORMS,
    parse_duration_s,
    parse_size,
)


def _duration_s(value: object) -> float:
    try:
        return parse_duration_s(value)
    except InvalidArgumentError:
        raise ValueError(f"this is no duration; write {DURATION_FORMS}") from None


Duration = Annotated[
    float,
    BeforeValidator(_duration_s),
    WithJsonSchema({"type": ["number", "string"], "minimum": 0, "description": DURATION_FORMS}),
]
"""Seconds."""


def _no_truth(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("this is true or false; write a number")
    return value


def _size_bytes(value: object) -> object:
    if not isinstance(value, str):
        _no_truth(value)
        return value
    try:
        return parse_size(value)
    except InvalidArgumentError:
        raise ValueError(f"this is no size; write {SIZE_FORMS}") from None


Size = Annotated[
    int,
    BeforeValidator(_size_bytes),
    Field(ge=0, le=MAX_SIZE_BYTES),
    WithJsonSchema({"type": ["integer", "string"], "minimum": 0, "description": SIZE_FORMS}),
]
"""Bytes."""

SizeAboveZero = Annotated[Size, Field(gt=0)]
DurationAboveZero = Annotated[Duration, Field(gt=0)]
Priority = Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)]
Port = Annotated[int, BeforeValidator(_no_truth), Field(ge=1, le=65535)]
EngineName = Literal["vllm", "sglang", "transformers", "openai"]
Capability = Literal["completion", "tools", "insert", "vision", "embedding", "thinking"]

MOST_CHARS: Final = 65_536
"""Maximum length of one string, in characters."""
_UUID: Final = re.compile(r"(GPU|MIG)-[A-Za-z0-9/-]{1,100}")
_NAME_OF_HOST: Final = re.compile(r"[a-z0-9_.-]{1,253}|\[[0-9a-f:.]{2,45}\]")
_ORIGIN: Final = re.compile(
    r"([a-z][a-z0-9+.-]*)://([A-Za-z0-9_.~-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?"
)
_DEFAULT_PORTS: Final = {"http": ":80", "https": ":443"}


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, str_max_length=MOST_CHARS)


class ServerSettings(_Section):
    """The address that the controller listens on, and the bounds of requests."""

    host: str = "127.0.0.1"
    """An address other than loopback needs `auth.api_keys`."""
    port: Annotated[int, BeforeValidator(_no_truth), Field(ge=0, le=65535)] = 8080
    """0 picks a free port and prints it."""
    tls_cert: str | None = None
    """PEM files. With both `tls_cert` and `tls_key` the controller serves HTTPS only."""
    tls_key: str | None = None
    max_body: SizeAboveZero = 64 << 20
    """Maximum body of one request; a larger one gets 413."""
    max_buffered: SizeAboveZero = 1 << 30
    """Maximum sum of the bodies not yet sent to an engine; beyond it: 503 with Retry-After."""
    max_headers: SizeAboveZero = 64 << 10
    """Maximum of a request's line and headers together; beyond it: 431."""
    header_timeout: DurationAboveZero = 15.0
    """Time for a request's line and headers to arrive, and before them for a TLS handshake."""
    body_timeout: DurationAboveZero = 60.0
    """Time for the next piece of a request's body to arrive."""
    send_timeout: Duration = 60.0
    """Time in which a client must read all pending response data, or 64 KiB of it. Otherwise the
    connection is cut. 0: never."""
    keep_alive: Duration = 30.0
    """How long a connection may wait for its next request."""
    drain_timeout: Duration = 30.0
    """How long running requests may continue after SIGTERM."""
    log_requests: bool = True
    """Write one line of JSON per request to stderr."""
    allowed_origins: tuple[str, ...] = ()
    """Origins of other web pages that may use models and read: SCHEME://HOST:PORT, as browsers
    send them. The match is exact. Changes need an admin key, also from these pages."""
    allowed_hosts: tuple[str, ...] = ()
    """Further Host names, without a port, accepted in requests without a key. localhost always
    is."""

    @field_validator("host")
    @classmethod
    def _is_a_host(cls, host: str) -> str:
        if not _is_host(host):
            raise ValueError("this is no address to listen on; write 127.0.0.1, or a host's name")
        return host

    @field_validator("allowed_origins")
    @classmethod
    def _origins_as_sent(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(_origin_as_sent(origin) for origin in origins)

    @field_validator("allowed_hosts")
    @classmethod
    def _hosts_as_sent(cls, hosts: tuple[str, ...]) -> tuple[str, ...]:
        shown = tuple(f"[{h}]" if h.count(":") > 1 and h[0] != "[" else h for h in hosts)
        for host in shown:
            if not _NAME_OF_HOST.fullmatch(host.lower()):
                raise ValueError(
                    f"{host[:100]!r} is no host's name; write one name, without a port"
                )
        return tuple(host.lower() for host in shown)


class SleepSettings(_Section):
    """When models sleep, and how their requests wait."""

    auto: bool = False
    """Put models to sleep after `idle_after`, and idle models when others request memory."""
    wake_on_request: bool = True
    """True: a request for a sleeping model wakes it. False: the request gets 503."""
    idle_after: Duration = 300.0
    min_sleep: Duration = 60.0
    """Minimum sleep of a model that the controller put to sleep; requests wait until then. A model
    put to sleep by an operator has no minimum."""
    queue_limit: Annotated[int, Field(ge=0)] = 1024
    """Maximum number of waiting requests per model; beyond it: 429."""
    queue_timeout: Duration = 120.0
    """How long a request may wait before it gets 503."""
    sleep_timeout: Duration = 60.0
    """Time for an engine to fall asleep."""
    wake_timeout: Duration = 120.0
    """Time for an engine to wake."""
    check_every: Annotated[Duration, Field(ge=0.01)] = 1.0
    """How often the controller looks for models to put to sleep."""
    pressure_after: Duration = 2.0
    """With `auto`: a memory request of this age puts less important idle models to sleep."""


class KeySettings(_Section):
    """One key. In the file a plain string is accepted and sets `key` only."""

    key: str = Field(repr=False)
    """`sha256:HEX` of the key, or the key itself."""
    name: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    """Name of its owner, logged with the key's id."""
    _is_from_environment: bool = PrivateAttr(default=False)

    @field_validator("key")
    @classmethod
    def _can_be_sent(cls, key: str) -> str:
        digest = key.removeprefix("sha256:")
        if not key:
            raise ValueError("this key is empty")
        if digest == key:
            _check_carried(key)
        elif len(digest) != 64 or any(c not in "0123456789abcdefABCDEF" for c in digest):
            raise ValueError("after `sha256:` come 64 hexadecimal digits")
        return key

    @property
    def is_given_as_digest(self) -> bool:
        """True if the configuration has only the key's digest."""
        return self.key.startswith("sha256:")

    @property
    def is_in_file(self) -> bool:
        """True if the configuration file contains the key in plain text."""
        return not (self.is_given_as_digest or self._is_from_environment)

    def mark_from_environment(self) -> None:
        """Record that the key came from an environment variable that the file names."""
        self._is_from_environment = True

    @property
    def digest(self) -> bytes:
        """SHA-256 of the key."""
        if self.is_given_as_digest:
            return bytes.fromhex(self.key.removeprefix("sha256:"))
        return hashlib.sha256(self.key.encode()).digest()


class ApiKeySettings(KeySettings):
    """A key for models."""

    max_priority: Priority | None = None
    """Overrides `auth.max_priority` for this key."""


def _check_carried(key: str) -> None:
    """Raise `ValueError` for a key that a header cannot carry, or that would end the header."""
    if not key.isascii() or not key.isprintable() or " " in key:
        raise ValueError("this key has characters that no header can carry")


def _as_key(value: object) -> object:
    return value if isinstance(value, dict | KeySettings) else {"key": value}


ApiKey = Annotated[
    ApiKeySettings, BeforeValidator(_as_key, json_schema_input_type=str | ApiKeySettings)
]
AdminKey = Annotated[
    KeySettings, BeforeValidator(_as_key, json_schema_input_type=str | KeySettings)
]


class AuthSettings(_Section):
    """Access control. Clients send keys as `Authorization: Bearer KEY`."""

    api_keys: tuple[ApiKey, ...] = ()
    """Keys for models. If empty, models need no key; that is accepted on loopback only."""
    admin_keys: tuple[AdminKey, ...] = ()
    """Keys for /action, /admin, writes to /memory and engines' operations; valid for models too."""
    max_priority: Priority = 0
    """Upper bound of X-Kvelastic-Priority. The bound is 1000 for admin keys, and for all requests
    if no key is configured."""
    model_paths: tuple[str, ...] = ()
    """Further paths under /v1/ allowed with api_keys. A path with a final slash is a prefix."""

    @field_validator("model_paths")
    @classmethod
    def _are_paths(cls, paths: tuple[str, ...]) -> tuple[str, ...]:
        for path in paths:
            if not re.fullmatch(r"/v1/[!-~]+", path) or re.search(r"//|/\.|[\\%?#]", path):
                raise ValueError("a path begins with /v1/ and has no dots, escapes or query")
        return paths

    @model_validator(mode="after")
    def _each_once(self) -> AuthSettings:
        for name in ("api_keys", "admin_keys"):
            digests = [key.digest for key in getattr(self, name)]
            if len(set(digests)) < len(digests):
                raise ValueError(f"a key is twice in {name}")
        return self


class MemorySettings(_Section):
    """Memory settings that the controller applies when it first sees the model's instance."""

    min: Size | None = None
    """Guarantee: others never reclaim memory below this size."""
    limit: Size | None = None
    """Maximum memory that the instance may hold."""
    priority: Priority | None = None
    """A model of higher priority keeps memory longer, is put to sleep later, and wakes first."""
    needs: Size | None = None
    """Memory of the awake engine besides its KV cache, used until its instance reports the value.
    For an engine without an instance: all its memory."""
    device: str | None = None
    """The device: `host`, a GPU's UUID, or a name of `devices`. Default: the only entry of
    `devices`, else `host`. An instance reports its device itself."""

    @model_validator(mode="after")
    def _min_within_limit(self) -> MemorySettings:
        if self.min is not None and self.limit is not None and self.min > self.limit:
            raise ValueError("min is above limit")
        return self


class SwapSettings(_Section):
    """Swapping of models that do not all fit into memory."""

    min_awake: Duration = 10.0
    """Minimum time that a woken or started model keeps its memory before it makes room for another.
    After that its new requests wait, its running ones end, and it makes room."""
    starts_at_once: Annotated[int, Field(ge=0)] = 0
    """Maximum number of engines starting at the same time; 0: as many as fit."""


class GroupSettings(_Section):
    """A group of models with restrictions that do not depend on memory."""

    name: str = Field(min_length=1, max_length=256)
    models: tuple[str, ...] = Field(min_length=1)
    """Model names; a model is in at most one group."""
    at_once: Annotated[int, Field(ge=0)] = 0
    """Maximum number of its models awake at once; 0: no limit."""
    exclusive: bool = False
    """While one of its models is awake, unpinned models outside that can sleep are not."""
    persistent: bool = False
    """Its models may stay awake beside an exclusive group."""


class TimeoutSettings(_Section):
    """Timeouts of an engine; 0 disables one."""

    connect: Duration = 5.0
    idle: Duration = 600.0
    """Maximum time without a byte of the response, also before the first byte."""
    total: Duration = 0.0


class LaunchSettings(_Section):
    """An engine that the controller starts, monitors and stops."""

    command: tuple[str, ...] = Field(min_length=1)
    """Program and arguments. `{port}` is replaced by the port."""
    port: Port
    env: dict[str, str] = Field(default_factory=dict)
    """Added to the controller's environment, without the controller's keys."""
    cwd: str | None = None
    ready_timeout: DurationAboveZero = 300.0
    """Time from its start until its health route returns 200. After it the engine is restarted."""
    stop_timeout: Duration = 15.0
    """Time between SIGTERM and SIGKILL."""
    restart: bool = True
    """Restart it when it ends."""
    on_demand: bool = False
    """Start it on the first request. Stop it when other engines would be put to sleep: by an
    operator, after `ttl`, and when others need its memory."""
    preload: bool = False
    """With `on_demand`: start it with the controller, if it fits beside the running engines."""
    backoff: Duration = 1.0
    """Delay before the first of consecutive restarts; it doubles up to `backoff_max`."""
    backoff_max: Duration = 60.0
    orphan: Literal["end", "adopt"] = "end"
    """Whether to end or adopt an engine on this port whose controller was killed."""
    log_file: str | None = None
    """File to which its output is appended. Default: a file in the temporary directory."""

    @field_validator("command", "cwd", "log_file", mode="after")
    @classmethod
    def _the_system_takes_it(cls, value: Any) -> Any:
        words = (value,) if isinstance(value, str) else value or ()
        if any("\0" in word for word in words):
            raise ValueError("a NUL character cannot be handed to a program")
        if words and not words[0]:
            raise ValueError("this is empty; name a program, or a path")
        return value

    @field_validator("env")
    @classmethod
    def _can_be_set(cls, env: dict[str, str]) -> dict[str, str]:
        for name, value in env.items():
            if not name or "=" in name or "\0" in name:
                raise ValueError("a variable's name is not empty and has neither = nor NUL in it")
            if "\0" in value:
                raise ValueError(f"the value of {name} has a NUL character in it")
            if name == "VLLM_API_KEY":
                _check_carried(value)
        return env


class ModelSettings(_Section):
    """One model, served by one engine or by several of a kind."""

    name: str = Field(min_length=1, max_length=256)
    """The value that clients send as "model"."""
    engine: EngineName = "openai"
    """Selects the way to put it to sleep. `transformers` and `openai` cannot sleep."""
    url: str | None = None
    urls: tuple[str, ...] = ()
    """Replicas. A request goes to the replica with the fewest requests in flight."""
    launch: LaunchSettings | None = None
    prefill: str | None = None
    """Name of the model whose engines compute the prompts; the engines of this one decode."""
    aliases: tuple[str, ...] = ()
    capabilities: tuple[Capability, ...] = ("completion", "tools")
    """Capabilities reported by /api/show. Ollama's clients offer only these."""
    served_name: str | None = None
    """The engine's name of the model, if it differs from `name`."""
    api_key: str | None = None
    """Sent to the engine as a bearer token."""
    instance: str | None = None
    """Name of its segment, for the memory routes and sleep."""
    memory: MemorySettings = MemorySettings()
    ttl: Duration | None = None
    """Overrides `sleep.idle_after`, and applies even without `sleep.auto`."""
    pin: bool = False
    """The controller never puts it to sleep automatically."""
    max_in_flight: Annotated[int, BeforeValidator(_no_truth), Field(ge=0)] = 0
    """Maximum number of requests at its engines; further requests wait. 0: no limit."""
    queue_limit: Annotated[int, Field(ge=0)] | None = None
    """Overrides `sleep.queue_limit`."""
    queue_timeout: Duration | None = None
    """Overrides `sleep.queue_timeout`."""
    health: str = "/health"
    """The path that returns 200 when an engine can serve."""
    timeouts: TimeoutSettings = TimeoutSettings()

    @field_validator("name", "aliases", mode="after")
    @classmethod
    def _names_are_printable(cls, value: Any) -> Any:
        for name in (value,) if isinstance(value, str) else value:
            if not name or not name.isprintable() or name != name.strip("/ "):
                raise ValueError(
                    f"{_short(name)} cannot be a model's name: no control characters, and no slash"
                    " or space at either end"
                )
        return value

    @field_validator("served_name")
    @classmethod
    def _can_be_sent(cls, value: str | None) -> str | None:
        if value is not None and (not value or not value.isprintable()):
            raise ValueError(
                f"{value[:100]!r} cannot be sent as a model's name: it is not empty and has no"
                " control characters"
            )
        return value

    @field_validator("url", "urls", mode="after")
    @classmethod
    def _addresses(cls, value: Any) -> Any:
        for url in (value,) if isinstance(value, str) else value or ():
            if not url.isascii() or not url.isprintable() or " " in url:
                raise ValueError(
                    "an address has no spaces, control characters or letters beyond ASCII"
                )
            try:
                parts = urlsplit(url)
                port = parts.port
            except ValueError:
                raise ValueError("this is no address; its port is a number, 1 to 65535") from None
            if parts.scheme not in {"http", "https"} or not _is_host(parts.hostname or ""):
                raise ValueError("this is no address; write http://HOST:PORT")
            if port == 0:
                raise ValueError("a port is a number, 1 to 65535")
            if parts.query or parts.fragment or parts.username:
                raise ValueError("an address has no more than http://HOST:PORT/PATH")
        return value

    @field_validator("health")
    @classmethod
    def _path(cls, value: str) -> str:
        if not re.fullmatch(r"/[!-~]*", value) or "#" in value:
            raise ValueError(
                "a path begins with a slash, and has no spaces, control characters or #"
            )
        return value

    @field_validator("api_key")
    @classmethod
    def _key_can_be_sent(cls, key: str | None) -> str | None:
        if key is not None:
            _check_carried(key)
        return key

    @field_validator("instance")
    @classmethod
    def _is_a_segment(cls, name: str | None) -> str | None:
        try:
            return None if name is None else check_name(name)
        except InvalidArgumentError as error:
            raise ValueError(str(error)) from None

    @model_validator(mode="after")
    def _fits_together(self) -> ModelSettings:
        for fault in self._faults():
            raise ValueError(f"model {self.name!r}: {fault}")
        return self

    def _faults(self) -> Iterator[str]:
        launch = self.launch
        if sum((self.url is not None, bool(self.urls), launch is not None)) != 1:
            yield "give one of url, urls and launch"
        if self.memory.limit is not None and self.instance is None:
            yield (
                "memory.limit needs `instance`, the engine's KVELASTIC_IPC_NAME: nothing else keeps"
                " to it"
            )
        if launch is None:
            return
        if launch.preload and not launch.on_demand:
            yield "launch.preload is for on_demand; others start anyway"
        has_key = any(word.partition("=")[0] == "--api-key" for word in launch.command)
        if has_key and self.api_key is None:
            yield (
                "the command has --api-key, and api_key is not set; leave it out (vLLM gets a new"
                " key at each start), or set api_key too"
            )

    @property
    def addresses(self) -> tuple[str, ...]:
        """The engines' addresses, without a slash at the end."""
        if self.launch is not None:
            return (f"http://127.0.0.1:{self.launch.port}",)
        return tuple(u.rstrip("/") for u in (self.urls or (self.url or "",)))

    @property
    def is_on_demand(self) -> bool:
        """Whether its engine is started by requests and stopped instead of put to sleep."""
        return self.launch is not None and self.launch.on_demand

    @property
    def may_sleep(self) -> bool:
        """Whether its engines may be put to sleep, or be stopped, without an operator."""
        return not self.pin and (self.engine in {"vllm", "sglang"} or self.is_on_demand)

    @property
    def upstream_name(self) -> str:
        """The engine's name of the model."""
        return self.served_name or self.name


class Settings(_Section):
    """The whole configuration."""

    server: ServerSettings = Field(default_factory=ServerSettings)
    sleep: SleepSettings = Field(default_factory=SleepSettings)
    swap: SwapSettings = Field(default_factory=SwapSettings)
    auth: AuthSettings = AuthSettings()
    devices: dict[str, Size] = Field(default_factory=dict)
    """Memory of devices without a ledger, by a name of your choice."""
    groups: tuple[GroupSettings, ...] = ()
    models: tuple[ModelSettings, ...] = ()

    def group_of(self, model: str) -> str | None:
        """Return the name of the model's group, or None."""
        return next((group.name for group in self.groups if model in group.models), None)

    @model_validator(mode="after")
    def _groups_are_of_models(self) -> Settings:
        known = {model.name for model in self.models}
        members: set[str] = set()
        names: set[str] = set()
        for group in self.groups:
            if group.name in names:
                raise ValueError(f"two groups are called {group.name!r}")
            names.add(group.name)
            for name in group.models:
                if name not in known:
                    raise ValueError(f"group {group.name!r}: no model is called {_short(name)}")
                if name in members:
                    raise ValueError(f"model {name!r} is in more than one group, or twice in one")
                members.add(name)
        return self

    @model_validator(mode="after")
    def _prefill_pools_fit(self) -> Settings:
        known = {model.name: model for model in self.models}
        for model in self.models:
            if model.prefill is not None:
                for fault in self._faults_of_pool(model, known.get(model.prefill)):
                    raise ValueError(f"model {model.name!r}: prefill {fault}")
        return self

    def _faults_of_pool(self, model: ModelSettings, pool: ModelSettings | None) -> Iterator[str]:
        if pool is None:
            yield f"names {_short(model.prefill or '')}, and no model has this name"
            return
        if pool is model:
            yield "names this model; a prefill pool is another model, with its own engines"
        if pool.prefill is not None:
            yield f"names {pool.name!r}, which has a prefill pool itself"
        for each in (model, pool):
            if each.engine != "vllm":
                yield f"needs engine: vllm in both models; {each.name!r} has {each.engine}"
        for address in model.addresses:
            if address in pool.addresses:
                yield f"names {pool.name!r}, which has the same engine, {address}"
        if self._excludes(model, pool) or self._excludes(pool, model):
            yield f"names {pool.name!r}, and their groups forbid that both are awake"

    def _excludes(self, one: ModelSettings, other: ModelSettings) -> bool:
        """Return True if `other` may not be awake beside `one`, by the group of `one`."""
        for group in self.groups:
            if one.name in group.models and other.name in group.models:
                return group.at_once == 1
        is_persistent = any(g.persistent for g in self.groups if other.name in g.models)
        is_exclusive = any(g.exclusive for g in self.groups if one.name in g.models)
        return is_exclusive and not is_persistent and not other.pin

    @model_validator(mode="after")
    def _holds_together(self) -> Settings:
        seen: set[str] = set()
        for model in self.models:
            for name in (model.name, *model.aliases):
                if name in seen:
                    raise ValueError(
                        f"the name {_short(name)} is given twice; names and aliases differ"
                    )
                seen.add(name)
        ports: set[int] = set()
        for model in self.models:
            port = None if model.launch is None else model.launch.port
            if port is not None and port in ports:
                raise ValueError(f"two models have launch.port {port}; each needs its own")
            if port is not None and port == self.server.port:
                raise ValueError(
                    f"model {model.name!r}: launch.port {port} is server.port, where the controller"
                    " itself listens"
                )
            ports |= set() if port is None else {port}
            for address in model.addresses if port is None else ():
                parts = urlsplit(address)
                if parts.port == self.server.port and is_loopback(parts.hostname or ""):
                    raise ValueError(
                        f"model {model.name!r}: {address} is where the controller itself listens;"
                        " give the engine's address, or another server.port"
                    )
            device = model.memory.device
            if device is not None and device not in self.devices and not _is_device(device):
                raise ValueError(
                    f"model {model.name!r}: memory.device {_short(device)} is not `host`, a GPU's"
                    " UUID (kvctl devices) or one of `devices`"
                )
        if (self.server.tls_cert is None) != (self.server.tls_key is None):
            raise ValueError("server.tls_cert and server.tls_key come together")
        if not is_loopback(self.server.host) and not self.auth.api_keys:
            raise ValueError(
                f"server.host {self.server.host} can be reached from outside, and there is no key:"
                " set auth.api_keys, or listen on 127.0.0.1"
            )
        return self

    def _sleeps(self, model: ModelSettings) -> bool:
        """Whether the controller puts a model to sleep by time, by pressure or for its group."""
        is_of_a_group = any(model.name in group.models for group in self.groups)
        by_itself = self.sleep.auto or model.ttl is not None or model.is_on_demand
        return model.may_sleep and (by_itself or is_of_a_group)

    @model_validator(mode="after")
    def _no_shared_engine_sleeps(self) -> Settings:
        first: dict[str, ModelSettings] = {}
        for model in self.models:
            for engine in filter(None, (*model.addresses, model.instance)):
                other = first.setdefault(engine, model)
                if other is not model and (self._sleeps(other) or self._sleeps(model)):
                    raise ValueError(
                        f"models {other.name!r} and {model.name!r} have the same engine, {engine},"
                        " and the sleep of one would stop the other: set `pin: true` for both, or"
                        " make one name an alias"
                    )
        return self


def _short(text: str) -> str:
    return repr(text[:100])


def _is_device(device: str) -> bool:
    """Return True for the host and for a UUID of a GPU, as `kvctl devices` and ledgers write it."""
    return device == "host" or bool(_UUID.fullmatch(device))


def _is_host(host: str) -> bool:
    """Return True for an IP address and for a valid host name."""
    try:
        ipaddress.ip_address(host)
        return True
    except ValueError:
        return bool(_NAME_OF_HOST.fullmatch(host.lower()))


def _origin_as_sent(origin: str) -> str:
    """Return an origin as browsers send it. Raises `ValueError` if it is too broad or invalid."""
    if origin in {"*", "null"}:
        raise ValueError(f"{_short(origin)} would let in every page there is; name each origin")
    match = _ORIGIN.fullmatch(origin)
    if match is None:
        raise ValueError(
            f"{_short(origin)} is no origin; write SCHEME://HOST or SCHEME://HOST:PORT, and no path"
        )
    scheme, host, port = match[1], match[2], match[3] or ""
    if scheme in _DEFAULT_PORTS:
        host, port = host.lower(), "" if port == _DEFAULT_PORTS[scheme] else port
    return f"{scheme}://{host}{port}"
