"""Finds the field `model` of a multipart form, with the parser that the engines' servers use.

Other parts (files) are skipped and not stored. The parser reads delimiters and the headers after
them byte by byte in Python, so their number and size are bounded.
"""

from __future__ import annotations

import logging
import mmap
from typing import Final

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from kvelastic.controller.http.refusal import Refusal
from kvelastic.controller.routing.model_field import (
    MAX_NAME_BYTES,
    ModelField,
    given_twice,
    too_long,
)

MAX_PARTS: Final = 256
MAX_HEADERS: Final = 32
MAX_HEADER_BYTES: Final = 2048
"""Maximum size of one part's headers together; for the first part, of each header."""
MAX_TYPE_BYTES: Final = 1024
"""Maximum length of the request's Content-Type."""
_CHUNK_BYTES: Final = 1 << 20

_log = logging.getLogger("python_multipart")  # would log a line per invalid request
_log.addHandler(logging.NullHandler())
_log.propagate = False


def boundary_of(content_type: bytes) -> bytes:
    """Return the boundary between the parts. Raises `Refusal` (400)."""
    if len(content_type) <= MAX_TYPE_BYTES:
        boundary = parse_options_header(content_type)[1].get(b"boundary", b"")
        if 0 < len(boundary) <= 256:
            return boundary
    raise Refusal(400, "invalid_form", "The form's Content-Type has no boundary that can be used.")


def find_in_multipart(
    body: bytes | mmap.mmap, boundary: bytes, chunk_bytes: int = _CHUNK_BYTES
) -> ModelField | None:
    """Return the field `model`, or None if it is missing. Raises `Refusal` (400)."""
    _check_delimiters(body, b"\r\n--" + boundary)
    reader = _Reader(boundary)
    try:
        for at in range(0, len(body), chunk_bytes):
            reader.write(body[at : at + chunk_bytes], at)
    except FormParserError:
        raise Refusal(400, "invalid_form", "The body is not a multipart form.") from None
    value = reader.value
    if value is None:
        return None
    start = body.find(b"\r\n\r\n", reader.headers_end) + 4
    end = start + len(value)
    if body[start:end] != value:
        raise Refusal(400, "invalid_form", "The field model does not stand in one piece.")
    return ModelField(value.decode("utf-8", "replace"), start, end)


def _check_delimiters(body: bytes | mmap.mmap, delimiter: bytes) -> None:
    """Bound the delimiters, including false ones: each costs the parser time. Raises `Refusal`."""
    at = count = 0
    while (at := body.find(delimiter, at)) >= 0:
        at += len(delimiter)
        count += 1
        if count > MAX_PARTS:
            raise Refusal(400, "invalid_form", f"More than {MAX_PARTS} parts are not read.")
        is_last = body[at : at + 2] == b"--"
        if not is_last and body.find(b"\r\n\r\n", at, at + MAX_HEADER_BYTES) < 0:
            message = f"A part's headers are longer than {MAX_HEADER_BYTES} bytes, or have no end."
            raise Refusal(400, "invalid_form", message)


class _Reader:
    """The parser's callbacks. They track the current part and store the value of `model`."""

    def __init__(self, boundary: bytes) -> None:
        self.value: bytes | None = None
        self.headers_end = 0
        """Position of the end of the field's last header with a value."""
        self._at = 0
        self._header_end = 0
        self._header_name = self._header_value = self._disposition = b""
        self._data: bytearray | None = None
        """The data of the current part if it is the field; else None."""
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._part_begin,
                "on_part_data": self._part_data,
                "on_part_end": self._part_end,
                "on_header_field": self._on_header_name,
                "on_header_value": self._on_header_value,
                "on_header_end": self._on_header_end,
                "on_headers_finished": self._headers_finished,
            },
            max_header_count=MAX_HEADERS,
            max_header_size=MAX_HEADER_BYTES,
        )

    def write(self, data: bytes, at: int) -> None:
        """Parse the next bytes, which begin at position `at` of the body."""
        self._at = at
        self._parser.write(data)

    def _part_begin(self) -> None:
        self._disposition = b""
        self._data = None

    def _on_header_name(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]
        self._header_end = self._at + end

    def _on_header_end(self) -> None:
        if self._header_name.lower() == b"content-disposition":
            self._disposition = self._header_value
        self._header_name = self._header_value = b""

    def _headers_finished(self) -> None:
        _, options = parse_options_header(self._disposition)
        if options.get(b"name") == b"model" and b"filename" not in options:
            if self.value is not None:
                raise given_twice()
            self._data = bytearray()
            self.headers_end = self._header_end

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        if self._data is not None:
            if len(self._data) + end - start > MAX_NAME_BYTES:
                raise too_long()
            self._data += data[start:end]

    def _part_end(self) -> None:
        if self._data is not None:
            self.value = bytes(self._data)
            self._data = None
