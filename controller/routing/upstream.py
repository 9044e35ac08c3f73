"""/upstream/{model}/...: a request for one model's engine, forwarded unchanged.

    /upstream/org/model-a/v1/completions?x=1   ->  /v1/completions?x=1  at an engine of org/model-a

Like every request it waits at the model's gate, wakes or starts the model, and counts as in flight.
The difference is that the path names the model, and the body is neither parsed nor changed. Paths
other than inference need an admin key here too (`engine_paths`).

A web page served here would have the controller's origin and could use the key stored by the
dashboard. So its `Content-Security-Policy` makes browsers give it a unique origin.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple
from urllib.parse import unquote_to_bytes

from kvelastic.controller.http.engine_paths import ENGINE_METHODS, UPSTREAM, is_crooked
from kvelastic.controller.http.keys import Keys
from kvelastic.controller.http.refusal import Refusal, unknown_model
from kvelastic.controller.models.fleet import Fleet
from kvelastic.controller.models.served_model import ServedModel
from kvelastic.controller.routing.forward import ASKED_PATH, NAMED_MODEL

_NAME_LENGTH: Final = 256
"""Maximum length of a model's name."""


class Target(NamedTuple):
    """A model, and the path at its engine."""

    model: ServedModel
    path: str
    """The decoded path."""
    raw_path: bytes


def find_target(raw_path: bytes, fleet: Fleet) -> Target | None:
    """Return the model that a path names and the path at its engine, or None.

    If several names match, the longest is used.
    """
    found = None
    name, end = "", len(UPSTREAM) - 1
    for segment in raw_path[len(UPSTREAM) :].split(b"/"):
        decoded = unquote_to_bytes(segment).decode("utf-8", "replace")
        name = f"{name}/{decoded}" if name else decoded
        end += 1 + len(segment)
        if len(name) > _NAME_LENGTH:
            break
        model = fleet.find(name)
        if model is not None:
            raw = raw_path[end:] or b"/"
            found = Target(model, unquote_to_bytes(raw).decode("utf-8", "replace"), raw)
    return found


def to_upstream(scope: Any, fleet: Fleet, keys: Keys) -> Any:
    """Return the ASGI scope of the request to the engine. Raises `Refusal`."""
    target = find_target(scope["raw_path"], fleet)
    if target is None:
        keys.check_api(scope["headers"])  # do not reveal model names without a valid key
        raise unknown_model(scope["path"][len(UPSTREAM) :].partition("/")[0])
    if scope.get("method", "GET") not in ENGINE_METHODS:
        raise Refusal(405, "method_not_allowed", "Not allowed here.")
    # Engines differ in whether they decode an encoded slash.
    if is_crooked(target.path) or b"%2f" in target.raw_path.lower():
        raise Refusal(400, "invalid_path", "The path has dots or escapes in it.")
    return {
        **scope,
        "path": target.path,
        "raw_path": target.raw_path,
        ASKED_PATH: scope["path"],
        NAMED_MODEL: target.model,
    }
