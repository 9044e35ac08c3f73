"""What the controller is told: one frozen value, checked whole before anything is done with it.

Every key is described where it is defined; `settings_file` reads YAML and prints the schema.
Durations are seconds here, sizes bytes.
"""

from __future__ import annotations

import ipaddress
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from kvelastic.controller.durations import DURATION_FORMS, parse_duration_s
from kvelastic.errors import InvalidArgumentError
from kvelastic.sizes import SIZE_FORMS, parse_size


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


def _size_bytes(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        return parse_size(value)
    except InvalidArgumentError:
        raise ValueError(f"this is no size; write {SIZE_FORMS}") from None


Size = Annotated[
    int,
    BeforeValidator(_size_bytes),
    Field(ge=0),
    WithJsonSchema({"type": ["integer", "string"], "minimum": 0, "description": SIZE_FORMS}),
]
"""Bytes."""

Priority = Annotated[int, Field(ge=-1000, le=1000)]
Port = Annotated[int, Field(ge=1, le=65535)]
EngineName = Literal["vllm", "sglang", "transformers", "openai"]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, str_max_length=65536)


class ServerSettings(_Section):
    """Where the controller listens, and what it accepts."""

    host: str = "127.0.0.1"
    """An address other than loopback needs `auth.api_keys`."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8080
    """0 takes a free port and prints it."""
    tls_cert: str | None = None
    """PEM files; given both, it speaks HTTPS only."""
    tls_key: str | None = None
    max_body: Size = 64 << 20
    """Of one request; beyond it: 413."""
    max_buffered: Size = 1 << 30
    """Of the bodies of all requests that wait or run; beyond it: 503 with Retry-After."""
    max_headers: Size = 64 << 10
    """Of one request's line and headers together; beyond it: 431."""
    header_timeout: Duration = 15.0
    """For a request's line and headers to arrive."""
    body_timeout: Duration = 60.0
    """For the next piece of a request's body to arrive."""
    send_timeout: Duration = 60.0
    """For a client to take more of an answer that waits for it: all of it, or 64 KiB. After it the
    connection is cut; 0: never."""
    keep_alive: Duration = 30.0
    """How long a connection may wait for its next request."""
    drain_timeout: Duration = 30.0
    """How long requests that run may go on after SIGTERM."""
    log_requests: bool = True
    """One line of JSON a request on stderr."""


class SleepSettings(_Section):
    """When models sleep, and what happens to requests meanwhile."""

    auto: bool = False
    """Put models to sleep after `idle_after`, and idle ones when others ask for memory."""
    wake_on_request: bool = True
    """A request for a sleeping model wakes it; else it gets 503."""
    idle_after: Duration = 300.0
    min_sleep: Duration = 60.0
    """A model put to sleep by itself stays so at least that long; requests wait. By hand: 0."""
    queue_limit: Annotated[int, Field(ge=0)] = 1024
    """Requests of one model that may wait; beyond it: 429."""
    queue_timeout: Duration = 120.0
    """How long a request may wait; after it: 503."""
    sleep_timeout: Duration = 60.0
    """For an engine to fall asleep."""
    wake_timeout: Duration = 120.0
    """For an engine to wake."""
    check_every: Annotated[Duration, Field(ge=0.01)] = 1.0
    """How often the controller looks for models to put to sleep."""
    pressure_after: Duration = 2.0
    """With `auto`: an ask for memory as old as this puts less important idle models to sleep."""


class AuthSettings(_Section):
    """Who may ask. Keys are sent as `Authorization: Bearer KEY`."""

    api_keys: tuple[str, ...] = ()
    """`sha256:HEX` of the key, or the key itself. None: open, which only loopback may be."""
    admin_keys: tuple[str, ...] = ()
    """For /action, /admin and writes to /memory; they are good for models too."""

    @field_validator("api_keys", "admin_keys")
    @classmethod
    def _keys_can_be_sent(cls, keys: tuple[str, ...]) -> tuple[str, ...]:
        for number, key in enumerate(keys, 1):
            if not key:
                raise ValueError(f"key {number} is empty")
            digest = key.removeprefix("sha256:")
            if digest == key:
                if not key.isascii() or not key.isprintable() or " " in key:
                    raise ValueError(f"key {number} has characters that no header can carry")
            elif len(digest) != 64 or any(c not in "0123456789abcdefABCDEF" for c in digest):
                raise ValueError(f"key {number}: after `sha256:` come 64 hexadecimal digits")
        return keys


class MemorySettings(_Section):
    """What is wished of the model's instance when the controller first sees it."""

    min: Size | None = None
    """Guarantee: nobody takes it below that."""
    limit: Size | None = None
    """It never holds more than that."""
    priority: Priority | None = None
    """Higher keeps memory longer, and is put to sleep later."""

    @model_validator(mode="after")
    def _min_within_limit(self) -> MemorySettings:
        if self.min is not None and self.limit is not None and self.min > self.limit:
            raise ValueError("min is above limit")
        return self


class TimeoutSettings(_Section):
    """How long an engine may take; 0 means for ever."""

    connect: Duration = 5.0
    idle: Duration = 600.0
    """Without one byte of the answer, its first one included."""
    total: Duration = 0.0


class LaunchSettings(_Section):
    """An engine that the controller starts, watches and ends."""

    command: tuple[str, ...] = Field(min_length=1)
    """`{port}` in a word becomes the port."""
    port: Port
    env: dict[str, str] = Field(default_factory=dict)
    """Added to the controller's own environment."""
    cwd: str | None = None
    ready_timeout: Duration = 300.0
    """From its start until its health route answers 200; then it is ended and started anew."""
    stop_timeout: Duration = 15.0
    """From SIGTERM to SIGKILL."""
    restart: bool = True
    """Start it again when it ends."""
    backoff: Duration = 1.0
    """Before the first restart in a row; it doubles up to `backoff_max`."""
    backoff_max: Duration = 60.0
    log_file: str | None = None
    """Where its output is appended; none: a file in the temporary directory."""


class ModelSettings(_Section):
    """One model, served by one engine or by several of a kind."""

    name: str = Field(min_length=1, max_length=256)
    """What clients send as "model"."""
    engine: EngineName = "openai"
    """How it is put to sleep: `transformers` and `openai` cannot."""
    url: str | None = None
    urls: tuple[str, ...] = ()
    """Replicas: a request goes to the one with the least in flight."""
    launch: LaunchSettings | None = None
    aliases: tuple[str, ...] = ()
    served_name: str | None = None
    """The engine's own name for it, where that differs from `name`."""
    api_key: str | None = None
    """Sent to the engine as a bearer token."""
    instance: str | None = None
    """Its segment, for the memory routes and sleep."""
    memory: MemorySettings = MemorySettings()
    ttl: Duration | None = None
    """Its own `sleep.idle_after`; it is put to sleep after it without `sleep.auto`, too."""
    pin: bool = False
    """Never put to sleep by itself."""
    max_in_flight: Annotated[int, Field(ge=0)] = 0
    """Requests that its engines get at once, others wait; 0: all."""
    queue_limit: Annotated[int, Field(ge=0)] | None = None
    """Its own `sleep.queue_limit`."""
    queue_timeout: Duration | None = None
    """Its own `sleep.queue_timeout`."""
    health: str = "/health"
    """The path that answers 200 when an engine can serve."""
    timeouts: TimeoutSettings = TimeoutSettings()

    @field_validator("name", "aliases", mode="after")
    @classmethod
    def _names_can_be_told(cls, value: Any) -> Any:
        for name in (value,) if isinstance(value, str) else value:
            if not name or not name.isprintable() or name != name.strip("/ "):
                raise ValueError(
                    f"{name!r} cannot be a model's name: no control characters, and no slash or"
                    " space at either end"
                )
        return value

    @field_validator("url", "urls", mode="after")
    @classmethod
    def _addresses(cls, value: Any) -> Any:
        for url in (value,) if isinstance(value, str) else value or ():
            parts = urlsplit(url)
            if parts.scheme not in {"http", "https"} or not parts.hostname:
                raise ValueError("this is no address; write http://HOST:PORT")
            if parts.query or parts.fragment or parts.username:
                raise ValueError("an address has no more than http://HOST:PORT/PATH")
        return value

    @field_validator("health")
    @classmethod
    def _path(cls, value: str) -> str:
        if not value.startswith("/"):
            raise ValueError("a path begins with a slash")
        return value

    @model_validator(mode="after")
    def _one_source(self) -> ModelSettings:
        if sum((self.url is not None, bool(self.urls), self.launch is not None)) != 1:
            raise ValueError(f"model {self.name!r}: give one of url, urls and launch")
        return self

    @property
    def addresses(self) -> tuple[str, ...]:
        """The engines' addresses, without a slash at the end."""
        if self.launch is not None:
            return (f"http://127.0.0.1:{self.launch.port}",)
        return tuple(u.rstrip("/") for u in (self.urls or (self.url or "",)))

    @property
    def upstream_name(self) -> str:
        """What the engine calls the model."""
        return self.served_name or self.name


class Settings(_Section):
    """The whole configuration."""

    server: ServerSettings = Field(default_factory=ServerSettings)
    sleep: SleepSettings = Field(default_factory=SleepSettings)
    auth: AuthSettings = AuthSettings()
    models: tuple[ModelSettings, ...] = ()

    @model_validator(mode="after")
    def _holds_together(self) -> Settings:
        seen: set[str] = set()
        for model in self.models:
            for name in (model.name, *model.aliases):
                if name in seen:
                    raise ValueError(f"the name {name!r} is given twice; names and aliases differ")
                seen.add(name)
        ports = [model.launch.port for model in self.models if model.launch is not None]
        for port in ports:
            if ports.count(port) > 1:
                raise ValueError(f"two models are launched on port {port}")
        if (self.server.tls_cert is None) != (self.server.tls_key is None):
            raise ValueError("server.tls_cert and server.tls_key come together")
        if not is_loopback(self.server.host) and not self.auth.api_keys:
            raise ValueError(
                f"server.host {self.server.host} can be reached from outside, and there is no key:"
                " set auth.api_keys, or listen on 127.0.0.1"
            )
        return self


def is_loopback(host: str) -> bool:
    """Whether an address is this machine's own only. A name other than localhost is not."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
