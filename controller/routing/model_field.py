"""Finds the model's name in a request's body or query: pure functions of bytes.

    field = find_in_json(body)
    body[field.start : field.end]       # the raw value, including quotes and escapes

No other field is parsed, nothing is copied, and all functions take linear time. If JSON has the key
twice, the last one counts, as in the engines' own parsers. A form or query with two is refused.
"""

from __future__ import annotations

import ctypes
import json
import mmap
from enum import Enum
from typing import Any, Final, NamedTuple
from urllib.parse import quote_plus, unquote_plus, unquote_to_bytes

import msgspec

from kvelastic.controller.http.refusal import Refusal

MAX_NAME_BYTES: Final = 8192
"""Maximum size of a raw name in a body. Model names have at most 256 characters."""
MAX_FIELDS: Final = 1000
"""Maximum number of fields of a URL-encoded form or a query."""
_KEY: Final = b"model"
_MAX_KEY_BYTES: Final = 3 * len(_KEY)  # each character as %XX


class Form(str, Enum):
    """The encoding of a body."""

    JSON = "json"
    MULTIPART = "multipart"
    URLENCODED = "urlencoded"


class ModelField(NamedTuple):
    """The model's name as the client sent it, and the position of its raw value."""

    name: str
    start: int
    end: int
    form: Form | None = None
    """The encoding of the body, if it was looked for in one; None: the query's."""


class _Named(msgspec.Struct):
    """The only key of a JSON body that is parsed. All others are validated and skipped."""

    model: msgspec.Raw = msgspec.Raw(b"null")


_decode: Final = msgspec.json.Decoder(_Named).decode


def find_in_json(body: bytes | mmap.mmap) -> ModelField | None:
    """Return the value of the top-level key `model`; None if it is absent or null.

    Raises `Refusal` (400) if the body is not JSON (RFC 8259: no NaN, no lone surrogate), is not an
    object, is nested too deeply, or if the model is not a string.
    """
    try:
        value = memoryview(_decode(body).model)
    except msgspec.ValidationError:
        raise Refusal(400, "invalid_json", "The body is not a JSON object.") from None
    except (msgspec.DecodeError, RecursionError):
        raise Refusal(400, "invalid_json", "The body is not JSON.") from None
    with value:
        head = bytes(value[:4])
        if head == b"null":
            return None
        if head[:1] != b'"':
            raise Refusal(400, "invalid_model", "model is not a string.", param="model")
        if len(value) > MAX_NAME_BYTES:
            raise too_long()
        try:
            name = msgspec.json.decode(value, type=str)
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise Refusal(400, "invalid_json", "The body is not JSON.") from None
        start = _address(value) - _address(body)
        return ModelField(name, start, start + len(value))


def find_in_urlencoded(data: bytes | mmap.mmap) -> ModelField | None:
    """Return the field `model` of a URL-encoded form or query, or None. Raises `Refusal` (400)."""
    found: ModelField | None = None
    at = fields = 0
    while at < len(data):
        fields += 1
        if fields > MAX_FIELDS:
            raise Refusal(400, "invalid_form", f"More than {MAX_FIELDS} fields are not read.")
        end = data.find(b"&", at)
        if end < 0:
            end = len(data)
        equals = data.find(b"=", at, end)
        if equals < 0:
            equals = end
        if equals - at <= _MAX_KEY_BYTES and unquote_to_bytes(data[at:equals]) == _KEY:
            if found is not None:
                raise given_twice()
            if end - equals > MAX_NAME_BYTES:
                raise too_long()
            name = unquote_plus(data[equals + 1 : end].decode("latin-1"))
            found = ModelField(name, min(equals + 1, end), end)
        at = end + 1
    return found


def written(name: str, form: Form) -> bytes:
    """Return a name encoded as a value of such a body, to put between `start` and `end`."""
    if form is Form.JSON:
        return json.dumps(name).encode()
    if form is Form.URLENCODED:
        return quote_plus(name, safe="/").encode()
    return name.encode()


def given_twice() -> Refusal:
    """Return a 400 for two fields: it is unknown which of them an engine would use."""
    return Refusal(400, "invalid_model", "The field model is given twice.", param="model")


def too_long() -> Refusal:
    """Return a 400 for a name longer than any model's."""
    message = f"model is longer than {MAX_NAME_BYTES} bytes."
    return Refusal(400, "invalid_model", message, param="model")


# A memoryview does not expose its offset in the buffer, but Python's buffer protocol does.


class _Buffer(ctypes.Structure):
    """`Py_buffer`, part of Python's stable ABI."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_void_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


_get_buffer: Final = ctypes.pythonapi.PyObject_GetBuffer
_get_buffer.argtypes = (ctypes.py_object, ctypes.POINTER(_Buffer), ctypes.c_int)
_release_buffer: Final = ctypes.pythonapi.PyBuffer_Release
_release_buffer.argtypes = (ctypes.POINTER(_Buffer),)
_release_buffer.restype = None


def _address(of: Any) -> int:
    buffer = _Buffer()
    _get_buffer(of, ctypes.byref(buffer), 0)  # raises what the call sets
    address = int(buffer.buf or 0)
    _release_buffer(ctypes.byref(buffer))
    return address
