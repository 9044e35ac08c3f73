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
from types import ModuleType
from typing import Final

from kvelastic.import_alias import ImportAlias

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
    "llm_datadist": None,
    "llm_datadist.configs": ("LLMClusterInfo", "LLMRole", "LlmConfig"),
    "llm_datadist.data_type": ("DataType",),
    "llm_datadist.status": ("LLMException", "LLMStatusCode", "Status"),
    "llm_datadist.v2": (),
    "llm_datadist.v2.cache_manager": ("CacheManager",),
    "llm_datadist.v2.kv_cache_manager": ("KvCacheManager",),
    "llm_datadist.v2.llm_datadist": ("LLMDataDist",),
    "llm_datadist.v2.llm_types": _TYPES,
}
"""The names in each module; None: all public names."""


def _module_of(name: str) -> ModuleType:
    """Return a module with the names of an alias module."""
    if name not in MODULES:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    found = importlib.import_module("kvelastic.datadist")
    names = MODULES[name]
    public = found.__all__ if names is None else names
    module = ModuleType(name, found.__doc__)
    vars(module).update({one: getattr(found, one) for one in public}, __all__=list(public))
    if any(other.startswith(f"{name}.") for other in MODULES):
        module.__path__ = []
    return module


_ALIAS: Final = ImportAlias("llm_datadist", _module_of)
switch_on = _ALIAS.switch_on
switch_off = _ALIAS.switch_off
