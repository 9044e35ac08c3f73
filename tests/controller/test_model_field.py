"""Where a request names its model: what the engines' own parsers read, and nothing else is touched.

The references are what engines run on: Python's json, starlette's form parser, urllib's parse_qsl.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import parse_qsl

import pytest
from starlette.datastructures import Headers
from starlette.formparsers import MultiPartException, MultiPartParser

from kvelastic.controller.http.refusal import Refusal
from kvelastic.controller.routing.body_worker import find_model
from kvelastic.controller.routing.model_field import (
    MAX_FIELDS,
    MAX_NAME_BYTES,
    Form,
    ModelField,
    find_in_json,
    find_in_urlencoded,
    written,
)
from kvelastic.controller.routing.multipart_field import (
    MAX_HEADER_BYTES,
    MAX_PARTS,
    boundary_of,
    find_in_multipart,
)

NEW = 'org/näme "q"&=+%\\'


def renamed(body: bytes, field: ModelField, form: Form) -> bytes:
    return body[: field.start] + written(NEW, form) + body[field.end :]


def check_json(body: bytes) -> str | None:
    field = find_in_json(body)
    try:
        value = json.loads(body)
    except UnicodeDecodeError:  # in what is skipped: the engine says so
        return None if field is None else field.name
    if field is None:
        assert value.get("model") is None
        return None
    assert value["model"] == field.name == json.loads(body[field.start : field.end])
    assert json.loads(renamed(body, field, Form.JSON)) == value | {"model": NEW}
    return field.name


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"m"}',
        b' {\n"model" :\t"m" } \r\n',
        b'{"messages":[{"model":"m"}],"model":"m","x":{"model":"m"}}',
        b'{"model":"m","x":{"model":"nested"}}',
        b'{"model":"first","n":1,"model":"m"}',
        b'{"\\u006dode\\u006c":"m"}',
        b'{"model":"\\u006d"}',
        '{"prompt":"ä\U0001f600","model":"m"}'.encode(),
        b'{"a":1e999,"model":"m","big":' + b"9" * 5000 + b"e0}",
        b'{"model":"nobody","model":null,"model":"m"}',
    ],
)
def test_last_top_level_json_model_key_is_used(body: bytes) -> None:
    assert check_json(body) == "m"


@pytest.mark.parametrize("body", [b"{}", b'{"Model":"m"}', b'{"model":"m","model":null}'])
def test_json_without_a_model_has_no_field(body: bytes) -> None:
    assert check_json(body) is None


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "invalid_json"),
        (b"[]", "invalid_json"),
        (b'"model"', "invalid_json"),
        (b'{"model":"m"', "invalid_json"),
        (b'{"model":"m"}}', "invalid_json"),
        (b'{"model":"m","x":NaN}', "invalid_json"),
        (b'{"model":"\\ud800"}', "invalid_json"),
        (b'{"model":"m","x":"\\udfff"}', "invalid_json"),
        (b'{"model":"\xff"}', "invalid_json"),
        (b'{"model":"m","x":' + b"[" * 9_000 + b"]" * 9_000 + b"}", "invalid_json"),
        (b'{"model":7}', "invalid_model"),
        (b'{"model":["m"]}', "invalid_model"),
        (b'{"model":"' + b"x" * MAX_NAME_BYTES + b'"}', "invalid_model"),
    ],
)
def test_invalid_json_is_refused(body: bytes, code: str) -> None:
    with pytest.raises(Refusal) as refused:
        find_in_json(body)
    assert (refused.value.status, refused.value.code) == (400, code)


def check_urlencoded(body: bytes) -> str | None:
    field = find_in_urlencoded(body)
    # `parse_qsl` knows the separator `&` only, as starlette's parser for queries.
    pairs = parse_qsl(body.decode("latin-1"), keep_blank_values=True, errors="replace")
    names = [value for key, value in pairs if key == "model"]
    if field is None:
        assert not names
        return None
    assert names == [field.name]
    if not field.name:
        return ""  # refused, so it is not renamed
    text = renamed(body, field, Form.URLENCODED).decode("latin-1")
    after = parse_qsl(text, keep_blank_values=True, errors="replace")
    assert after == [(key, NEW if key == "model" else value) for key, value in pairs]
    return field.name


@pytest.mark.parametrize(
    ("body", "name"),
    [
        (b"model=m", "m"),
        (b"a=b&model=a+b%2Fc&model2=x", "a b/c"),
        (b"%6d%6f%64%65%6c=m&&x", "m"),
        (b"model=", ""),
        (b"model=a=b", "a=b"),
        (b"xmodel=m&mode=l", None),
        (b"", None),
    ],
)
def test_urlencoded_forms(body: bytes, name: str | None) -> None:
    assert check_urlencoded(body) == name


@pytest.mark.parametrize(
    "body",
    [b"model=a&model=b", b"a=b&" * MAX_FIELDS + b"model=m", b"model=" + b"x" * MAX_NAME_BYTES],
    ids=["twice", "fields", "long"],
)
def test_invalid_urlencoded_forms_are_refused(body: bytes) -> None:
    with pytest.raises(Refusal, match="400"):
        find_in_urlencoded(body)


def part(name: str, value: bytes, more: str = "") -> bytes:
    head = f'--b\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n'
    return head.encode() + value + b"\r\n"


async def items_of(body: bytes) -> list[tuple[str, Any]] | None:
    """What an engine reads; None if it refuses it."""

    async def stream() -> AsyncIterator[bytes]:
        yield body

    headers = Headers({"content-type": "multipart/form-data; boundary=b"})
    parser = MultiPartParser(headers, stream())  # type: ignore[arg-type]
    try:
        form = await parser.parse()
        return [
            (key, value if isinstance(value, str) else (value.filename, await value.read()))
            for key, value in form.multi_items()
        ]
    except MultiPartException:
        return None
    finally:
        for file in parser._files_to_close_on_error:
            file.close()


def check_multipart(body: bytes, chunk_bytes: int = 1 << 20) -> str | None:
    field = find_in_multipart(body, b"b", chunk_bytes)
    items = asyncio.run(items_of(body))
    if field is None or items is None:
        assert not items or all(
            key != "model" or isinstance(value, tuple) for key, value in items
        ), "an engine reads a model here"
        return None if field is None else field.name
    value = body[field.start : field.end]
    assert [v for k, v in items if k == "model" and isinstance(v, str)] in (
        [field.name],
        [value.decode("latin-1")],  # where it is not UTF-8
    )
    after = asyncio.run(items_of(renamed(body, field, Form.MULTIPART)))
    assert after == [(k, NEW if k == "model" and isinstance(v, str) else v) for k, v in items]
    return field.name


FILE = part("file", b"\x00RIFF\r\n--not the end\r\n\r\nmodel\r\n", '; filename="a.wav"')


@pytest.mark.parametrize("chunk_bytes", [1, 7, 64, 1 << 20])
@pytest.mark.parametrize(
    "body",
    [
        part("model", b"m") + b"--b--\r\n",
        FILE + part("model", b"m") + part("x", b"m") + b"--b--",
        b"\r\n" + part("model", b"m") + FILE + b"--b--\r\nepilogue",
        b"--b\r\nX: y\r\ncontent-DISPOSITION:form-data; name=model\r\nY:\r\n\r\nm\r\n--b--",
        part("model", b"f", '; filename="f"') + part("model", b"m") + b"--b--",
        pytest.param(
            part("model", b"m") + b"--b \t\r\n" + part("x", b"y")[5:] + b"--b--",
            # The newest parser for 3.10, which engines have there as well, knows no such blanks.
            marks=pytest.mark.skipif(sys.version_info < (3, 11), reason="older parser"),
        ),
    ],
)
def test_multipart_forms(body: bytes, chunk_bytes: int) -> None:
    assert check_multipart(body, chunk_bytes) == "m"


def test_multipart_model_may_be_any_text() -> None:
    for value in ("\r\n\r\n", "", "ä", " m ", "a\r\n--c"):
        body = part("x", b"y") + part("model", value.encode()) + b"--b--"
        for chunk_bytes in (1, 1 << 20):
            assert check_multipart(body, chunk_bytes) == value


@pytest.mark.parametrize(
    "body",
    [
        part("model", b"m") * 2 + b"--b--",
        part("x", b"") * (MAX_PARTS + 2) + part("model", b"m") + b"--b--",
        part("x" * MAX_HEADER_BYTES, b"") + b"--b--",
        FILE + b"--b" + b" " * MAX_HEADER_BYTES + b"\r\n",
        b"no form",
        part("model", b"m" * (MAX_NAME_BYTES + 1)) + b"--b--",
    ],
    ids=["twice", "parts", "headers", "padding", "text", "long"],
)
def test_invalid_multipart_forms_are_refused(body: bytes) -> None:
    with pytest.raises(Refusal, match="400"):
        find_in_multipart(body, b"b")


def test_multipart_boundary_is_parsed_or_refused() -> None:
    assert boundary_of(b'multipart/form-data; charset=x; boundary="a b"') == b"a b"
    for bad in (b"multipart/form-data", b"multipart/form-data; boundary=", b"m; boundary=b" * 100):
        with pytest.raises(Refusal, match="boundary"):
            boundary_of(bad)


# ------------------------------------------------------------------------------------- at random

KEYS = ['"model"', '"\\u006dodel"', '"mod\\u0065l"', '"Model"', '"a"', '"prompt"', '""', '"é"']
NAMES = ["m", "a/b", "", "x" * 300, "näme", "a&b=c", "%6d", "--b", '"']


def some_json(dice: random.Random, depth: int = 0) -> str:
    kind = dice.randrange(9 if depth < 4 else 6)
    if kind < 3:
        return json.dumps(dice.choice(NAMES), ensure_ascii=dice.random() < 0.5)
    if kind < 6:
        if dice.random() < 0.03:
            return dice.choice(["NaN", '"\\ud800"', "1.", "-", '"\\q"'])
        return dice.choice(["null", "true", "-0.5e3", "10", "[]", "{}"])
    inner = [some_json(dice, depth + 1) for _ in range(dice.randint(0, 4))]
    space = dice.choice(["", " ", "\n\t"])
    if kind == 6:
        return "[" + ("," + space).join(inner) + "]"
    pairs = [f"{dice.choice(KEYS)}{space}:{space}{value}" for value in inner]
    return "{" + f"{space},".join(pairs) + "}"


def some_body(dice: random.Random, form: Form) -> bytes:
    if form is Form.JSON:
        pairs = [f"{dice.choice(KEYS)}: {some_json(dice)}" for _ in range(dice.randint(0, 4))]
        name = json.dumps(dice.choice(NAMES), ensure_ascii=dice.random() < 0.5)
        pairs.insert(dice.randint(0, len(pairs)), f"{dice.choice(KEYS[:3])}:{name}")
        return ("{" + ", ".join(pairs) + "}").encode()
    values = [dice.choice(NAMES) for _ in range(dice.randint(0, 4))]
    keys = ["model", "file", "a", "%6dodel"]
    if form is Form.URLENCODED:
        fields = [f"{dice.choice(keys)}={value}" for value in values]
        return dice.choice(["&", "&&", ";"]).join(fields).encode()
    more = ["", '; filename="f"', "\r\nX: y", "\r\nEmpty:"]
    parts = [part(dice.choice(keys), value.encode(), dice.choice(more)) for value in values]
    return b"".join(parts) + dice.choice([b"--b--\r\n", b"--b--", b"", b"--b"])


def mutated(dice: random.Random, body: bytes) -> bytes:
    noisy = bytearray(body)
    for _ in range(dice.choice((0, 0, 1, 1, 3))):
        place = dice.randint(0, len(noisy))
        match dice.randrange(3):
            case 0:
                noisy[place : place + dice.randint(1, 5)] = b""
            case 1:
                noisy[place:place] = noisy[place : place + dice.randint(1, 60)]
            case _:
                noisy[place : place + 1] = dice.choice(
                    (b'"', b"\\", b"{", b"}", b",", b"\r\n", b"--b", b"&", b"=", b"%", b"\xff")
                )
    return bytes(noisy)


@pytest.mark.slow
@pytest.mark.parametrize(
    "count", [1500, pytest.param(100_000, marks=pytest.mark.soak)], ids=["some", "hundred_thousand"]
)
def test_mutated_bodies_are_parsed_as_by_engines(count: int) -> None:
    """Or refused: what counts is that no other model is read, and no other byte is changed."""
    checks = {
        Form.JSON: check_json,
        Form.URLENCODED: check_urlencoded,
        Form.MULTIPART: check_multipart,
    }
    found = dict.fromkeys(Form, 0)
    for number in range(count):
        dice = random.Random(f"body {number}")
        form = dice.choice(list(Form))
        body = mutated(dice, some_body(dice, form))
        try:
            field = find_model(body, form, b"b")
            name = checks[form](body)
            assert name == (None if field is None else field.name)
            if form is Form.MULTIPART:
                assert find_in_multipart(body, b"b", dice.randint(1, 9)) == field
        except Refusal as refusal:
            kind = (refusal.status, refusal.code)
            if kind not in {(400, f"invalid_{what}") for what in ("json", "form", "model")}:
                pytest.fail(f"case {number} is refused as {kind}")
        except BaseException:
            print(f"case {number}, {form}: {body!r}")
            raise
        else:
            found[form] += field is not None
    print(f"found: {found}")
    assert min(found.values()) > count // 60
