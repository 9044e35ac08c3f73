"""Executes `swap_policy`: which models wait for memory, and the actions that give it to them.

swapper = Swapper(app_state)
refusal = await swapper.take(model, is_start=False)      # in the model's own task

The event loop owns it. A thread reads the ledgers, only while a model waits. The models' state is
read in the same loop step as the decision, and their gates may still refuse.

A model's claim on a device is the first known value in this list:

    its instance in a ledger    its reserve and its guarantee; also while it sleeps
    its last known claim        of an engine that has been stopped
    the configuration           `memory.needs` and `memory.min`, on `memory.device`

A starting model counts for the larger of its expected claim and what its instance shows already. So
two starts never take the same memory.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvelastic.controller.http.refusal import Refusal
from kvelastic.controller.models import instance_memory
from kvelastic.controller.models.admission import Admission, Claim, Device, Model, Stand
from kvelastic.controller.models.gate import State
from kvelastic.controller.models.instance_memory import DeviceClaims
from kvelastic.controller.models.served_model import ServedModel, WithdrawnError
from kvelastic.controller.models.swap_policy import (
    SPARED_PART,
    Decision,
    Want,
    decide,
)
from kvelastic.controller.timeout import timeout
from kvelastic.errors import IntegrityError, is_out_of_descriptors

if TYPE_CHECKING:
    from kvelastic.controller.app_state import AppState

_log = logging.getLogger("kvelastic.controller")

LOOK_S = 1.0
"""Interval at which memory is read while a model waits: others use it too."""
_RETRY_AFTER_S = 5.0


@dataclass(eq=False)
class _Waiting:
    want: Want
    model: ServedModel
    turn: asyncio.Future[Refusal | None]


class Swapper:
    """Gives waiting models their turn: puts others to sleep, stops or starts them."""

    def __init__(self, app_state: AppState) -> None:
        """Raises `ConfigError` for an invalid `KVELASTIC_*` variable."""
        self._app_state = app_state
        self._group, self._host = instance_memory.own_host()
        self._waiting: dict[ServedModel, _Waiting] = {}
        self._last_claims: dict[str, dict[str, Claim]] = {}
        """By model: the last claims that its instance showed."""
        self._number = 0
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def take(self, model: ServedModel, *, is_start: bool) -> Refusal | None:
        """Wait for the model's turn; return a refusal if it never comes. Raises `WithdrawnError`.

        `model.has_turn` is then true: the model holds memory, or is about to. A model has one wait.
        """
        if model in self._waiting:
            raise IntegrityError(f"the model {model.name!r} waits for its turn already")
        model.has_turn = False
        self._number += 1
        want = Want(model.name, self._number, is_start=is_start)
        waiting = _Waiting(want, model, asyncio.get_running_loop().create_future())
        self._waiting[model] = waiting
        self._changed.set()
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run())
        try:
            refusal = await waiting.turn
        finally:
            self._waiting.pop(model, None)
            model.wait = None
            model.gate.waits_for = ""
        return refusal

    def withdraw(self, model: ServedModel) -> bool:
        """Cancel the model's wait for its turn. Returns False if it does not wait."""
        waiting = self._waiting.get(model)
        if waiting is None or waiting.turn.done():
            return False
        waiting.turn.set_exception(WithdrawnError())
        self._changed.set()  # models held back for it continue
        return True

    def poke(self) -> None:
        """Decide again if a model waits: something has changed."""
        if self._waiting:
            self._changed.set()

    async def stop(self) -> None:
        """Stop. All waiting models must have been withdrawn."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    def waits_for_room_of(self, model: ServedModel) -> dict[str, str]:
        """Return the models for which this model must make room, by name, with their reasons."""
        return {
            waiting.model.name: waiting.model.wait.why
            for waiting in self._waiting.values()
            if waiting.model.wait is not None and model.name in waiting.model.wait.leavers
        }

    # -------------------------------------------------------------------------------- inside

    async def _run(self) -> None:
        """Run while a model waits."""
        again_s = 0.0
        while self._waiting:
            with suppress(asyncio.TimeoutError):
                async with timeout(again_s or LOOK_S):
                    await self._changed.wait()
            self._changed.clear()
            generations = {m: m.gate.generation for m in self._app_state.fleet}
            try:
                devices = await asyncio.to_thread(instance_memory.claims)
                # A model that has just changed state claims something else than was read.
                same = {m for m, seen in generations.items() if m.gate.generation == seen}
                decision = self._decide(devices, same)
            except Exception as error:
                if is_out_of_descriptors(error):
                    self._app_state.files.note("looking whether there is memory for a model")
                else:
                    _log.exception("memory was not looked at; models wait for the next look")
                again_s = LOOK_S
                continue
            again_s = min(decision.look_again_in_s or LOOK_S, LOOK_S) + 0.002
            # Let the models whose turn it is proceed before the next look.
            await asyncio.sleep(0)
        for model in self._app_state.fleet:
            model.gate.set_yields(False)

    def _decide(
        self, devices: Mapping[str, DeviceClaims], same: Collection[ServedModel]
    ) -> Decision:
        """Look at all models now, and apply the decision.

        `same`: models whose state has not changed since the devices were read.
        """
        now_s = time.monotonic()
        settings = self._app_state.settings
        models = {model.name: model for model in self._app_state.fleet}
        models |= {waiting.model.name: waiting.model for waiting in self._waiting.values()}
        admission, claims = self._admission(devices, list(models.values()), same)
        planned = {
            name: planned_of(
                model,
                claims[name],
                _priority(model, devices),
                settings.group_of(name),
                settings.swap.min_awake,
                now_s,
            )
            for name, model in models.items()
        }
        wants = [
            replace(
                w.want,
                priority=w.model.gate.waiting_priority,
                # A permanent engine starts without a request.
                may_displace=w.model.is_wanted or (w.want.is_start and not w.model.is_on_demand),
                spares_s=max(0.0, w.model.spares_until_s - now_s),
            )
            for w in self._waiting.values()
            if not w.turn.done()
        ]
        decision = decide(admission, planned, wants, settings.swap.starts_at_once)
        self._apply(decision, models, now_s)
        return decision

    def _apply(self, decision: Decision, models: Mapping[str, ServedModel], now_s: float) -> None:
        for name in decision.go:
            models[name].has_turn = True
            self._waiting[models[name]].turn.set_result(None)
        for name, why in decision.refused.items():
            self._waiting[models[name]].turn.set_result(no_memory_refusal(name, why))
        for name, wait in decision.waits.items():
            model = models[name]
            if model.wait is None:
                _log.info("waits for memory: %s", wait.why, extra={"model": name})
            model.wait = wait
            model.gate.waits_for = wait.why
        for name in decision.sleep:
            if models[name].gate.ask_sleep(now_s, by_hand=False, for_others=True) is None:
                spared_s = SPARED_PART * self._app_state.settings.swap.min_awake
                models[name].spares_until_s = now_s + spared_s
                _log.info("falls asleep: others need its memory", extra={"model": name})
        for name, model in models.items():
            model.gate.set_yields(name in decision.yielding)

    def _admission(
        self,
        devices: Mapping[str, DeviceClaims],
        models: list[ServedModel],
        same: Collection[ServedModel],
    ) -> tuple[Admission, dict[str, dict[str, Claim]]]:
        """Return devices, groups, and each model's claims."""
        settings = self._app_state.settings
        # A sleeping model's instance with a claim was woken by another program: it counts.
        ours = {
            model.instance
            for model in models
            if model.gate.state is not State.ASLEEP or model not in same
        }
        sessions = {model.engine_pid for model in models if model.engine_pid is not None}
        by_name = {
            self._ledger_of("host"): Device(self._host.capacity_bytes, self._host.total_bytes),
            **{self._ledger_of(name): Device(size) for name, size in settings.devices.items()},
        }
        for ledger, device in devices.items():
            by_name[ledger] = Device(
                device.capacity_bytes,
                device.total_bytes,
                {
                    name: claim
                    for name, claim in device.counted.items()
                    if name not in ours and not _starts_for(name, sessions)
                },
            )
        groups = {group.name: group for group in settings.groups}
        claims = {model.name: self._claims_of(model, devices) for model in models}
        return Admission(by_name, groups), claims

    def _claims_of(
        self, model: ServedModel, devices: Mapping[str, DeviceClaims]
    ) -> dict[str, Claim]:
        instance = model.instance
        shown = {
            ledger: device.full[instance]
            for ledger, device in devices.items()
            if instance is not None and instance in device.full
        }
        is_settled = model.gate.state in {State.AWAKE, State.ASLEEP}
        if shown and is_settled:
            self._last_claims[model.name] = shown
        last = self._last_claims.get(model.name) or self._configured(model)
        if not shown or is_settled:
            return shown or last
        nothing = Claim()
        return {
            ledger: shown.get(ledger, nothing).larger(last.get(ledger, nothing))
            for ledger in {*shown, *last}
        }

    def _ledger_of(self, device: str) -> str:
        """Return the ledger of a configured device."""
        return f"{self._group}/{device}"

    def _configured(self, model: ServedModel) -> dict[str, Claim]:
        memory, devices = model.settings.memory, self._app_state.settings.devices
        claim = Claim(memory.needs or 0, memory.min or 0)
        if not claim.all_bytes:
            return {}
        device = memory.device or (next(iter(devices)) if len(devices) == 1 else "host")
        return {self._ledger_of(device): claim}


def planned_of(
    model: ServedModel,
    claims: Mapping[str, Claim],
    priority: int,
    group: str | None,
    min_awake_s: float,
    now_s: float,
) -> Model:
    """Return the model as `swap_policy` plans for it."""
    gate = model.gate
    stand = {
        State.AWAKE: Stand.THERE,
        State.FALLING_ASLEEP: Stand.GOING,
        State.ASLEEP: Stand.AWAY,
        State.WAKING: Stand.COMING if model.has_turn else Stand.AWAY,
        State.STARTING: Stand.COMING if model.has_turn else Stand.AWAY,
        State.DOWN: Stand.GOING if model.has_turn else Stand.AWAY,
    }[gate.state]
    since_s = now_s if stand is Stand.COMING else model.awake_since_s
    return Model(
        name=model.name,
        claims=claims,
        priority=priority,
        group=group,
        can_leave=model.settings.may_sleep,
        is_busy=stand is not Stand.THERE or not gate.may_make_room,
        idle_s=model.idle_s,
        stays_s=0.0 if since_s is None else max(0.0, since_s + min_awake_s - now_s),
        is_in_use=model.idle_s < min_awake_s,
        yields=gate.yields,
        stand=stand,
        is_starting=gate.state is State.STARTING or model.is_on_demand,
    )


def _priority(model: ServedModel, devices: Mapping[str, DeviceClaims]) -> int:
    """Return the instance's priority, which operators may change, or the configured one."""
    instance = model.instance or ""
    for device in devices.values():
        found = device.priorities.get(instance)
        if found is not None:
            return found
    return model.priority


def _starts_for(name: str, sessions: set[int]) -> bool:
    """Return True if the member is the start reserve of a worker of one of our engines."""
    _, _, pid = name.partition("starting_")
    try:
        return bool(pid) and os.getsid(int(pid)) in sessions
    except (OSError, ValueError):
        return False


def no_memory_refusal(name: str, why: str) -> Refusal:
    """Return a 503: the controller cannot make room in this situation."""
    return Refusal(
        503,
        "no_room",
        f"There is no room for the model {name!r}, and no idle model whose sleep would make it:"
        f" {why}.",
        retry_after_s=_RETRY_AFTER_S,
    )
