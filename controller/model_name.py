"""Which model a request is for, and its name made the engine's own: in the body, else in the query.

named = await find_name(body, content_type, query, reader)
query = rename(named, "the engine's name", body, query)
"""

from __future__ import annotations

from typing import Final, NamedTuple

from kvelastic.controller.body_reader import BodyReader
from kvelastic.controller.body_worker import find_model
from kvelastic.controller.model_field import (
    Form,
    ModelField,
    find_in_urlencoded,
    written,
)
from kvelastic.controller.multipart_field import boundary_of
from kvelastic.controller.refusal import Refusal
from kvelastic.controller.request_body import Body

_READ_HERE_BYTES: Final = {Form.MULTIPART: 64 << 10}
"""Of forms that take more than some milliseconds of the loop at the size of a small body: the
parser of multipart forms is Python, and takes up to 0.5 us a byte of headers."""


class Named(NamedTuple):
    """The model's name, and where it was found."""

    field: ModelField
    form: Form | None
    """Of the body; None: in the query."""

    @property
    def name(self) -> str:
        """As the client wrote it."""
        return self.field.name


async def find_name(
    body: Body, content_type: bytes | None, query: bytes, reader: BodyReader
) -> Named:
    """The model that a request names. Waits where the body is large. Raises `Refusal`."""
    form = _form_of(body, content_type or b"")
    field: ModelField | None = None
    if form is not None:
        boundary = boundary_of(content_type or b"") if form is Form.MULTIPART else b""
        data = body.in_memory
        if data is not None and len(data) <= _READ_HERE_BYTES.get(form, len(data)):
            field = find_model(data, form, boundary)
        else:
            field = await reader.find_model(body.to_file(), form, boundary)
    if field is None:
        return name_in_query(query)
    return Named(_given(field), form)


def name_in_query(query: bytes) -> Named:
    """The model that a query names. Raises `Refusal`."""
    return Named(_given(find_in_urlencoded(query)), None)


def rename(named: Named, name: str, body: Body, query: bytes) -> bytes:
    """Put another name in its place, and touch nothing else. Returns the query.

    Raises `Refusal` (503) if that is more than the budget has.
    """
    if named.form is None:
        return rename_in_query(named, name, query)
    _, start, end = named.field
    body.replace(start, end, written(name, named.form))
    return query


def rename_in_query(named: Named, name: str, query: bytes) -> bytes:
    """Put another name in its place; returns the query."""
    _, start, end = named.field
    return query[:start] + written(name, Form.URLENCODED) + query[end:]


def _given(field: ModelField | None) -> ModelField:
    if field is None or not field.name:
        raise Refusal(400, "model_missing", "The model parameter is required.", param="model")
    return field


def _form_of(body: Body, content_type: bytes) -> Form | None:
    """How a body is read; None: not at all."""
    if body.size == 0:
        return None
    kind = content_type.split(b";", 1)[0].strip().lower()
    if kind in {b"application/json", b""}:
        return Form.JSON
    if kind == b"multipart/form-data":
        return Form.MULTIPART
    if body.begins_with(b"{"):  # `curl -d` calls all that it sends a form
        return Form.JSON
    return Form.URLENCODED if kind == b"application/x-www-form-urlencoded" else None
