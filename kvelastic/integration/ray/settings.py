"""The configuration of a Serve application: one frozen value, validated before anything starts.

Durations are in seconds and sizes in bytes. Both may be written as in the controller's file ("2m",
"512M").
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from kvelastic.controller.settings.settings import (
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
from kvelastic.controller.settings.validation_faults import faults_of
from kvelastic.errors import ClusterConfigError
from kvelastic.integration.ray import engine_logs
from kvelastic.integration.ray.autoscaling import Rules
from kvelastic.units import MIB_BYTES

RESOURCE: Final = "kvelastic_mib"
"""Name of a Ray resource, in MiB. A node has its ledgers' capacity; a replica takes its guarantee
and `reserved`."""
LAUNCHER: Final = "kvelastic.integration.ray.launcher"


def resource_mib(needed_bytes: int) -> int:
    """Return the amount of `RESOURCE` that covers `needed_bytes`."""
    return -(-needed_bytes // MIB_BYTES)


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class AutoscaleSettings(_Section):
    """When replicas start and end between `replicas` and `most_replicas` (`autoscaling`)."""

    most_replicas: Annotated[int, Field(ge=1, le=1000)]
    requests: Annotated[float, Field(gt=0)] = 32.0
    """Number of running and waiting requests at which a replica is full."""
    memory_after: DurationAboveZero = 2.0
    """Time of waiting for memory after which a replica is full."""
    start_after: Duration = 10.0
    """How long more replicas must be needed before one starts."""
    end_after: Duration = 600.0
    """How long fewer replicas must be needed before one ends."""
    drain: Duration = 120.0
    """Time for the requests of a replica that ends."""

    @property
    def rules(self) -> Rules:
        """Return what router and policy have in common."""
        return Rules(self.requests, self.memory_after)


class ClusterModel(_Section):
    """One model, served by replicas with one engine each."""

    name: str = Field(min_length=1, max_length=256)
    """The value that clients send as "model"."""
    engine: Literal["vllm", "sglang"] = "vllm"
    command: tuple[str, ...] = Field(min_length=1)
    """The engine's server. `{port}` is replaced by its port; it must listen on 127.0.0.1."""
    env: dict[str, str] = Field(default_factory=dict)
    """The engine's variables in addition to the replica's, such as KVELASTIC_HOST_MEMORY."""
    cwd: str | None = None
    served_name: str | None = None
    """The engine's name of the model, if it differs from `name`."""
    guarantee: Size = 0
    """Guarantee of each replica: its `KVELASTIC_MIN`, and part of its `kvelastic_mib`."""
    reserved: Size = 0
    """Memory of a replica besides its KV cache (weights), taken from the node's `kvelastic_mib`."""
    limit: Size | None = None
    priority: Priority | None = None
    replicas: Annotated[int, Field(ge=1, le=1000)] = 1
    """Number of replicas; with `autoscale`, the minimum."""
    autoscale: AutoscaleSettings | None = None
    replicas_per_node: Annotated[int, Field(ge=1, le=1000)] | None = None
    """Maximum number of replicas per node; None: as many as fit."""
    num_cpus: Annotated[float, Field(ge=0)] = 1.0
    num_gpus: Annotated[float, Field(ge=0)] = 0.0
    """A fraction of a GPU (0.1) lets several replicas share one; its ledger divides the memory."""
    resources: dict[str, float] = Field(default_factory=dict)
    """Further Ray resources, to select nodes."""
    most_requests: Annotated[int, Field(ge=1)] = 256
    """Maximum number of requests at one replica; further requests wait."""
    ttl: Duration | None = None
    """Idle time after which a replica sleeps; None: `sleep` decides."""
    pin: bool = False
    """Replicas are never put to sleep automatically."""
    ready_timeout: DurationAboveZero = 600.0
    stop_timeout: Duration = 15.0
    health: str = "/health"

    @model_validator(mode="after")
    def _may_scale(self) -> ClusterModel:
        most = self.replicas if self.autoscale is None else self.autoscale.most_replicas
        if most < self.replicas:
            raise ValueError(
                f"autoscale.most_replicas is {most}, and replicas, the minimum, is {self.replicas};"
                " raise the former or lower the latter"
            )
        return self

    @property
    def placed_mib(self) -> int:
        """Return the amount of `kvelastic_mib` that a replica takes from its node."""
        return resource_mib(self.guarantee + self.reserved)

    def of_replica(self, instance: str, port: int) -> ModelSettings:
        """Return the model's settings for the controller in this process's replica."""
        return ModelSettings(
            name=self.name,
            engine=self.engine,
            launch=LaunchSettings(
                command=(sys.executable, "-m", LAUNCHER, str(os.getpid()), *self.command),
                port=port,
                env={"KVELASTIC_MIN": str(self.guarantee), **self.env},
                cwd=self.cwd,
                log_file=str(engine_logs.path_of(instance)),
                ready_timeout=self.ready_timeout,
                stop_timeout=self.stop_timeout,
                restart=False,  # Ray starts another replica instead
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
    """The deployment that receives clients' requests."""

    replicas: Annotated[int, Field(ge=1, le=1000)] = 1
    replicas_per_node: Annotated[int, Field(ge=1)] | None = None
    num_cpus: Annotated[float, Field(ge=0)] = 0.1
    resources: dict[str, float] = Field(default_factory=dict)
    """Ray resources, to select nodes."""
    max_body: SizeAboveZero = 64 << 20
    allowed_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    """Further Host names, beside localhost, accepted in requests without a key."""
    retry_for: Duration = 120.0
    """How long a request is retried until a replica has started to respond."""

    @property
    def server(self) -> ServerSettings:
        """Return these settings as the controller's `ServerSettings`."""
        return ServerSettings(
            max_body=self.max_body,
            allowed_origins=self.allowed_origins,
            allowed_hosts=self.allowed_hosts,
            log_requests=False,
        )


class HealthSettings(_Section):
    """Health checks. Ray considers a replica dead after three consecutive failed checks.

    Each front also checks replicas once a period and abandons a silent one after two timeouts.
    """

    period: DurationAboveZero = 0.5
    timeout: DurationAboveZero = 1.0
    """Timeout of one check. A working replica responds immediately, even if its engine is busy."""

    @property
    def silence(self) -> float:
        """Return after how long without a response the front gives a replica up.

        The front looks once a period, so it gives the replica up at most two timeouts after its
        last response.
        """
        return max(self.timeout, 2 * self.timeout - self.period)


class ClusterSettings(_Section):
    """The whole configuration of a Serve application."""

    models: tuple[ClusterModel, ...] = Field(min_length=1)
    sleep: SleepSettings = Field(default_factory=SleepSettings)
    auth: AuthSettings = AuthSettings()
    front: FrontSettings = FrontSettings()
    health: HealthSettings = HealthSettings()
    report_every: DurationAboveZero = 0.5
    """Interval at which replicas report room and sleep to routers."""

    @model_validator(mode="after")
    def _names_differ(self) -> ClusterSettings:
        names = [model.name for model in self.models]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two models are named {name!r}; give each another name")
        return self

    def model(self, name: str) -> ClusterModel:
        """Return the model with this name. Raises `StopIteration` for an unknown name."""
        return next(model for model in self.models if model.name == name)

    def of_replica(self, name: str, instance: str, port: int) -> Settings:
        """Return the configuration of one replica's controller. Only the front checks keys."""
        return Settings(
            server=self.front.server,
            sleep=self.sleep,
            models=(self.model(name).of_replica(instance, port),),
        )


def parse(raw: Mapping[str, Any]) -> ClusterSettings:
    """Return the settings of a configuration.

    Raises `ClusterConfigError`, which names every invalid key.
    """
    try:
        return ClusterSettings.model_validate(dict(raw))
    except ValidationError as error:
        faults = "; ".join(faults_of(error, ClusterSettings))
        raise ClusterConfigError(f"the cluster's configuration is wrong: {faults}") from None
