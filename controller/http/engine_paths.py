"""Classifies the engines' paths as inference, or as operations on the engine itself.

Paths under /v1/ are not only inference: vLLM loads adapters there, other servers whole models.
Inference paths are those listed here and in `auth.model_paths`. Every other path under /v1/, and
every other path of an engine under /upstream/, needs an admin key. So paths that a new version of
an engine adds are closed until they are reviewed. This includes GET: SGLang flushes its cache by a
GET.
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
    "/v1/responses", "/v1/responses/",  # and requests about an earlier response
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
"""Inference paths under /v1/. A path with a final slash is a prefix."""
UPSTREAM: Final = "/upstream/"
"""Prefix of a model's name, which is followed by a path of its engine."""
_READS: Final = frozenset(
    ("/health", "/ping", "/version", "/metrics", "/v1/models", "/get_model_info", "/model_info")
)
"""Engine paths that an API key may GET. None of them shows the engine's settings or prompts."""


def is_for_engines(path: str) -> bool:
    """Return True if a path belongs to engines, not to the controller."""
    if path.startswith("/v1/"):
        return path != "/v1/models" and not path.startswith("/v1/models/")
    return path in _OUTSIDE_V1


def is_crooked(path: str) -> bool:
    """Return True if an engine might resolve a decoded path to another one: /v1/../sleep."""
    return "\\" in path or "/." in path or "//" in path or "%" in path


def is_anthropic(path: str) -> bool:
    """Return True for a path of Anthropic's API, whose clients need Anthropic's error format."""
    return path.startswith("/v1/messages") and path[12:13] in {"", "/"}


def is_ollama(path: str) -> bool:
    """Return True for a path of Ollama's API."""
    return path.startswith("/api/")


def is_upstream(path: str) -> bool:
    """Return True for a path that names its model: /upstream/{model}/..."""
    return path.startswith(UPSTREAM)


def is_realtime(path: str) -> bool:
    """Return True if a WebSocket is served at this path."""
    return path == REALTIME or (is_upstream(path) and path.endswith(REALTIME))


def is_read(method: str, path: str) -> bool:
    """Return True for a read of an engine that every client of its model may make."""
    return method in {"GET", "HEAD"} and path in _READS


class ModelPaths:
    """The set of paths that need only an API key."""

    def __init__(self, more: Iterable[str] = ()) -> None:
        paths = (*_OUTSIDE_V1, *INFERENCE, *more)
        self._exact = frozenset(path for path in paths if not path.endswith("/"))
        self._below = tuple(path for path in paths if path.endswith("/"))

    def __contains__(self, path: str) -> bool:
        return path in self._exact or path.startswith(self._below)
