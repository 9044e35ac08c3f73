"""The thread that runs the task engine: it runs the clients' requests in order of arrival.

A client finds only tasks of its own data-parallel id. The reply to a wait is sent when its tasks
have ended, so a wait blocks no other request. When a client disconnects, its tasks are cancelled
and forgotten.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, Final, NamedTuple

from kvelastic.errors import ChannelError, InvalidArgumentError, KvelasticError, MessageError
from kvelastic.flexkv.common.request import KVResponse, KVResponseStatus
from kvelastic.flexkv.kvtask import KVTaskEngine
from kvelastic.flexkv.server import request as messages
from kvelastic.messages import Request

_log = logging.getLogger("kvelastic.flexkv")
_LOOK_S: Final = 0.25
"""Maximum sleep while a request waits; the end of a task ends it earlier."""
MOST_TASKS_OF_A_CLIENT: Final = 1 << 14


class _Waiting(NamedTuple):
    """A request whose reply waits for the end of tasks."""

    request: Request
    dp_client_id: int
    asked: messages.Wait
    deadline_s: float


class EngineThread:
    """Runs the engine's calls. Any thread may call; only `stop` and `ask` block."""

    def __init__(self, engine: KVTaskEngine) -> None:
        """`engine` is started."""
        self._engine = engine
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._waiting: list[_Waiting] = []
        engine.transfer_engine.on_event = self._wake
        self._thread = threading.Thread(target=self._run, name="flexkv-engine", daemon=True)
        self._thread.start()

    def carry_out(self, request: Request, dp_client_id: int) -> None:
        """Queue a client's request; the thread runs it and replies."""
        self._calls.put(lambda: self._answer(request, dp_client_id))

    def give_back(self, dp_client_id: int) -> None:
        """Cancel the tasks of a client that disconnected."""
        self._calls.put(lambda: self._engine.forget_client(dp_client_id))

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
        self._thread.join()

    def _wake(self) -> None:
        """Look at the waiting requests again. Called at the end of each operation."""
        if self._waiting:
            self._calls.put(_nothing)

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
                self._safely(self._look_at_waiting)

    def _patience_s(self) -> float | None:
        """Return the seconds until the waiting requests are looked at again."""
        if not self._waiting:
            return None
        first_s = min(one.deadline_s for one in self._waiting)
        return min(max(0.0, first_s - time.monotonic()), _LOOK_S)

    def _safely(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception:
            _log.exception("the server goes on after a fault")

    def _answer(self, request: Request, dp_client_id: int) -> None:
        try:
            answer = self._carry_out(request, dp_client_id)
        except Exception as error:
            if not isinstance(error, KvelasticError):
                _log.exception("a %s was not carried out", type(request.message).__name__)
            request.refuse(error)
        else:
            if answer is not None:
                request.answer(answer)

    def _carry_out(self, request: Request, dp_client_id: int) -> Any:
        """Run a call and return the reply; None if the reply is sent later."""
        call: Any = request.message
        if isinstance(call, messages.Wait):
            deadline_s = time.monotonic() + (call.timeout_s or 0.0)
            self._waiting.append(_Waiting(request, dp_client_id, call, deadline_s))
            return None
        if isinstance(call, messages.Unregister):
            self._engine.forget_client(dp_client_id)
            return messages.Done()
        if isinstance(call, (messages.Match, messages.Prefetch)):
            self._refuse_too_many(dp_client_id)
        elif isinstance(call, messages.Launch):
            own = self._own(call.task_ids, dp_client_id)
            foreign = [one for one in call.task_ids if one not in own]
            if foreign:
                raise InvalidArgumentError(f"tasks {foreign[:8]} are none of this client's")
        elif isinstance(call, messages.Cancel):
            call = messages.Cancel(self._own(call.task_ids, dp_client_id))
        elif not isinstance(call, messages.Reset):
            raise MessageError(f"a server takes no {type(call).__name__}")
        reply = self._engine.ask(call, dp_client_id)
        if isinstance(call, messages.Match) and call.slots is not None:
            return messages.Matched(reply.task_id, 0, 0, 0)  # the mask comes with the response
        return reply

    def _own(self, task_ids: list[int], dp_client_id: int) -> list[int]:
        """Return the client's own tasks among `task_ids`, without duplicates."""
        ids = dict.fromkeys(task_ids)
        return [one for one in ids if self._engine.client_of(one) == dp_client_id]

    def _refuse_too_many(self, dp_client_id: int) -> None:
        """Raise `InvalidArgumentError` if too many of a client's tasks are open."""
        if self._engine.open_tasks < MOST_TASKS_OF_A_CLIENT:
            return
        count = self._engine.open_tasks_of(dp_client_id)
        if count >= MOST_TASKS_OF_A_CLIENT:
            raise InvalidArgumentError(
                f"{count} tasks of this client are open; wait for them or cancel them"
            )

    def _look_at_waiting(self) -> None:
        self._waiting = [one for one in self._waiting if not self._is_answered(one)]

    def _is_answered(self, one: _Waiting) -> bool:
        if not one.request.connection.is_open:
            return True
        try:
            responses = self._responses(one)
        except Exception as error:
            one.request.refuse(error)
            return True
        if responses is None:
            return False
        try:
            one.request.answer(messages.Responses(list(responses.values())))
        except ChannelError as error:
            _log.warning("an answer was not sent: %s", error)
        return True

    def _responses(self, one: _Waiting) -> dict[int, KVResponse] | None:
        """Return the reply; None if tasks still run before the deadline."""
        own = self._own(one.asked.task_ids, one.dp_client_id)
        found = self._engine.try_wait(own, one.asked.completely)
        late = [task_id for task_id in own if task_id not in found]
        if one.asked.timeout_s is not None and late:
            if time.monotonic() < one.deadline_s:
                return None
            found |= {task_id: KVResponse(KVResponseStatus.TIMEOUT, task_id) for task_id in late}
        missing = set(one.asked.task_ids).difference(own)
        return found | {one: KVResponse(KVResponseStatus.NOTFOUND, one) for one in missing}


def _nothing() -> None:
    """Do nothing. Queued to wake the thread, so that it checks the waiting requests."""
