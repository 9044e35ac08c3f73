"""One served model: its engines, its gate, its traffic, and how it sleeps and wakes.

The event loop owns it. It implements the effects of `gate.Gate`: slow work runs in tasks of this
object, which report to the gate when they end.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from kvelastic.controller.http.refusal import Refusal
from kvelastic.controller.models.engine_calls import KINDS, EngineCalls, Kind
from kvelastic.controller.models.gate import Gate, Rules, State, Ticket
from kvelastic.controller.models.model_memory import ModelMemory
from kvelastic.controller.models.swap_policy import Wait
from kvelastic.controller.models.traffic import Traffic
from kvelastic.controller.settings.settings import ModelSettings, SleepSettings
from kvelastic.errors import EngineCallError
from kvelastic.shared.segment_listing import found_name

if TYPE_CHECKING:
    from kvelastic.controller.launch.engine_process import EngineProcess
    from kvelastic.controller.models.swap import Swapper

_log = logging.getLogger("kvelastic.controller")

UNREACHABLE_REST_S = 1.0
"""An engine that refused a connection gets no request for this time, if there is another."""

_WAKE_FAILED: Final = Refusal(503, "wake_failed", "The model could not be woken.", 2.0)

EngineCall = Callable[[Kind, str, str | None, float], Awaitable[None]]
"""`EngineCalls.sleep` or `.wake`."""


class WithdrawnError(Exception):
    """No request or operator waits for the model's turn now."""


@dataclass(eq=False)
class Replica:
    """One engine."""

    address: str
    in_flight: int = 0
    resting_until_s: float = 0.0
    is_down: bool = False
    """The last look found that it does not serve. Requests are sent to it nevertheless."""


class ServedModel:
    """A model and its engines. Create it in the loop; `close` ends its tasks."""

    is_cut_off = False
    """True once its drain has ended and `cut_off` was called."""

    def __init__(
        self,
        settings: ModelSettings,
        sleep: SleepSettings,
        calls: EngineCalls,
        swapper: Swapper | None = None,
    ) -> None:
        """`swapper` None: the model may wake at any time."""
        self.settings = settings
        self.sleep_settings = sleep
        self.memory = ModelMemory(settings, sleep)
        self.replicas = [Replica(address) for address in settings.addresses]
        self.traffic = Traffic()
        self.gate = Gate(self, _rules(settings, sleep), last_activity_s=time.monotonic())
        self.last_request_at: float | None = None
        """Time of the last request, in seconds since 1970."""
        self.slept_at: float | None = None
        self.last_problem: str | None = None
        """Problem of the last sleep, wake or launch. `problems` adds the memory's."""
        self.wakes = self.sleeps = 0
        """Numbers of wakes and sleeps since the start."""
        self.prefill_fallbacks: Counter[str] = Counter()
        """By reason: requests whose prompts its prefill pool has not computed."""
        self.engine_pid: int | None = None
        """Pid of a running engine that this controller launched; it leads its session."""
        self.engine_key: str | None = None
        """API key of a running engine that this controller launched."""
        self.on_demand: EngineProcess | None = None
        """Set by the launching code if the engine starts on demand."""
        self.has_turn = True
        """False while it waits for its turn; true when it may take memory."""
        self.wait: Wait | None = None
        """Why it waits for its turn, while it does."""
        self.awake_since_s: float | None = None
        """When it last woke or started; None: it was found awake."""
        self.spares_until_s = 0.0
        """Until then it displaces no model in use, because it has just made room for others."""
        self.keep_alive_s: float | None = None
        """Idle time before sleep that the last request set instead of `ttl`; infinite: never."""
        self._swapper = swapper
        self._by_operator_until_s = 0.0
        """Until then an operator waits for its turn to wake."""
        self._calls = calls
        self._turn = 0
        self.serving: set[asyncio.Task[Any]] = set()
        """Tasks that forward engines' responses to clients; `cut_off` cancels them."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._reminder: asyncio.TimerHandle | None = None
        self._reminder_at_s = 0.0
        self._changed = asyncio.Event()
        self._are_engines_awake = False
        """The engines were found awake while the model sleeps: only its memory must wake."""
        self._memory_problem: str | None = None
        """The problem that the last check of an awake model's memory found."""
        self.gate.state = State.STARTING  # until its engines were looked at

    @property
    def name(self) -> str:
        """The model's name for clients."""
        return self.settings.name

    @property
    def instance(self) -> str | None:
        """The name of its instance in ledgers; the configuration may name kvcached's segment."""
        name = self.settings.instance
        return None if name is None else found_name(name)

    @property
    def api_key(self) -> str | None:
        """The bearer token that its engines require."""
        return self.engine_key or self.settings.api_key

    @property
    def state(self) -> State:
        """The gate's state, which other tasks change."""
        return self.gate.state

    @property
    def reported_state(self) -> State:
        """The state for operators: DOWN also while no engine of an awake model serves."""
        is_down = self.gate.state is State.AWAKE and all(r.is_down for r in self.replicas)
        return State.DOWN if is_down else self.gate.state

    @property
    def is_ready(self) -> bool:
        """True if it is awake, and one of its engines serves as far as is known."""
        now_s = time.monotonic()
        serves = any(not r.is_down and r.resting_until_s <= now_s for r in self.replicas)
        return serves and self.gate.state is State.AWAKE and not self.gate.yields

    @property
    def problems(self) -> str | None:
        """The problems that /models shows: of the last operation, and of its memory now."""
        return "; ".join(filter(None, (self.last_problem, self._memory_problem))) or None

    @property
    def kind(self) -> Kind:
        """How its engines are put to sleep."""
        return KINDS[self.settings.engine]

    @property
    def can_sleep(self) -> bool:
        """Whether it can be put to sleep, or stopped for that."""
        return self.kind.can_sleep or self.is_on_demand

    @property
    def may_sleep(self) -> bool:
        """True if the controller may put it to sleep now, without an operator."""
        is_idle = self.gate.state is State.AWAKE and self.gate.is_idle
        return is_idle and self.settings.may_sleep

    @property
    def idle_after_s(self) -> float | None:
        """Idle time after which it is put to sleep; None: never."""
        if self.keep_alive_s is not None:
            return None if math.isinf(self.keep_alive_s) else self.keep_alive_s
        if self.settings.ttl is None and self.sleep_settings.auto:
            return self.sleep_settings.idle_after
        return self.settings.ttl

    @property
    def priority(self) -> int:
        """The configured priority of its memory."""
        return self.settings.memory.priority or 0

    @property
    def is_wanted(self) -> bool:
        """Whether a request or an operator waits for its turn. Otherwise it displaces no model."""
        return self.gate.queued > 0 or time.monotonic() < self._by_operator_until_s

    @property
    def is_on_demand(self) -> bool:
        """Whether its engine is started by requests."""
        return self.settings.is_on_demand

    @property
    def idle_s(self) -> float:
        """Seconds since its last request arrived or ended; 0 while it has one."""
        return 0.0 if not self.gate.is_idle else time.monotonic() - self.gate.last_activity_s

    def change(self, settings: ModelSettings, sleep: SleepSettings) -> None:
        """Apply new settings; running requests are not affected."""
        old = {replica.address: replica for replica in self.replicas}
        self.replicas = [old.get(a) or Replica(a) for a in settings.addresses]
        self.settings, self.sleep_settings = settings, sleep
        self.memory.change(settings, sleep)
        self.gate.set_rules(_rules(settings, sleep))

    # ------------------------------------------------------------------------------ requests

    async def enter(self, ticket: Ticket) -> None:
        """Wait until the request may go to an engine. Raises `Refusal`. Always call `leave` after.

        Use `ticket.model` afterwards: a waiting request may have moved to another model.
        """
        ticket.model = self
        self.last_request_at = time.time()
        self.gate.arrive(ticket, time.monotonic())
        if ticket.refusal is None and ticket.state.value == "queued":
            ticket.waiter = asyncio.get_running_loop().create_future()
            await ticket.waiter
        if ticket.refusal is not None:
            # A new object: requests share a refusal, and a raised one keeps its traceback.
            raise replace(ticket.refusal)

    def leave(self, ticket: Ticket) -> None:
        """The request has ended, or its client has disconnected."""
        gate = self.gate
        gate.leave(ticket, time.monotonic())
        if self._swapper is not None and gate.in_flight == 0:
            self._withdraw_if_unwanted()
            self._swapper.poke()

    def take_over(self, old: ServedModel) -> None:
        """Move the requests that wait for `old` to this model, in order."""
        waiting = old.gate.take_waiting()
        for ticket in waiting:
            ticket.model = self
        if waiting:
            self.last_request_at = time.time()
        self.gate.adopt(waiting, time.monotonic())

    def pick(self, tried: set[str]) -> Replica | None:
        """Return the engine with the fewest requests; engines that refused connections last."""
        now_s = time.monotonic()
        best: Replica | None = None
        best_key: tuple[bool, int] | None = None
        count = len(self.replicas)
        self._turn += 1
        for offset in range(count):
            # Start at a different engine each time, or the first of equals would get every request.
            replica = self.replicas[(self._turn + offset) % count]
            key = (replica.resting_until_s > now_s, replica.in_flight)
            if replica.address not in tried and (best_key is None or key < best_key):
                best, best_key = replica, key
        return best

    def rest(self, replica: Replica) -> None:
        """The engine refused a connection."""
        replica.resting_until_s = time.monotonic() + UNREACHABLE_REST_S
        replica.is_down = True

    # ------------------------------------------------------------------- effects of the gate

    def admit(self, ticket: Ticket) -> None:
        """Resume the request."""
        if ticket.waiter is not None and not ticket.waiter.done():
            ticket.waiter.set_result(None)

    def refuse(self, ticket: Ticket) -> None:
        """Resume the request, which then raises its refusal."""
        self.admit(ticket)

    def wake(self) -> None:
        """Begin to wake or start the engines when it is the model's turn."""
        self._start(self._wake_in_turn())

    def sleep(self) -> None:
        """Begin to put the engines to sleep."""
        self._start(self._sleep())

    def remind(self, at_s: float) -> None:
        """Call the gate's tick then. There is one timer, the earliest; a tick requests the next."""
        if self._reminder is not None:
            if self._reminder_at_s <= at_s:
                return
            self._reminder.cancel()
        self._reminder_at_s = at_s
        # The timer may fire slightly early, but the rules compare exactly.
        wait_s = max(0.0, at_s - time.monotonic()) + 0.002
        self._reminder = asyncio.get_running_loop().call_later(wait_s, self._tick)

    def _tick(self) -> None:
        self._reminder = None
        now_s = time.monotonic()
        self.gate.tick(now_s)
        if now_s < self._by_operator_until_s:
            self.remind(self._by_operator_until_s)
        self._withdraw_if_unwanted()

    # ------------------------------------------------------------------------ sleep and wake

    async def settled(self) -> None:
        """Wait until the model neither falls asleep nor wakes."""
        while self.gate.state in {State.FALLING_ASLEEP, State.WAKING}:
            self._changed.clear()
            await self._changed.wait()

    def when_settled(self, do: Callable[[], None]) -> None:
        """Call `do` once the model neither falls asleep nor wakes."""

        async def wait() -> None:
            await self.settled()
            do()

        self._keep(asyncio.get_running_loop().create_task(wait()))

    def ask_wake(self, now_s: float) -> Refusal | None:
        """Begin to wake for an operator, who waits for the model's turn like a request."""
        refusal = self.gate.ask_wake(now_s)
        if refusal is None and self.gate.state is State.WAKING:
            self._by_operator_until_s = now_s + self.gate.rules.queue_timeout_s
            self.remind(self._by_operator_until_s)
        return refusal

    def keep_alive(self, seconds: float | None) -> None:
        """Make the model sleep after this idle time instead of `ttl`; 0: now, if it is idle.

        None restores the configured value. Ignored if the model is pinned, cannot sleep, or is not
        woken by requests: a client must not end its use by others.
        """
        if not self.gate.rules.wake_on_request:
            return
        self.keep_alive_s = seconds
        if seconds == 0 and self.settings.may_sleep:
            # A client requested it, so the next request does not wait for `min_sleep`.
            self.gate.ask_sleep(time.monotonic(), by_hand=True)

    def preload(self) -> None:
        """Wake the model if there is room, without a request and without displacing others."""
        self.gate.ask_wake(time.monotonic())

    def wake_if_room(self) -> None:
        """Wake the model if a request would, but only if there is room (`preload`)."""
        if self.gate.may_wake(time.monotonic()):
            self.preload()

    async def look_at_first(self) -> None:
        """Find the state of running engines; requests wait for it, up to 2 s."""
        await self.find_state()
        await self.look_at_engines()
        if self.gate.state is State.STARTING:
            self.gate.set_state(State.AWAKE, time.monotonic())
        await self.memory.request_as_configured()

    async def find_state(self) -> None:
        """Ask the engines whether they sleep, before or between requests.

        Discards the result if the gate's generation changed during the call.
        """
        gate = self.gate
        if self.on_demand is not None and not self.on_demand.is_running:
            return
        generation = gate.generation
        answers = await self._ask_whether_engines_sleep()
        if gate.generation != generation or gate.in_flight:
            return
        if gate.state not in {State.AWAKE, State.ASLEEP, State.STARTING}:
            return
        if gate.state is not State.ASLEEP and any(answers):
            self.slept_at = time.time()
            gate.set_state(State.ASLEEP, time.monotonic())
        elif gate.state is State.ASLEEP and answers and all(a is False for a in answers):
            # Another client has woken the engines, not the instance. The memory wakes in the
            # state WAKING, so nothing else changes the model's state during that.
            self._are_engines_awake = True
            gate.ask_wake(time.monotonic())

    async def _ask_whether_engines_sleep(self) -> list[bool | None]:
        """Return each engine's sleep state, or the instance's if the engine has no such call."""
        kind = self.kind
        if kind.is_sleeping is not None:
            return await asyncio.gather(
                *(
                    self._calls.is_sleeping(kind, r.address, self.api_key, 2.0)
                    for r in self.replicas
                )
            )
        return [await self.memory.engine_asleep()] if kind.can_sleep else []

    async def look_at_engines(self) -> None:
        """Find out which engines accept connections."""
        await asyncio.gather(*(self._look_at_port(replica) for replica in self.replicas))

    async def _look_at_port(self, replica: Replica) -> None:
        replica.is_down = not await self._calls.accepts_connections(replica.address)

    async def _look_at_health(self, replica: Replica) -> None:
        """Find out whether an engine still serves whose sleep or wake has failed."""
        status = await self._calls.health_status(
            replica.address, self.settings.health, self.api_key, 2.0
        )
        replica.is_down = status is not None and not 0 < status < 500

    async def look_at_memory(self) -> None:
        """Check the memory of an awake model, and log a new problem."""
        gate = self.gate
        generation = gate.generation
        problem = None
        if gate.state is State.AWAKE:
            problem = await self.memory.problem(self._is_an_engine_ready)
            if gate.generation != generation:
                return
        if problem is not None and problem != self._memory_problem:
            _log.warning("%s", problem, extra={"model": self.name})
        self._memory_problem = problem

    async def _is_an_engine_ready(self) -> bool:
        health = self.settings.health
        answers = await asyncio.gather(
            *(self._calls.is_healthy(r.address, health, self.api_key, 2.0) for r in self.replicas)
        )
        return any(answers)

    async def wake_memory(self) -> str | None:
        """Wake the memory of an awake model; return a problem if that fails."""
        problem = await self.memory.wake()
        if problem is None:
            await self.look_at_memory()
        return problem

    async def _sleep(self) -> None:
        problem = await self._go_to_sleep()
        await self._note("sleep", problem)
        if problem is None:
            self.sleeps += 1
            self.slept_at = time.time()
            self.keep_alive_s = None
        self.gate.slept(problem is None, time.monotonic())

    async def _go_to_sleep(self) -> str | None:
        """Put engines and memory to sleep, or stop the engine; on a problem undo it."""
        timeout_s = self.sleep_settings.sleep_timeout
        if self.on_demand is not None:
            await self.memory.sleep()  # tiers copy blocks while the engine runs
            await self.on_demand.stop_now()
            return None
        problem = _first_problem(await self._at_all(self._calls.sleep, timeout_s))
        if problem is None:
            problem = await self.memory.sleep()
        if problem is not None:
            # Wake failed engines too: after a timeout an engine may sleep nevertheless.
            await self._at_all(self._calls.wake, timeout_s)
        return problem

    async def _wake_in_turn(self) -> None:
        """Wait for memory, unless the engines have it already; then wake."""
        if self._swapper is not None and not self._are_engines_awake:
            is_start = self.on_demand is not None and not self.on_demand.is_running
            generation = self.gate.generation
            try:
                refusal = await self._swapper.take(self, is_start=is_start)
            except WithdrawnError:
                if self.gate.generation == generation:  # otherwise its engine has ended
                    self.gate.not_begun(None, time.monotonic())
                return
            finally:
                self._by_operator_until_s = 0.0
            if refusal is not None:
                self.last_problem = f"wake: {refusal.message}"
                self.gate.not_begun(refusal, time.monotonic())
                return
        self.has_turn = True
        await self._wake()

    async def _wake(self) -> None:
        are_engines_awake, self._are_engines_awake = self._are_engines_awake, False
        problem = await self._wake_up(are_engines_awake)
        await self._note("wake", problem)
        now_s = time.monotonic()
        if problem is None:
            self.wakes += not are_engines_awake
            self.slept_at = None
            self.awake_since_s = now_s
        self.gate.woken(None if problem is None else _WAKE_FAILED, now_s)

    async def _wake_up(self, are_engines_awake: bool) -> str | None:
        """Wake memory and engines, or start the engine; on a problem undo it."""
        timeout_s = self.sleep_settings.wake_timeout
        if self.on_demand is not None and not self.on_demand.is_running:
            return await self.on_demand.start_now()
        problem = await self.memory.wake()
        if problem is None and not are_engines_awake:
            problem = _first_problem(await self._at_all(self._calls.wake, timeout_s))
            if problem is not None:
                await self._at_all(self._calls.sleep, timeout_s)
                await self.memory.sleep()
        return problem

    def _withdraw_if_unwanted(self) -> None:
        """Withdraw if no request or operator waits for the model now."""
        gate = self.gate
        if self.wait is None or gate.state is not State.WAKING or self.is_wanted:
            return
        if self._swapper is not None:
            self._swapper.withdraw(self)

    async def _at_all(self, call: EngineCall, timeout_s: float) -> list[BaseException | None]:
        """Call every engine at once; return what each raised, in order."""
        key, kind = self.api_key, self.kind
        return await asyncio.gather(
            *(call(kind, replica.address, key, timeout_s) for replica in self.replicas),
            return_exceptions=True,
        )

    async def _note(self, verb: str, problem: str | None) -> None:
        self.last_problem = None if problem is None else f"{verb}: {problem}"
        if problem is None:
            for replica in self.replicas:
                replica.is_down = False
            _log.info("%s", verb, extra={"model": self.name})
        else:
            _log.warning("%s failed: %s", verb, problem, extra={"model": self.name})
            await asyncio.gather(*(self._look_at_health(replica) for replica in self.replicas))

    # --------------------------------------------------------------------------------- tasks

    def _start(self, work: Awaitable[None]) -> None:
        async def guarded() -> None:
            try:
                await work
            except Exception as error:
                _log.exception("a step of sleep or wake failed", extra={"model": self.name})
                now_s = time.monotonic()
                if self.gate.state is State.FALLING_ASLEEP:
                    self.last_problem = f"sleep: {error}"
                    self.gate.slept(False, now_s)
                elif self.gate.state is State.WAKING:
                    self.last_problem = f"wake: {error}"
                    self.gate.woken(_WAKE_FAILED, now_s)
            finally:
                self._changed.set()
                if self._swapper is not None:
                    self._swapper.poke()

        self._keep(asyncio.get_running_loop().create_task(guarded()))

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def cut_off(self) -> None:
        """Cancel running requests after the drain."""
        self.is_cut_off = True
        for task in self.serving:
            task.cancel()

    async def close(self, why: Refusal) -> None:
        """Refuse new and waiting requests with `why`; wait for a running sleep or wake."""
        self.gate.closing = why
        self.gate.refuse_all(why)
        if self._swapper is not None:
            self._swapper.withdraw(self)
        if self.on_demand is not None:
            self.on_demand.give_up()
        if self._tasks:
            await asyncio.wait(set(self._tasks))
        if self._reminder is not None:
            self._reminder.cancel()


def _rules(settings: ModelSettings, sleep: SleepSettings) -> Rules:
    limit, timeout_s = settings.queue_limit, settings.queue_timeout
    return Rules(
        queue_limit=sleep.queue_limit if limit is None else limit,
        queue_timeout_s=sleep.queue_timeout if timeout_s is None else timeout_s,
        wake_on_request=sleep.wake_on_request,
        min_sleep_s=sleep.min_sleep,
        max_in_flight=settings.max_in_flight,
    )


def _first_problem(results: list[BaseException | None]) -> str | None:
    for result in results:
        if isinstance(result, EngineCallError):
            return str(result)
        if isinstance(result, BaseException):
            raise result
    return None
