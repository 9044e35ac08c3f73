"""kvelastic: KV cache memory that follows use.

Importing this package loads nothing else. Public names are imported on first use, so an engine
process that does not enable kvelastic spends well under a millisecond.
"""

from __future__ import annotations

TYPE_CHECKING = False  # typing.TYPE_CHECKING would cost the import of typing
if TYPE_CHECKING:
    from kvelastic.config import Config
    from kvelastic.config import load as load_config
    from kvelastic.errors import KvelasticError
    from kvelastic.pool.layout import PageLayout
    from kvelastic.units import format_size, parse_size

__version__ = "0.1.0"

__all__ = [
    "Config", "KvelasticError", "PageLayout", "__version__", "format_size", "load_config",
    "parse_size",
]  # fmt: skip

# public name -> (its module, its name there)
_HOMES = {
    "Config": ("kvelastic.config", "Config"),
    "KvelasticError": ("kvelastic.errors", "KvelasticError"),
    "PageLayout": ("kvelastic.pool.layout", "PageLayout"),
    "format_size": ("kvelastic.units", "format_size"),
    "load_config": ("kvelastic.config", "load"),
    "parse_size": ("kvelastic.units", "parse_size"),
}


if not TYPE_CHECKING:  # else a type checker would accept any name

    def __getattr__(name: str) -> object:
        """Import the module of a public name on first use (PEP 562)."""
        home = _HOMES.get(name)
        if home is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        value = getattr(import_module(home[0]), home[1])
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
