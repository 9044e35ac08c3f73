"""Translates an engine's response from OpenAI's API to Ollama's. Pure, except for `Stream`'s state.

stream = Stream(Call.CHAT, "m")           # for server-sent events, in pieces
lines = stream.feed(piece, created_at)    # the complete lines so far, one JSON object each
lines = stream.end(times, created_at)

whole(Call.CHAT, "m", body, times, created_at)      # a response that is not streamed
error_text(502, body)                               # the error message for Ollama's clients

data: {"choices":[{"delta":{"content":"He"}}]}   {"message":{"content":"He"},"done":false}
data: {"choices":[{"finish_reason":"stop"}]}     (kept: tool calls, the reason, and the usage
data: {"choices":[],"usage":{...}}                are all in the last line)
data: [DONE]                                     {"message":{"content":""},"done":true, ...}
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import msgspec

from kvelastic.controller.routing.ollama_request import Call

EVENT_BYTES: Final = 1 << 20
"""Maximum size of one event of a stream, and of all arguments of its tool calls together."""
_SMALL_BYTES: Final = 64 << 10
_MOST_IN_EVENT: Final = 20_000
_MOST_VALUES: Final = 1_000_000
"""Maximum number of objects and lists in a response. Each takes far more memory than its text."""
_NOTHING: Final = frozenset((b"null", b"[]"))
_SHOWN_CHARACTERS: Final = 2000


class BadAnswerError(Exception):
    """The engine's response is not valid in OpenAI's API; the message names the fault."""


@dataclass(frozen=True)
class Times:
    """The times of one request, in seconds of one clock."""

    began_s: float
    answered_s: float
    """The engine's response began. The time before it includes the gate and the wake-up."""
    first_s: float
    """The first body bytes of the response arrived."""
    ended_s: float


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _ToolCall(msgspec.Struct):
    index: int | None = None
    function: _Function | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_ToolCall] | None = None


class _Logprobs(msgspec.Struct):
    content: msgspec.Raw = msgspec.Raw(b"null")
    """Passed on unparsed."""


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    message: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Embedding(msgspec.Struct):
    embedding: msgspec.Raw
    """Passed on unparsed: its numbers are not converted."""
    index: int = 0


class _Answer(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: msgspec.Raw = msgspec.Raw(b"null")


class _Embeddings(msgspec.Struct):
    data: list[_Embedding]
    usage: _Usage | None = None


class Stream:
    """Translates a stream of server-sent events to lines of JSON."""

    def __init__(self, call: Call, model: str) -> None:
        self._call = call
        self._model = model
        self._rest = bytearray()
        """The start of an incomplete line."""
        self._is_over = False
        self._reason: str | None = None
        self._usage = _Usage()
        self._tools: dict[int, list[_Function]] = {}
        """The pieces of each tool call, by index: its name first, then its arguments."""
        self._argument_bytes = 0

    def feed(self, piece: bytes, created_at: str) -> bytes:
        """Take the next piece; return the lines that it completes. Raises `BadAnswerError`."""
        ended, has_end, rest = piece.rpartition(b"\n")
        lines = []
        if has_end:
            lines = (bytes(self._rest) + ended).split(b"\n")
            self._rest.clear()
        self._rest += rest
        if len(self._rest) > EVENT_BYTES:
            raise BadAnswerError("an event of its stream is too large")
        return b"".join([self._line(line, created_at) for line in lines if line])

    def end(self, times: Times, created_at: str) -> bytes:
        """Return the last line. Raises `BadAnswerError` if the stream was incomplete."""
        if not self._is_over:
            raise BadAnswerError("its stream ended before the answer did")
        calls = _tool_calls([_joined(pieces) for pieces in self._tools.values()])
        line = _part(self._call, self._model, created_at, _Delta(), calls)
        return _ndjson({**line, **_last(self._reason, self._usage, times)})

    def _line(self, line: bytes, created_at: str) -> bytes:
        if not line.startswith(b"data:"):
            return b""
        data = line[5:].strip()
        if data == b"[DONE]":
            self._is_over = True
            return b""
        if len(data) > _SMALL_BYTES and data.count(b",") > _MOST_IN_EVENT:
            raise BadAnswerError("an event of its stream is too large")
        answer = _decode(data, _Answer)
        if bytes(answer.error) != b"null":
            raise BadAnswerError(error_text(500, data[:_SMALL_BYTES]))
        self._usage = answer.usage or self._usage
        if not answer.choices:
            return b""
        choice = answer.choices[0]
        if choice.finish_reason is not None:
            self._reason, self._is_over = choice.finish_reason, True
        delta = choice.delta or _Delta(content=choice.text)
        for call in delta.tool_calls or ():
            self._add(call)
        delta_text = delta.content or delta.reasoning_content or delta.reasoning
        if not delta_text and choice.logprobs is None:
            return b""
        part = _part(self._call, self._model, created_at, delta, [])
        if choice.logprobs is not None and bytes(choice.logprobs.content) not in _NOTHING:
            part["logprobs"] = choice.logprobs.content
        return _ndjson({**part, "done": False})

    def _add(self, call: _ToolCall) -> None:
        piece = call.function or _Function()
        index = len(self._tools) if call.index is None else call.index
        self._argument_bytes += len(piece.name or "") + len(piece.arguments or "") + 64
        if self._argument_bytes > EVENT_BYTES:
            raise BadAnswerError("the arguments of its tool calls are too large")
        self._tools.setdefault(index, []).append(piece)


def whole(call: Call, model: str, body: bytes, times: Times, created_at: str) -> bytes:
    """Return the translation of a response that is not streamed. Raises `BadAnswerError`."""
    if len(body) > _SMALL_BYTES and body.count(b"{") + body.count(b"[") > _MOST_VALUES:
        raise BadAnswerError(f"it has more than {_MOST_VALUES} objects and lists")
    if call in {Call.EMBED, Call.EMBEDDINGS}:
        return _embeddings(call, model, _decode(body, _Embeddings), times)
    answer = _decode(body, _Answer)
    if not answer.choices:
        raise BadAnswerError("it has no choices")
    choice = answer.choices[0]
    delta_text = choice.message or _Delta(content=choice.text)
    calls = _tool_calls([each.function or _Function() for each in delta_text.tool_calls or ()])
    part = _part(call, model, created_at, delta_text, calls)
    if choice.logprobs is not None and bytes(choice.logprobs.content) not in _NOTHING:
        part["logprobs"] = choice.logprobs.content
    return _json({**part, **_last(choice.finish_reason, answer.usage or _Usage(), times)})


def loaded(call: Call, model: str, created_at: str, *, is_unload: bool) -> bytes:
    """Return the response to a request that only loads or unloads the model."""
    part = _part(call, model, created_at, _Delta(), [])
    return _json({**part, "done": True, "done_reason": "unload" if is_unload else "load"})


def error_body(message: str) -> bytes:
    """Return an error in Ollama's format: one line, valid in a stream too."""
    return _ndjson({"error": message})


def error_text(status: int, body: bytes) -> str:
    """Return the message of an error response of an engine or the controller."""
    try:
        found = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        found = None
    for key in ("error", "message", "detail"):
        if isinstance(found, dict) and found.get(key):
            found = found[key]
    if isinstance(found, str):
        return found[:_SHOWN_CHARACTERS]
    text = body[:_SHOWN_CHARACTERS].decode("utf-8", "replace").strip()
    return text or f"the engine answered {status}"


# ----------------------------------------------------------------------------------------- inside


def _decode(data: bytes, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise BadAnswerError(f"it is not as OpenAI's API has it: {error}") from None


def _part(
    call: Call, model: str, created_at: str, delta_text: _Delta, tool_calls: list[dict[str, Any]]
) -> dict[str, Any]:
    thinking = delta_text.reasoning_content or delta_text.reasoning
    more = {} if thinking is None else {"thinking": thinking}
    part: dict[str, Any] = {"model": model, "created_at": created_at}
    if call is Call.GENERATE:
        return {**part, "response": delta_text.content or "", **more}
    message: dict[str, Any] = {"role": "assistant", "content": delta_text.content or "", **more}
    if tool_calls:
        message["tool_calls"] = tool_calls
    return {**part, "message": message}


def _joined(pieces: list[_Function]) -> _Function:
    return _Function(
        "".join(piece.name or "" for piece in pieces),
        "".join(piece.arguments or "" for piece in pieces),
    )


def _tool_calls(functions: list[_Function]) -> list[dict[str, Any]]:
    """Return Ollama's tool calls. Arguments are an object there, and text in OpenAI's API."""
    calls = []
    for function in functions:
        arguments = _decode((function.arguments or "{}").encode(), dict[str, msgspec.Raw])
        calls.append({"function": {"name": function.name or "", "arguments": arguments}})
    return calls


def _last(reason: str | None, usage: _Usage, times: Times) -> dict[str, Any]:
    return {
        "done": True,
        "done_reason": "length" if reason == "length" else "stop",
        "total_duration": _ns(times.ended_s - times.began_s),
        "load_duration": _ns(times.answered_s - times.began_s),
        "prompt_eval_count": usage.prompt_tokens or 0,
        "prompt_eval_duration": _ns(times.first_s - times.answered_s),
        "eval_count": usage.completion_tokens or 0,
        "eval_duration": _ns(times.ended_s - times.first_s),
    }


def _embeddings(call: Call, model: str, found: _Embeddings, times: Times) -> bytes:
    if not all(bytes(each.embedding).startswith(b"[") for each in found.data):
        raise BadAnswerError("an embedding of it is no list")
    vectors = [each.embedding for each in sorted(found.data, key=lambda each: each.index)]
    if call is Call.EMBEDDINGS:
        if not vectors:
            raise BadAnswerError("it has no embedding")
        return _json({"embedding": vectors[0]})
    usage = found.usage or _Usage()
    return _json(
        {
            "model": model,
            "embeddings": vectors,
            "total_duration": _ns(times.ended_s - times.began_s),
            "load_duration": _ns(times.answered_s - times.began_s),
            "prompt_eval_count": usage.prompt_tokens or 0,
        }
    )


def _ns(seconds: float) -> int:
    return max(0, round(seconds * 1e9))


def _json(value: dict[str, Any]) -> bytes:
    return msgspec.json.encode(value)


def _ndjson(value: dict[str, Any]) -> bytes:
    return msgspec.json.encode(value) + b"\n"
