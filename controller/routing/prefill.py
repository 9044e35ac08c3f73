"""The first part of a request whose model has a prefill pool: that pool computes the prompt.

    client --> prefill.compute --- the request for one token, do_remote_decode --> prefill engine
                               <-- kv_transfer_params: the ticket of the held blocks -----
           --> at_an_engine ------ the request, with the ticket -----------------> decode engine

The pool is another model of the configuration, so it has a gate, a memory and traffic like any. A
request never waits for a pool to wake or start, and never fails because of it: the decode engine
then computes the prompt. If no decode engine runs, the pool serves the request alone.

The fields are those of vLLM's NIXL connector, which kvelastic's connector takes too. They are added
at the end of the body, where they replace earlier ones of their name.
"""

from __future__ import annotations

import asyncio
import re
import time
from typing import TYPE_CHECKING, Any, Final

import msgspec

from kvelastic.controller.http.refusal import Refusal
from kvelastic.controller.http.request_body import Body
from kvelastic.controller.models.gate import State, Ticket, TicketState
from kvelastic.controller.models.served_model import ServedModel
from kvelastic.controller.routing.engine_request import at_an_engine, check_name, request_to_engine

if TYPE_CHECKING:
    from kvelastic.controller.app_state import AppState


_COMPLETIONS: Final = "/v1/completions"
ONE_TOKEN: Final = {
    _COMPLETIONS: b'"max_tokens":1,"min_tokens":0,"n":1,"echo":false',
    "/v1/chat/completions": b'"max_tokens":1,"max_completion_tokens":1,"min_tokens":0,"n":1',
    "/v1/messages": b'"max_tokens":1',
}
"""The paths whose prompts a pool computes, with the fields that make their replies short."""
_AT_PREFILL: Final = (
    b',"stream":false,"stream_options":null,"prompt_logprobs":null,"return_token_ids":false,'
    b'"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false,'
    b'"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}'
)
_REPLY_BYTES: Final = 4 << 20
"""Maximum of a prefill engine's reply. Other connectors' tickets list every block."""
_NOT_BEGUN: Final = frozenset(
    ("engine_unreachable", "model_asleep", "model_down", "no_room", "wake_failed")
)
"""Codes of refusals by a model that has no engine now. Nothing was sent to one."""
_SEVERAL: Final = re.compile(rb'\[\s*["\[]')
"""The start of a list of prompts. A list of numbers is one prompt."""


class _Prompt(msgspec.Struct):
    prompt: msgspec.Raw = msgspec.Raw(b"null")


class _Reply(msgspec.Struct):
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")


_prompt_of: Final = msgspec.json.Decoder(_Prompt).decode
_reply_of: Final = msgspec.json.Decoder(_Reply).decode


class _Fallback(Exception):  # noqa: N818 - a decision, not an error
    """The decode engine computes the prompt, for this reason."""


class Prefill:
    """Sends prompts to prefill pools. Use it in the event loop."""

    def __init__(self, app_state: AppState) -> None:
        self._app_state = app_state

    async def compute(
        self, scope: Any, request_id: str, model: ServedModel, body: Body, priority: int
    ) -> dict[str, Any]:
        """Let the model's pool compute the prompt, and put its ticket into the body.

        Without a ticket it puts null there and counts the reason. Returns fields for the log.
        Raises `Refusal` (503) if the fields exceed the budget for bodies.
        """
        began_s = time.monotonic()
        ticket, reason = b"null", ""
        try:
            ticket = await self._ticket(scope, request_id, model, body, priority)
        except _Fallback as fallback:
            reason = str(fallback)
        except Refusal as refusal:
            reason = refusal.code
        body.add_fields(b'"kv_transfer_params":' + ticket)
        return _noted(model, reason, time.monotonic() - began_s)

    def pool_of(self, model: ServedModel) -> ServedModel | None:
        """Return the model's prefill pool, or None."""
        name = model.settings.prefill
        return None if name is None else self._app_state.fleet.find(name)

    def instead_of(self, model: ServedModel, refusal: Refusal) -> ServedModel | None:
        """Return the pool if it can serve a request alone that the model has refused, or None."""
        pool = self.pool_of(model) if refusal.code in _NOT_BEGUN else None
        return pool if pool is not None and pool.is_ready else None

    def leave_all_to(
        self, pool: ServedModel, model: ServedModel, body: Body, reason: str
    ) -> dict[str, Any]:
        """Prepare the body for the pool alone, and count the reason.

        Returns fields for the log. Raises `Refusal` (503) like `compute`.
        """
        body.add_fields(b'"kv_transfer_params":null' + _renamed(model, pool))
        return _noted(model, reason, 0.0)

    async def _ticket(
        self, scope: Any, request_id: str, model: ServedModel, body: Body, priority: int
    ) -> bytes:
        """Return the ticket as JSON. Raises `_Fallback` and `Refusal`."""
        pool = self.pool_of(model)
        if pool is None:
            raise _Fallback("no_pool")
        if model.reported_state is State.DOWN:
            raise _Fallback("")  # no engine would read the blocks; `leave_all_to` counts
        data = body.in_memory if scope["path"] == _COMPLETIONS else None
        if data is not None and _SEVERAL.match(memoryview(_prompt_of(data).prompt)):
            raise _Fallback("several_prompts")  # vLLM returns the ticket of one
        pool.wake_if_room()
        if not pool.is_ready:
            state = pool.reported_state
            raise _Fallback("paused" if state is State.AWAKE else state.value)
        body.add_fields(ONE_TOKEN[scope["path"]] + _AT_PREFILL + _renamed(model, pool))
        ticket = Ticket(priority=priority, needs_awake=True)
        written = pool.settings.upstream_name
        began_s = time.monotonic()
        is_computed = is_cancelled = False
        try:
            await pool.enter(ticket)
            check_name(written, ticket.model)
            found = await self._ask(scope, request_id, ticket.model, body)
            is_computed = True
            return found
        except asyncio.CancelledError:
            is_cancelled = True
            raise
        finally:
            now_s = time.monotonic()
            pool.traffic.end(
                now_s,
                total_s=now_s - began_s,
                first_s=now_s - began_s if is_computed else None,
                ok=is_computed,
                cancelled=is_cancelled,
                refused=ticket.refusal is not None,
            )
            if ticket.state is not TicketState.OUT:
                ticket.model.leave(ticket)

    async def _ask(self, scope: Any, request_id: str, pool: ServedModel, body: Body) -> bytes:
        headers, target = request_to_engine(scope, request_id, self._app_state.keys, pool)
        reply = bytearray()
        async with at_an_engine(
            self._app_state, pool, "POST", target, headers, body, keeps_body=True
        ) as response:
            async for piece in response.content.iter_any():
                reply += piece
                if len(reply) > _REPLY_BYTES:
                    raise _Fallback("bad_reply")
        if response.status != 200:
            raise _Fallback(f"status_{response.status}")
        try:
            ticket = bytes(_reply_of(reply).kv_transfer_params)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise _Fallback("bad_reply") from None
        if not ticket.startswith(b"{"):
            raise _Fallback("no_ticket")
        return ticket


def _renamed(model: ServedModel, pool: ServedModel) -> bytes:
    """Return the field with the engines' name of the pool, if it differs from the model's."""
    name = pool.settings.upstream_name
    if name == model.settings.upstream_name:
        return b""
    return b',"model":' + msgspec.json.encode(name)


def _noted(model: ServedModel, reason: str, took_s: float) -> dict[str, Any]:
    """Count a fallback, if there is a reason, and return the fields for the log."""
    if reason:
        model.prefill_fallbacks[reason] += 1
    return {"prefill_ms": round(took_s * 1e3, 2), "prefill_fallback": reason}
