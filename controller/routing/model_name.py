"""Finds the model named in a request's body or query, and replaces it by the engine's name for it.

field = await find_name(body, content_type, query, reader)
query = rename(field, "the engine's name", body, query)
"""

from __future__ import annotations

from typing import Final

from kvelastic.controller.http.refusal import Refusal
from kvelastic.controller.http.request_body import Body
from kvelastic.controller.routing.body_reader import BodyReader
from kvelastic.controller.routing.body_worker import find_model
from kvelastic.controller.routing.model_field import Form, ModelField, find_in_urlencoded, written
from kvelastic.controller.routing.multipart_field import boundary_of

_READ_HERE_BYTES: Final = {Form.MULTIPART: 64 << 10}
"""Maximum size that is parsed in the loop, for slow forms. The parser of multipart forms is Python
and takes up to 0.5 us per byte of headers."""


async def find_name(
    body: Body, content_type: bytes | None, query: bytes, reader: BodyReader
) -> ModelField:
    """Return the model named in a request. Waits if the body is large. Raises `Refusal`."""
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
    return _given(field)._replace(form=form)


def name_in_query(query: bytes) -> ModelField:
    """Return the model named in a query. Raises `Refusal`."""
    return _given(find_in_urlencoded(query))


def rename(field: ModelField, name: str, body: Body, query: bytes) -> bytes:
    """Replace the name in the body or query and change nothing else; return the query.

    Raises `Refusal` (503) if the new body exceeds the budget.
    """
    if field.form is None:
        return rename_in_query(field, name, query)
    body.replace(field.start, field.end, written(name, field.form))
    return query


def rename_in_query(field: ModelField, name: str, query: bytes) -> bytes:
    """Return the query with the name replaced."""
    return query[: field.start] + written(name, Form.URLENCODED) + query[field.end :]


def _given(field: ModelField | None) -> ModelField:
    if field is None or not field.name:
        raise Refusal(400, "model_missing", "The model parameter is required.", param="model")
    return field


def _form_of(body: Body, content_type: bytes) -> Form | None:
    """Return the encoding of a body; None if it is empty or of another type."""
    if body.size == 0:
        return None
    kind = content_type.split(b";", 1)[0].strip().lower()
    if kind in {b"application/json", b""}:
        return Form.JSON
    if kind == b"multipart/form-data":
        return Form.MULTIPART
    if body.begins_with(b"{"):  # `curl -d` declares JSON as a URL-encoded form
        return Form.JSON
    return Form.URLENCODED if kind == b"application/x-www-form-urlencoded" else None
