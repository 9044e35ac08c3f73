"""The thread that runs the task engine: it runs the clients' requests in order of arrival.

A task belongs to the client that started it; other clients cannot find it. The reply to a wait is
sent when its tasks have ended, so a wait blocks no other request. When a client disconnects, its
tasks are cancelled.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, Final, NamedTuple

from kvelastic.errors import ChannelError, InvalidArgumentError, KvelasticError, MessageError
from kvelastic.flexkv.common.request import KVResponse, KVResponseStatus
from kvelastic.flexkv.kvtask import KVTaskEngine
from kvelastic.flexkv.server import request as messages
from kvelastic.messages import Message, Request

_log = logging.getLogger("kvelastic.flexkv")
_LOOK_S: Final = 0.25
"""Maximum sleep of the watcher; the end of a task wakes it earlier."""
MOST_TASKS_OF_A_CLIENT: Final = 1 << 14
_OVER: Final = frozenset(
    {
        KVResponseStatus.SUCCESS,
        KVResponseStatus.FAILED,
        KVResponseStatus.CANCELLED,
        KVResponseStatus.NOTFOUND,
    }
)


class Tasks:
    """The tasks of one client. Used only in the engine's thread."""

    def __init__(self, dp_client_id: int) -> None:
        self.dp_client_id: Final = dp_client_id
        self.is_over: dict[int, bool] = {}
        """For each task, oldest first: whether the client has received its end."""
        self.members: dict[int, list[int]] = {}
        """Tasks in each batch."""
        self.is_gone = False

    def end(self, task_ids: Iterable[int]) -> None:
        """Record that the client has received the end of tasks."""
        for task_id in task_ids:
            for one in (task_id, *self.members.get(task_id, ())):
                if one in self.is_over:
                    self.is_over[one] = True

    @property
    def open(self) -> list[int]:
        """Return the tasks whose end the client has not received."""
        return [task_id for task_id, is_over in self.is_over.items() if not is_over]

    def forget_ended(self) -> None:
        """Forget the tasks whose end the client has received."""
        self.is_over = dict.fromkeys(self.open, False)
        self.members = {one: ids for one, ids in self.members.items() if one in self.is_over}

    def own(self, task_ids: Iterable[int]) -> list[int]:
        """Return the client's own tasks among `task_ids`, without duplicates."""
        return [one for one in dict.fromkeys(task_ids) if one in self.is_over]


class _Waiting(NamedTuple):
    """A request whose reply waits for the end of tasks."""

    request: Request
    tasks: Tasks
    asked: messages.Wait
    deadline_s: float


class EngineThread:
    """Runs the engine's calls. Any thread may call; only `stop` and `ask` block."""

    def __init__(self, engine: KVTaskEngine) -> None:
        self._engine = engine
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._waiting: list[_Waiting] = []
        self._seen = 0
        self._waits = threading.Event()
        self._is_stopping = False
        self._threads = [
            threading.Thread(target=run, name=name, daemon=True)
            for run, name in ((self._run, "flexkv-engine"), (self._watch, "flexkv-watch"))
        ]
        for thread in self._threads:
            thread.start()

    def carry_out(self, request: Request, tasks: Tasks, message: Message) -> None:
        """Queue a client's request; the thread runs it and replies."""
        self._calls.put(lambda: self._answer(request, tasks, message))

    def give_back(self, tasks: Tasks) -> None:
        """Cancel the tasks of a client that disconnected."""
        self._calls.put(lambda: self._give_back(tasks))

    def ask(self, question: Callable[[], object], timeout_s: float = 30.0) -> Any:
        """Call a function in the thread; return its result or raise its error. Blocks."""
        found: Future[Any] = Future()

        def call() -> None:
            try:
                found.set_result(question())
            except BaseException as error:
                found.set_exception(error)

        self._calls.put(call)
        return found.result(timeout_s)

    def stop(self) -> None:
        """Run the requests queued so far, then end the thread. Blocks. Idempotent."""
        self._calls.put(None)
        self._threads[0].join()
        self._is_stopping = True
        self._waits.set()
        self._threads[1].join()

    # --- its thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            try:
                call = self._calls.get(timeout=self._patience_s())
            except Empty:
                call = _nothing
            if call is None:
                return
            self._safely(call)
            if self._waiting:
                self._seen = self._engine.transfer_engine.events
                self._safely(self._look_at_waiting)
                if self._waiting:
                    self._waits.set()

    def _patience_s(self) -> float | None:
        """Return the seconds until the first deadline of a waiting request."""
        if not self._waiting:
            return None
        return max(0.0, min(one.deadline_s for one in self._waiting) - time.monotonic())

    def _watch(self) -> None:
        """Wake the engine's thread when a task ends during a wait. Runs in a separate thread."""
        while not self._is_stopping:
            self._waits.wait()
            self._waits.clear()
            if self._is_stopping:
                return
            self._engine.transfer_engine.wait_for_event(self._seen, _LOOK_S)
            self._calls.put(_nothing)

    def _safely(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception:
            _log.exception("the server goes on after a fault")

    def _answer(self, request: Request, tasks: Tasks, message: Message) -> None:
        if tasks.is_gone:
            return
        try:
            answer = self._carry_out(request, tasks, message)
        except Exception as error:
            if not isinstance(error, KvelasticError):
                _log.exception("a %s was not carried out", type(message).__name__)
            request.refuse(error)
        else:
            if answer is not None:
                request.answer(answer)

    def _carry_out(self, request: Request, tasks: Tasks, call: Message) -> Any:
        """Run a call and return the reply; None if the reply is sent later."""
        if isinstance(call, messages.Wait):
            deadline_s = time.monotonic() + (call.timeout_s or 0.0)
            self._waiting.append(_Waiting(request, tasks, call, deadline_s))
            return None
        if isinstance(call, messages.Unregister):
            self._give_back(tasks)
            return messages.Done()
        own: list[int] = []
        if isinstance(call, (messages.Match, messages.Prefetch)):
            self._make_room(tasks)
        elif isinstance(call, messages.Launch):
            foreign = [one for one in call.task_ids if one not in tasks.is_over]
            if foreign:
                raise InvalidArgumentError(f"tasks {foreign[:8]} are none of this client's")
        elif isinstance(call, messages.Cancel):
            own = tasks.own(call.task_ids)
            call = messages.Cancel(own)
        elif not isinstance(call, messages.Reset):
            raise MessageError(f"a server takes no {type(call).__name__}")
        reply: Any = self._engine.ask(call, tasks.dp_client_id)
        if isinstance(call, messages.Match):
            tasks.is_over[reply.task_id] = False
            if call.slots is not None:  # the mask comes with the response
                reply = messages.Matched(reply.task_id, 0, 0, 0)
        elif isinstance(call, messages.Prefetch):
            tasks.is_over[reply.task_ids[0]] = False
        elif isinstance(call, messages.Launch) and call.as_batch:
            tasks.is_over[reply.task_ids[0]] = False
            tasks.members[reply.task_ids[0]] = list(call.task_ids)
        tasks.end(own)
        return reply

    def _make_room(self, tasks: Tasks) -> None:
        """Raise `InvalidArgumentError` if too many of a client's tasks are open."""
        if len(tasks.is_over) < MOST_TASKS_OF_A_CLIENT:
            return
        # Forget tasks that have ended although the client never waited for them.
        found = self._engine.try_wait(tasks.open, completely=True)
        tasks.end(task_id for task_id, answer in found.items() if answer.status in _OVER)
        tasks.forget_ended()
        if len(tasks.is_over) >= MOST_TASKS_OF_A_CLIENT:
            raise InvalidArgumentError(
                f"{len(tasks.is_over)} tasks of this client are open; wait for them or cancel them"
            )

    def _give_back(self, tasks: Tasks) -> None:
        self._engine.cancel(tasks.open)
        tasks.is_over.clear()
        tasks.is_gone = True

    def _look_at_waiting(self) -> None:
        still = []
        for one in self._waiting:
            if one.tasks.is_gone:
                continue
            try:
                responses = self._responses(one)
            except Exception as error:
                one.request.refuse(error)
                continue
            if responses is None:
                still.append(one)
                continue
            over = [task_id for task_id, found in responses.items() if found.status in _OVER]
            answer = messages.Responses(
                responses=[messages.response_message(*item) for item in responses.items()]
            )
            try:
                one.request.answer(answer)
            except ChannelError as error:
                _log.warning("an answer was not sent: %s", error)
            one.tasks.end(over)
        self._waiting = still

    def _responses(self, one: _Waiting) -> dict[int, KVResponse] | None:
        """Return the reply; None if tasks still run before the deadline."""
        own = one.tasks.own(one.asked.task_ids)
        missing = {
            task_id: KVResponse(KVResponseStatus.NOTFOUND, task_id)
            for task_id in one.asked.task_ids
            if task_id not in one.tasks.is_over
        }
        found = self._engine.try_wait(own, one.asked.completely)
        if one.asked.timeout_s is not None and len(found) < len(own):
            if time.monotonic() < one.deadline_s:
                return None
            late = [task_id for task_id in own if task_id not in found]
            found |= {task_id: KVResponse(KVResponseStatus.TIMEOUT, task_id) for task_id in late}
        return {**found, **missing}


def _nothing() -> None:
    """Do nothing. Queued to wake the thread, so that it checks the waiting requests."""
