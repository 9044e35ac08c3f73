"""Ollama's requests and answers as those of OpenAI's API, and back: pure functions."""

from __future__ import annotations

import json
import math
from datetime import datetime, timedelta, timezone
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvelastic.controller.http.refusal import Refusal
from kvelastic.controller.routing.ollama_answer import (
    EVENT_BYTES,
    BadAnswerError,
    Stream,
    Times,
    error_text,
    whole,
)
from kvelastic.controller.routing.ollama_models import Listed, names_of, running, shown, tags
from kvelastic.controller.routing.ollama_request import Call, read, to_openai

NOW = "2026-01-01T00:00:00.000000Z"
TIMES = Times(began_s=1.0, answered_s=3.0, first_s=3.5, ended_s=4.0)


def openai_of(call: Call, engine: str = "vllm", **body: Any) -> tuple[str, dict[str, Any]]:
    asked = read(call, json.dumps({"model": "m", **body}).encode())
    path, data = to_openai(asked, "m", engine)
    return path, json.loads(data)


def test_chat_request_becomes_openai_request() -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "hello"}]
    path, body = openai_of(Call.CHAT, messages=messages)
    assert path == "/v1/chat/completions"
    assert body == {
        "model": "m",
        "messages": messages,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    _, body = openai_of(Call.CHAT, messages=messages, stream=False)
    assert body == {"model": "m", "messages": messages}


def test_options_get_the_engines_names() -> None:
    options = {
        "temperature": 0.5,
        "top_k": 7,
        "num_predict": 9,
        "repeat_penalty": 1.1,
        "seed": 0,
        "stop": ["x"],
        "num_ctx": 4096,
    }
    messages = [{"role": "user", "content": "x"}]
    _, body = openai_of(Call.CHAT, messages=messages, options=options, stream=False)
    assert {k: v for k, v in body.items() if k not in {"model", "messages"}} == {
        "temperature": 0.5,
        "top_k": 7,
        "max_tokens": 9,
        "repetition_penalty": 1.1,
        "seed": 0,
        "stop": ["x"],
    }
    _, body = openai_of(Call.CHAT, "openai", messages=messages, options=options)
    assert body["repeat_penalty"] == 1.1
    _, body = openai_of(Call.CHAT, messages=messages, options={"num_predict": -1})
    assert "max_tokens" not in body


def test_tools_and_their_results() -> None:
    """Ollama's calls have no ids: results come by name, or in order."""
    call = {"function": {"name": "f", "arguments": {"a": [1, "\u00e9"]}}}
    other = {"function": {"name": "g", "arguments": {}}}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": [call, other, call]},
        {"role": "tool", "content": "1", "tool_name": "g"},
        {"role": "tool", "content": "2", "tool_name": "f"},
        {"role": "tool", "content": "3"},
        {"role": "tool", "content": "4"},
    ]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    _, body = openai_of(Call.CHAT, messages=messages, tools=[tool])
    assert body["tools"] == [tool]
    calls = body["messages"][1]["tool_calls"]
    assert [c["id"] for c in calls] == ["call_0", "call_1", "call_2"]
    assert json.loads(calls[0]["function"]["arguments"]) == {"a": [1, "\u00e9"]}
    ids = [m["tool_call_id"] for m in body["messages"][2:]]
    assert ids == ["call_1", "call_0", "call_2", "call_0"]


def test_images_formats_and_thinking() -> None:
    messages = [{"role": "user", "content": "what?", "images": ["/9j/4AAQ", "iVBORw0K"]}]
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    _, body = openai_of(Call.CHAT, messages=messages, format=schema, think=False)
    text, one, two = body["messages"][0]["content"]
    assert text == {"type": "text", "text": "what?"}
    assert one["image_url"]["url"] == "data:image/jpeg;base64,/9j/4AAQ"
    assert two["image_url"]["url"].startswith("data:image/png;")
    assert body["response_format"]["json_schema"]["schema"] == schema
    assert body["chat_template_kwargs"] == {"enable_thinking": False}
    _, body = openai_of(Call.CHAT, messages=messages, format="json", think="high")
    assert body["response_format"] == {"type": "json_object"}
    assert body["reasoning_effort"] == "high"


def test_generate_becomes_chat_request_unless_raw() -> None:
    path, body = openai_of(Call.GENERATE, prompt="x", system="s", stream=False)
    assert path == "/v1/chat/completions"
    assert [m["content"] for m in body["messages"]] == ["s", "x"]
    path, body = openai_of(Call.GENERATE, prompt="x", raw=True, stream=False)
    assert (path, body["prompt"]) == ("/v1/completions", "x")
    path, body = openai_of(Call.GENERATE, prompt="x", suffix="y")
    assert (path, body["suffix"]) == ("/v1/completions", "y")


def test_embeddings() -> None:
    path, body = openai_of(Call.EMBED, input=["a", "b"], dimensions=2)
    assert path == "/v1/embeddings"
    assert body == {
        "model": "m",
        "input": ["a", "b"],
        "dimensions": 2,
        "truncate_prompt_tokens": -1,
    }
    _, body = openai_of(Call.EMBEDDINGS, "openai", prompt="a")
    assert body == {"model": "m", "input": "a"}


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (0, 0),
        ("0", 0),
        (90, 90),
        ("5m", 300),
        ("1h30m", 5400),
        (-1, math.inf),
        ("-1", math.inf),
        ("-5m", math.inf),
        (1e30, math.inf),
        (None, None),
    ],
)
def test_keep_alive(value: object, seconds: float | None) -> None:
    body = json.dumps({"model": "m", "keep_alive": value}).encode()
    assert read(Call.CHAT, body).keep_alive_s == seconds


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (400, b"", "not JSON"),
        (400, b"[]", "Expected `object`"),
        (400, b"{}", "`model`"),
        (400, b'{"model": ""}', "model is required"),
        (400, b'{"model": "m", "messages": [{"role": 1}]}', "$.messages[0].role"),
        (400, b'{"model": "m", "options": {"top_k": "x"}}', "$.options.top_k"),
        (400, b'{"model": "m", "keep_alive": "soon"}', "keep_alive"),
        (400, b'{"model": "m", "keep_alive": NaN}', "not JSON"),
        (400, b'{"model": "m", "format": "yaml"}', "format is"),
        (400, b'{"model": "m", "template": "x"}', "template is not served"),
        (400, b'{"model": "m", "context": [1]}', "context is not served"),
        (400, b'{"model": "\xff"}', "not JSON"),
        (400, b'{"model": "m", "tools": ' + b"[" * 100_000, "not JSON"),
        (413, b'{"model": "m", "tools": [' + b"[]," * 400_000 + b"[]]}", "at most"),
    ],
)
def test_invalid_request_error_names_the_fault(status: int, body: bytes, said: str) -> None:
    with pytest.raises(Refusal) as caught:
        read(Call.CHAT, body)
    assert caught.value.status == status
    assert said in caught.value.message
    assert set(json.loads(caught.value.ollama_body())) == {"error"}


def events(*values: Any, end: str = "[DONE]") -> bytes:
    texts = [*(json.dumps(value) for value in values), end]
    return "".join(f"data: {text}\n\n" for text in texts).encode()


def delta(**said: Any) -> dict[str, Any]:
    return {"choices": [{"delta": said}]}


FINISH = {"choices": [{"delta": {}, "finish_reason": "length"}]}
USAGE = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}


def lines_of(stream: Stream, *pieces: bytes) -> list[Any]:
    data = b"".join(stream.feed(piece, NOW) for piece in pieces) + stream.end(TIMES, NOW)
    return [json.loads(line) for line in data.splitlines()]


@given(st.lists(st.integers(1, 400), max_size=8))
def test_stream_translation_is_independent_of_chunk_boundaries(cuts: list[int]) -> None:
    data = events(delta(role="assistant", content=""), delta(content="H\u00e9"), FINISH, USAGE)
    at = sorted({0, *(c for c in cuts if c < len(data)), len(data)})
    pieces = [data[a:b] for a, b in pairwise(at)]
    first, last = lines_of(Stream(Call.CHAT, "m"), *pieces)
    assert first == {
        "model": "m",
        "created_at": NOW,
        "message": {"role": "assistant", "content": "H\u00e9"},
        "done": False,
    }
    assert last["message"] == {"role": "assistant", "content": ""}
    assert (last["done"], last["done_reason"]) == (True, "length")
    assert (last["prompt_eval_count"], last["eval_count"]) == (3, 2)
    assert (last["total_duration"], last["load_duration"]) == (3 * 10**9, 2 * 10**9)
    assert (last["prompt_eval_duration"], last["eval_duration"]) == (5 * 10**8, 5 * 10**8)


def test_streamed_tool_calls_are_complete_in_last_line() -> None:
    def call(index: int, **function: str) -> dict[str, Any]:
        return delta(tool_calls=[{"index": index, "function": function}])

    parts = (
        call(0, name="f", arguments=""),
        call(0, arguments='{"a"'),
        call(1, name="g", arguments="{}"),
        call(0, arguments=": 1}"),
    )
    (last,) = lines_of(Stream(Call.CHAT, "m"), events(*parts, FINISH))
    assert last["message"]["tool_calls"] == [
        {"function": {"name": "f", "arguments": {"a": 1}}},
        {"function": {"name": "g", "arguments": {}}},
    ]


def test_thinking_and_text_completions() -> None:
    first, _ = lines_of(Stream(Call.CHAT, "m"), events(delta(reasoning_content="hm"), FINISH))
    assert first["message"]["thinking"] == "hm"
    first, _ = lines_of(Stream(Call.GENERATE, "m"), events({"choices": [{"text": "x"}]}, FINISH))
    assert first["response"] == "x"


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "ended before"),
        (events(delta(content="x"), end=""), "not as OpenAI"),
        (b"data: {\n\n", "not as OpenAI"),
        (events({"error": {"message": "out of memory"}}), "out of memory"),
        (b"data: " + b"x" * EVENT_BYTES, "too large"),
        (events(delta(tool_calls=[{"function": {"arguments": "["}}]), FINISH), "not as OpenAI"),
        (events({"choices": {}}), "not as OpenAI"),
        (b"data: " + b"[" * 200_000 + b"\n", "not as OpenAI"),
    ],
)
def test_invalid_stream_raises_with_the_reason(data: bytes, said: str) -> None:
    stream = Stream(Call.CHAT, "m")
    with pytest.raises(BadAnswerError, match=said):
        lines_of(stream, data)


def test_non_stream_responses_are_translated() -> None:
    function = {"name": "f", "arguments": '{"a": 1}'}
    message = {"content": None, "tool_calls": [{"id": "1", "function": function}]}
    choice = {"message": message, "finish_reason": "tool_calls"}
    data = json.dumps({"choices": [choice], "usage": USAGE["usage"]}).encode()
    found = json.loads(whole(Call.CHAT, "m", data, TIMES, NOW))
    assert found["message"]["tool_calls"] == [{"function": {**function, "arguments": {"a": 1}}}]
    assert (found["done"], found["done_reason"], found["eval_count"]) == (True, "stop", 2)
    vectors = [{"index": 1, "embedding": [2]}, {"index": 0, "embedding": [1.5]}]
    data = json.dumps({"data": vectors, "usage": {"prompt_tokens": 4}}).encode()
    found = json.loads(whole(Call.EMBED, "m", data, TIMES, NOW))
    assert (found["embeddings"], found["prompt_eval_count"]) == ([[1.5], [2.0]], 4)
    found = json.loads(whole(Call.EMBEDDINGS, "m", data, TIMES, NOW))
    assert found == {"embedding": [1.5]}
    for wrong in (b"", b"[]", b'{"choices": []}', b'{"choices": [{"message": 3}]}'):
        with pytest.raises(BadAnswerError):
            whole(Call.CHAT, "m", wrong, TIMES, NOW)
    with pytest.raises(BadAnswerError):
        whole(Call.EMBEDDINGS, "m", b'{"data": []}', TIMES, NOW)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"error": {"message": "too long", "code": 400}}', "too long"),
        (b'{"object": "error", "message": "too long"}', "too long"),
        (b'{"detail": "too long"}', "too long"),
        (b'{"error": "too long"}', "too long"),
        (b"too long\n", "too long"),
        (b"\xff" * 10, "\ufffd" * 10),
        (b"", "the engine answered 500"),
    ],
)
def test_errors_of_engines(body: bytes, said: str) -> None:
    assert error_text(500, body) == said


def test_model_lists_have_ollama_format() -> None:
    since = datetime(2026, 1, 1, tzinfo=timezone.utc)
    models = [Listed("m", since, 7, 60.0), Listed("n", since)]
    assert [m["name"] for m in tags(models)["models"]] == ["m", "n"]
    assert len(tags(models)["models"][0]["digest"]) == 64
    first, second = running(models, since + timedelta(seconds=5))["models"]
    assert (first["size_vram"], first["expires_at"]) == (7, "2026-01-01T00:01:05.000000Z")
    assert second["expires_at"].startswith("2318")
    assert shown(models[0])["model_info"]["general.basename"] == "m"
    assert names_of("m:latest") == ("m:latest", "m")
    assert names_of("m") == ("m",)
