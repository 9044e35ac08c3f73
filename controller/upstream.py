"""/upstream/{model}/...: a request for one model's engine, passed on as it is.

    /upstream/org/model-a/v1/completions?x=1   ->  /v1/completions?x=1  at an engine of org/model-a

It waits at the model's gate, wakes or starts it, and counts as in flight, as every request; only
that its model stands in the path, and nothing is read or changed of its body. Whatever is not
inference needs an admin key there, as everywhere (`engine_paths`).

A web page from there would be one of the controller's own origin, and could use the key that the
dashboard keeps. So browsers are told to treat it as a page of nobody (`Content-Security-Policy`).
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple
from urllib.parse import unquote_to_bytes

from kvelastic.controller.engine_paths import ENGINE_METHODS, UPSTREAM, is_crooked
from kvelastic.controller.fleet import Fleet
from kvelastic.controller.forward import ASKED_PATH, NAMED_MODEL
from kvelastic.controller.keys import Keys
from kvelastic.controller.refusal import Refusal, unknown_model
from kvelastic.controller.served_model import ServedModel

_NAME_LENGTH: Final = 256
"""No model's name is longer."""


class Target(NamedTuple):
    """A model, and the path at its engine."""

    model: ServedModel
    path: str
    """Decoded."""
    raw_path: bytes


def find_target(raw_path: bytes, fleet: Fleet) -> Target | None:
    """Which model a path names; of two that both fit the longer name. None: it names none."""
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
    """The scope of the request to the engine. Raises `Refusal`."""
    target = find_target(scope["raw_path"], fleet)
    if target is None:
        keys.check_api(scope["headers"])  # who may not ask learns no model's name
        raise unknown_model(scope["path"][len(UPSTREAM) :].partition("/")[0])
    if scope.get("method", "GET") not in ENGINE_METHODS:
        raise Refusal(405, "method_not_allowed", "Not allowed here.")
    # An encoded slash is one for some engines and none for others.
    if is_crooked(target.path) or b"%2f" in target.raw_path.lower():
        raise Refusal(400, "invalid_path", "The path has dots or escapes in it.")
    return {
        **scope,
        "path": target.path,
        "raw_path": target.raw_path,
        ASKED_PATH: scope["path"],
        NAMED_MODEL: target.model,
    }
