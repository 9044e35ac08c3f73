"""The configuration of a Serve application: one frozen value, checked before anything starts.

Durations are seconds, sizes bytes; both may be written as in the controller's file ("2m", "512M").
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from kvelastic.controller.settings import (
    AuthSettings,
    Duration,
    DurationAboveZero,
    LaunchSettings,
    MemorySettings,
    ModelSettings,
    Priority,
    ServerSettings,
    Settings,
    Size,
    SizeAboveZero,
    SleepSettings,
)
from kvelastic.errors import ClusterConfigError

RESOURCE: Final = "kvelastic_mib"
"""Ray's resource: of a node its ledgers' capacity, of a replica what it is guaranteed. In MiB."""
LAUNCHER: Final = "kvelastic.integration.ray.launcher"
_MIB: Final = 1 << 20


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ClusterModel(_Section):
    """One model, served by replicas that have an engine each."""

    name: str = Field(min_length=1, max_length=256)
    """What clients send as "model"."""
    engine: Literal["vllm", "sglang"] = "vllm"
    command: tuple[str, ...] = Field(min_length=1)
    """The engine's server; `{port}` stands for the port that it is to listen on, at 127.0.0.1."""
    env: dict[str, str] = Field(default_factory=dict)
    """Of the engine, beside the replica's own: KVELASTIC_HOST_MEMORY, for one."""
    cwd: str | None = None
    served_name: str | None = None
    """The engine's own name for it, where that differs from `name`."""
    guarantee: Size = 0
    """Of each replica: `KVELASTIC_MIN`, and its part of the node's resource `kvelastic_mib`."""
    reserved: Size = 0
    """What a replica holds beside its KV cache within the node's `kvelastic_mib` (weights)."""
    limit: Size | None = None
    priority: Priority | None = None
    replicas: Annotated[int, Field(ge=1, le=1000)] = 1
    replicas_per_node: Annotated[int, Field(ge=1, le=1000)] | None = None
    """At most; None: as many as fit."""
    num_cpus: Annotated[float, Field(ge=0)] = 1.0
    num_gpus: Annotated[float, Field(ge=0)] = 0.0
    """A part of a GPU (0.1), so that several replicas can share one: its ledger divides it."""
    resources: dict[str, float] = Field(default_factory=dict)
    """More of Ray's, to choose nodes by."""
    most_requests: Annotated[int, Field(ge=1)] = 256
    """That one replica has at once; more wait in front of it."""
    ttl: Duration | None = None
    """A replica without requests sleeps after so long; None: as `sleep` says."""
    pin: bool = False
    """Never put to sleep by itself."""
    ready_timeout: DurationAboveZero = 600.0
    stop_timeout: Duration = 15.0
    health: str = "/health"

    @property
    def placed_mib(self) -> int:
        """What a replica takes of its node's resource."""
        return math.ceil((self.guarantee + self.reserved) / _MIB)

    def of_replica(self, instance: str, port: int) -> ModelSettings:
        """How the controller in the replica that this process is sees it."""
        return ModelSettings(
            name=self.name,
            engine=self.engine,
            launch=LaunchSettings(
                command=(sys.executable, "-m", LAUNCHER, str(os.getpid()), *self.command),
                port=port,
                env={"KVELASTIC_MIN": str(self.guarantee), **self.env},
                cwd=self.cwd,
                ready_timeout=self.ready_timeout,
                stop_timeout=self.stop_timeout,
                restart=False,  # Ray puts another replica in its place
            ),
            served_name=self.served_name,
            instance=instance,
            memory=MemorySettings(
                min=self.guarantee or None, limit=self.limit, priority=self.priority
            ),
            ttl=self.ttl,
            pin=self.pin,
            health=self.health,
        )


class FrontSettings(_Section):
    """The deployment that clients speak to."""

    replicas: Annotated[int, Field(ge=1, le=1000)] = 1
    replicas_per_node: Annotated[int, Field(ge=1)] | None = None
    num_cpus: Annotated[float, Field(ge=0)] = 0.1
    resources: dict[str, float] = Field(default_factory=dict)
    """Of Ray's, to choose nodes by."""
    max_body: SizeAboveZero = 64 << 20
    allowed_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    """Names beside localhost that clients without a key may use for this address."""
    retry_for: Duration = 120.0
    """How long a request that no replica has begun to answer is tried again."""

    @property
    def server(self) -> ServerSettings:
        """The same, as the controller names it."""
        return ServerSettings(
            max_body=self.max_body,
            allowed_origins=self.allowed_origins,
            allowed_hosts=self.allowed_hosts,
            log_requests=False,
        )


class HealthSettings(_Section):
    """How soon Ray takes a replica for dead: after three checks in a row that fail."""

    period: DurationAboveZero = 0.5
    timeout: DurationAboveZero = 1.0
    """Of one check. A replica that works answers at once, whatever its engine does."""


class ClusterSettings(_Section):
    """All of it."""

    models: tuple[ClusterModel, ...] = Field(min_length=1)
    sleep: SleepSettings = Field(default_factory=SleepSettings)
    auth: AuthSettings = AuthSettings()
    front: FrontSettings = FrontSettings()
    health: HealthSettings = HealthSettings()
    report_every: DurationAboveZero = 0.5
    """How often replicas report room and sleep to routers."""

    @model_validator(mode="after")
    def _names_differ(self) -> ClusterSettings:
        names = [model.name for model in self.models]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two models are named {name!r}; give each another name")
        return self

    def model(self, name: str) -> ClusterModel:
        """One of the models. Raises `StopIteration` if there is none of the name."""
        return next(model for model in self.models if model.name == name)

    def of_replica(self, name: str, instance: str, port: int) -> Settings:
        """How one replica's controller is configured. Keys are the front's business."""
        return Settings(
            server=self.front.server,
            sleep=self.sleep,
            models=(self.model(name).of_replica(instance, port),),
        )


def parse(raw: Mapping[str, Any]) -> ClusterSettings:
    """Check a configuration. Raises `ClusterConfigError`, which names every key at fault."""
    try:
        return ClusterSettings.model_validate(dict(raw))
    except ValidationError as error:
        faults = "; ".join(
            f"{'.'.join(map(str, fault['loc'])) or 'configuration'}:"
            f" {fault['msg'].removeprefix('Value error, ')}"
            for fault in error.errors(include_url=False, include_input=False)
        )
        raise ClusterConfigError(f"the cluster's configuration is wrong: {faults}") from None
