"""Hugging Face transformers: loaded by `kvelastic.startup`, its continuous batching not hooked yet.

    from kvelastic.integration.transformers import ElasticCache     # for model.generate

Importing this package imports nothing of the above, and neither torch nor transformers: asking for
`ElasticCache` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvelastic.integration.transformers.elastic_cache import ElasticCache

__all__ = ["ElasticCache"]


def __getattr__(name: str) -> Any:
    if name == "ElasticCache":
        from kvelastic.integration.transformers.elastic_cache import ElasticCache

        return ElasticCache
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
