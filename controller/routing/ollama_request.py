"""Reads requests of Ollama's API and translates them to OpenAI's.

    asked = read(Call.CHAT, body)                    # bounded and linear; raises `Refusal`
    path, body = to_openai(asked, "the engine's name", "vllm")

Pure functions over plain values. Options that an engine fixes at its start (`num_ctx`, `num_gpu`,
...) are ignored: Ollama's clients send them with every request.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from enum import Enum
from typing import Any, Final

import msgspec

from kvelastic.controller.http.refusal import Refusal
from kvelastic.errors import InvalidArgumentError
from kvelastic.units import parse_duration_s

BODY_BYTES: Final = 16 << 20
"""Maximum size of one request, including its images."""
_SMALL_BYTES: Final = 1 << 20
_MOST_VALUES: Final = 200_000
"""Maximum number of objects and lists in a body larger than `_SMALL_BYTES`. Each takes far more
memory than its text."""
_MOST_PARTS: Final = 10_000
_NULL: Final = msgspec.Raw(b"null")
_EMPTY: Final = frozenset((b"null", b"[]", b'""'))
_IMAGES: Final = {"/9j/": "jpeg", "iVBOR": "png", "R0lGOD": "gif", "UklGR": "webp"}
"""Image formats by the first characters of their base64 text."""


class Call(Enum):
    """A call of the API that runs inference, by its path."""

    CHAT = "/api/chat"
    GENERATE = "/api/generate"
    EMBED = "/api/embed"
    EMBEDDINGS = "/api/embeddings"


class Options(msgspec.Struct):
    """The options that affect a response. Others are for loading a model."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: list[str] | str | None = None
    num_predict: int | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None


class Function(msgspec.Struct):
    """The name and arguments of a tool call."""

    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"{}")


class ToolCall(msgspec.Struct):
    """A tool call made by the model earlier in the conversation."""

    function: Function


class Message(msgspec.Struct):
    """One message of a conversation."""

    role: str
    content: str | None = None
    images: list[str] | None = None
    tool_calls: list[ToolCall] | None = None
    tool_name: str | None = None


class Head(msgspec.Struct, frozen=True):
    """The values of a request that its response needs."""

    call: Call
    model: str
    streams: bool
    """True if the response is streamed, which is Ollama's default."""
    is_load: bool
    """True if the request only loads or unloads the model."""
    keep_alive_s: float | None
    """Seconds that the model stays awake without requests; infinity: always; None: not given."""


class Asked(msgspec.Struct):
    """One request of any `Call`. Fields that only other calls have are None.

    `tools` is passed on unparsed, because the list may have millions of members.
    """

    model: str
    call: Call = Call.CHAT
    messages: list[Message] | None = None
    tools: msgspec.Raw = _NULL
    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    images: list[str] | None = None
    raw: bool | None = None
    template: msgspec.Raw = _NULL
    context: msgspec.Raw = _NULL
    input: str | list[str] | None = None
    truncate: bool | None = None
    dimensions: int | None = None
    format: msgspec.Raw = _NULL
    options: Options | None = None
    think: bool | str | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    stream: bool | None = None
    keep_alive: float | str | None = None

    @property
    def head(self) -> Head:
        """The part of the request that is kept after its translation."""
        return Head(self.call, self.model, self.streams, self.is_load, self.keep_alive_s)

    @property
    def streams(self) -> bool:
        """True if the response is streamed (see `Head`)."""
        return self.call in {Call.CHAT, Call.GENERATE} and self.stream is not False

    @property
    def is_load(self) -> bool:
        """True if the request only loads or unloads the model (see `Head`)."""
        if self.call is Call.CHAT:
            return not self.messages
        return self.call is Call.GENERATE and not self.prompt and not self.images

    @property
    def keep_alive_s(self) -> float | None:
        """Seconds that the model stays awake without requests (see `Head`)."""
        return None if self.keep_alive is None else _keep_alive_s(self.keep_alive)


_DECODER: Final = msgspec.json.Decoder(Asked)


def read(call: Call, body: bytes) -> Asked:
    """Read a request in bounded, linear time. Raises `Refusal` (400, 413) with the fault."""
    if len(body) > _SMALL_BYTES and body.count(b"{") + body.count(b"[") > _MOST_VALUES:
        raise Refusal(
            413,
            "body_too_large",
            f"A body beyond 1 MiB has at most {_MOST_VALUES} objects and lists.",
        )
    try:
        asked = _DECODER.decode(body)
    except msgspec.ValidationError as error:
        raise Refusal(400, "invalid_value", f"The request is not understood: {error}.") from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise Refusal(400, "invalid_json", f"The body is not JSON: {error}.") from None
    asked.call = call
    if _parts(asked) > _MOST_PARTS:
        raise Refusal(
            413,
            "body_too_large",
            f"A request has at most {_MOST_PARTS} messages, calls of tools, images and inputs.",
        )
    if not asked.model:
        raise Refusal(400, "model_missing", "model is required", param="model")
    _check(asked)
    return asked


def to_openai(asked: Asked, name: str, engine: str) -> tuple[str, bytes]:
    """Return the path and the body for an engine whose model name is `name`.

    `engine` is the engine's kind. The kinds have different names for options that OpenAI's API
    lacks.
    """
    body: dict[str, Any] = {"model": name}
    if asked.call in {Call.EMBED, Call.EMBEDDINGS}:
        body["input"] = asked.prompt if asked.call is Call.EMBEDDINGS else asked.input
        body["input"] = body["input"] or ""
        if asked.dimensions is not None:
            body["dimensions"] = asked.dimensions
        if engine == "vllm" and asked.truncate is not False:
            body["truncate_prompt_tokens"] = -1
        return "/v1/embeddings", msgspec.json.encode(body)
    if asked.streams:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    body |= _sampling(asked.options or Options(), engine)
    body |= _response_format(asked.format)
    if asked.call is Call.GENERATE and (asked.raw or asked.suffix is not None):
        body["prompt"] = asked.prompt
        if asked.suffix is not None:
            body["suffix"] = asked.suffix
        if asked.logprobs:
            body["logprobs"] = asked.top_logprobs or 0
        return "/v1/completions", msgspec.json.encode(body)
    body["messages"] = _messages(_conversation(asked))
    if not _is_empty(asked.tools):
        body["tools"] = asked.tools
    if isinstance(asked.think, bool):
        body["chat_template_kwargs"] = {"enable_thinking": asked.think}
    elif asked.think is not None:
        body["reasoning_effort"] = asked.think
    if asked.logprobs:
        body |= {"logprobs": True, "top_logprobs": asked.top_logprobs or 0}
    return "/v1/chat/completions", msgspec.json.encode(body)


# ----------------------------------------------------------------------------------------- inside


def _parts(asked: Asked) -> int:
    """Return the number of parts that are translated one by one, including those of messages."""
    count = len(asked.images or ()) + (len(asked.input) if isinstance(asked.input, list) else 0)
    for message in (asked.messages or ())[:_MOST_PARTS]:
        count += len(message.images or ()) + len(message.tool_calls or ())
    return count + len(asked.messages or ())


def _check(asked: Asked) -> None:
    """Raise `Refusal` (400) for unsupported or invalid fields instead of ignoring them."""
    for key in ("template", "context"):
        if not _is_empty(getattr(asked, key)):
            raise Refusal(
                400,
                "not_served",
                f"{key} is not served: the engine has the model's own template, and /api/chat takes"
                " a conversation.",
                param=key,
            )
    if asked.call is Call.EMBED and asked.input is None:
        raise Refusal(400, "input_missing", "input is required", param="input")
    if bytes(memoryview(asked.tools)[:1]) not in {b"n", b"["}:
        raise Refusal(400, "invalid_value", "tools is a list", param="tools")
    form = bytes(asked.format).strip()
    if form[:1] != b"{" and form not in {b"null", b'""', b'"json"'}:
        raise Refusal(
            400, "invalid_value", 'format is "json", or a JSON schema as an object', param="format"
        )
    if asked.keep_alive is not None:
        _keep_alive_s(asked.keep_alive)


def _is_empty(value: msgspec.Raw) -> bool:
    return len(memoryview(value)) <= 4 and bytes(value) in _EMPTY


def _keep_alive_s(value: float | str) -> float:
    """Return seconds; infinity for a negative or too large value. Raises `Refusal` (400)."""
    is_negative = value.strip().startswith("-") if isinstance(value, str) else value < 0
    try:
        size = value.strip().removeprefix("-") if isinstance(value, str) else abs(value)
        seconds = parse_duration_s(size)
    except InvalidArgumentError as error:
        if not isinstance(value, str):
            return math.inf  # longer than the largest supported duration
        raise Refusal(400, "invalid_value", f"keep_alive: {error}", param="keep_alive") from None
    return math.inf if is_negative else seconds


def _sampling(options: Options, engine: str) -> dict[str, Any]:
    # vLLM, SGLang and transformers use one name; llama.cpp uses Ollama's.
    penalty = "repeat_penalty" if engine == "openai" else "repetition_penalty"
    given = {
        "temperature": options.temperature,
        "top_p": options.top_p,
        "top_k": options.top_k,
        "min_p": options.min_p,
        "seed": options.seed,
        "stop": options.stop or None,
        penalty: options.repeat_penalty,
        "presence_penalty": options.presence_penalty,
        "frequency_penalty": options.frequency_penalty,
        # Ollama's -1 (until the end) and -2 (until the context is full) are an engine's default.
        "max_tokens": None
        if options.num_predict is None or options.num_predict < 0
        else options.num_predict,
    }
    return {key: value for key, value in given.items() if value is not None}


def _response_format(form: msgspec.Raw) -> dict[str, Any]:
    text = bytes(form).strip()
    if text == b'"json"':
        return {"response_format": {"type": "json_object"}}
    if text[:1] != b"{":
        return {}
    schema = {"name": "answer", "schema": form, "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def _conversation(asked: Asked) -> list[Message]:
    if asked.call is Call.CHAT:
        return asked.messages or []
    system = [Message("system", asked.system)] if asked.system else []
    return [*system, Message("user", asked.prompt, asked.images)]


def _messages(conversation: Iterable[Message]) -> list[dict[str, Any]]:
    """Return OpenAI's messages. Tool calls get ids in order, and results refer to them.

    A result belongs to the first call of its name without a result, else to the first open call.
    """
    found = []
    open_calls: dict[str, deque[str]] = {}
    in_order: deque[tuple[str, str]] = deque()
    count = 0
    for message in conversation:
        out: dict[str, Any] = {"role": message.role, "content": _content(message)}
        calls = []
        for call in message.tool_calls or ():
            name, number = call.function.name, f"call_{count}"
            count += 1
            open_calls.setdefault(name, deque()).append(number)
            in_order.append((name, number))
            arguments = bytes(call.function.arguments).decode()
            function = {"name": name, "arguments": arguments}
            calls.append({"id": number, "type": "function", "function": function})
        if calls:
            out["tool_calls"] = calls
        if message.role == "tool":
            out["tool_call_id"] = _answered(open_calls, in_order, message.tool_name)
        found.append(out)
    return found


def _answered(
    open_calls: dict[str, deque[str]], in_order: deque[tuple[str, str]], name: str | None
) -> str:
    """Return the id of the call that a result belongs to, and remove it from the open calls."""
    if name is not None and open_calls.get(name):
        return open_calls[name].popleft()
    while in_order:
        called, number = in_order.popleft()
        waiting = open_calls[called]
        if waiting and waiting[0] == number:
            return waiting.popleft()
    return "call_0"


def _content(message: Message) -> str | list[dict[str, Any]]:
    if not message.images:
        return message.content or ""
    parts: list[dict[str, Any]] = []
    if message.content:
        parts.append({"type": "text", "text": message.content})
    for image in message.images:
        kind = next((k for start, k in _IMAGES.items() if image.startswith(start)), "png")
        url = f"data:image/{kind};base64,{image}"
        parts.append({"type": "image_url", "image_url": {"url": url}})
    return parts
