"""Makes `import llm_datadist` find `kvelastic.datadist` if LLM-DataDist is not installed.

    from kvelastic import datadist_alias
    datadist_alias.switch_on()

    KVELASTIC_LLM_DATADIST_ALIAS=true python app.py     # the same in every Python process

Off by default; no package of that name is installed. `llm_datadist` has all public names, and its
modules have the names of the original's modules (`MODULES`). An installed LLM-DataDist always takes
precedence as a whole. Nothing of the interface is imported before a program imports that name.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Final

ALIAS: Final = "llm_datadist"
TARGET: Final = "kvelastic.datadist"

_TYPES: Final = (
    "BlocksCacheKey",
    "Cache",
    "CacheDesc",
    "CacheKey",
    "CacheKeyByIdAndIndex",
    "CacheTask",
    "DataType",
    "KvCache",
    "LayerSynchronizer",
    "MemInfo",
    "Memtype",
    "Placement",
    "RegisterMemStatus",
    "TransferConfig",
    "TransferWithCacheKeyConfig",
)

MODULES: Final[dict[str, tuple[str, ...] | None]] = {
    ALIAS: None,
    f"{ALIAS}.configs": ("LLMClusterInfo", "LLMRole", "LlmConfig"),
    f"{ALIAS}.data_type": ("DataType",),
    f"{ALIAS}.status": ("LLMException", "LLMStatusCode", "Status"),
    f"{ALIAS}.v2": (),
    f"{ALIAS}.v2.cache_manager": ("CacheManager",),
    f"{ALIAS}.v2.kv_cache_manager": ("KvCacheManager",),
    f"{ALIAS}.v2.llm_datadist": ("LLMDataDist",),
    f"{ALIAS}.v2.llm_types": _TYPES,
}
"""The names in each module; None: all public names."""

_PACKAGES: Final = {name.rpartition(".")[0] for name in MODULES}


def switch_on() -> None:
    """Make this process find `llm_datadist` here. Idempotent. Thread-safe."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())  # last, so that an installed package is found first


def switch_off() -> None:
    """Stop finding it. Imported modules stay imported."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of an alias module; None for others, and inside an installed package."""
        if fullname not in MODULES:
            return None
        parent = sys.modules.get(fullname.rpartition(".")[0])
        if parent is not None and not isinstance(getattr(parent, "__loader__", None), _Loader):
            return None
        return ModuleSpec(fullname, _Loader(), is_package=fullname in _PACKAGES)


class _Loader(Loader):
    def exec_module(self, module: ModuleType) -> None:
        """Fill the alias module with its names."""
        found = importlib.import_module(TARGET)
        names = MODULES[module.__name__]
        public: Sequence[str] = found.__all__ if names is None else names
        module.__doc__ = found.__doc__
        vars(module).update({name: getattr(found, name) for name in public}, __all__=list(public))
