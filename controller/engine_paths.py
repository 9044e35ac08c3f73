"""Paths that are for engines, and what each is: inference, or an operation on the engine itself.

Under /v1/ engines do not only compute: vLLM loads adapters there, other servers whole models.
Inference is what is listed here or in `auth.model_paths`; every other path under /v1/, and under
/upstream/ every other path of an engine, needs an admin key, so what an engine's next version adds
is closed until somebody has looked at it. Also with GET: SGLang empties its cache by that.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

ENGINE_METHODS: Final = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"))

_OUTSIDE_V1: Final = frozenset(
    ("/tokenize", "/detokenize", "/rerank", "/v2/rerank", "/score", "/pooling", "/classify")
)
REALTIME: Final = "/v1/realtime"
INFERENCE: Final = (
    # OpenAI's
    "/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/v1/moderations",
    "/v1/responses", "/v1/responses/",  # and what is asked of an earlier response
    REALTIME, "/v1/audio/transcriptions", "/v1/audio/translations", "/v1/audio/speech",
    "/v1/images/generations", "/v1/images/edits", "/v1/images/variations",
    # Anthropic's
    "/v1/messages", "/v1/messages/count_tokens",
    # vLLM's and SGLang's own
    "/v1/chat/completions/batch", "/v1/rerank", "/v1/score", "/v1/classify", "/v1/pooling",
    "/v1/tokenize", "/v1/detokenize", "/v1/systemone",
    "/v1/completions/render", "/v1/completions/derender",
    "/v1/chat/completions/render", "/v1/chat/completions/derender", "/v1/messages/render",
)  # fmt: skip
"""One that ends in a slash stands for everything below it."""
UPSTREAM: Final = "/upstream/"
"""Before a model's name, and that before any path of its engine."""
_READS: Final = frozenset(
    ("/health", "/ping", "/version", "/metrics", "/v1/models", "/get_model_info", "/model_info")
)
"""What holders of an API key may also get of an engine. Not what shows its settings or prompts."""


def is_for_engines(path: str) -> bool:
    """Whether a path is an engine's, and not one of the controller's own."""
    if path.startswith("/v1/"):
        return path != "/v1/models" and not path.startswith("/v1/models/")
    return path in _OUTSIDE_V1


def is_crooked(path: str) -> bool:
    """Whether an engine might read another path out of a decoded one: /v1/../sleep."""
    return "\\" in path or "/." in path or "//" in path or "%" in path


def is_anthropic(path: str) -> bool:
    """Whether Anthropic's clients ask there, who know errors in Anthropic's shape only."""
    return path.startswith("/v1/messages") and path[12:13] in {"", "/"}


def is_ollama(path: str) -> bool:
    """Whether it is of Ollama's API."""
    return path.startswith("/api/")


def is_upstream(path: str) -> bool:
    """Whether it is for the engine of the model that it names itself."""
    return path.startswith(UPSTREAM)


def is_realtime(path: str) -> bool:
    """Whether a WebSocket is served there."""
    return path == REALTIME or (is_upstream(path) and path.endswith(REALTIME))


def is_read(method: str, path: str) -> bool:
    """Whether a request to an engine only tells what every client of its model may know."""
    return method in {"GET", "HEAD"} and path in _READS


class ModelPaths:
    """The paths that an API key is good for."""

    def __init__(self, more: Iterable[str] = ()) -> None:
        paths = (*_OUTSIDE_V1, *INFERENCE, *more)
        self._exact = frozenset(path for path in paths if not path.endswith("/"))
        self._below = tuple(path for path in paths if path.endswith("/"))

    def __contains__(self, path: str) -> bool:
        return path in self._exact or path.startswith(self._below)
