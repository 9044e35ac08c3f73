"""Makes `import llm_datadist` mean `kvelastic.datadist`, where LLM-DataDist is not installed.

    from kvelastic import datadist_alias
    datadist_alias.switch_on()

    KVELASTIC_LLM_DATADIST_ALIAS=true python app.py     # the same in every Python process

Nothing of the kind is on by itself, and no package of that name is installed. The module has the
public names and no submodules; an installed LLM-DataDist always goes first. Imports nothing of the
interface before somebody imports that name.
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


def switch_on() -> None:
    """From now on this process finds `llm_datadist` here. Repeatable, from any thread."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())  # the last: one that is installed is found before


def switch_off() -> None:
    """Do not find it any more; where it has been imported it stays imported."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The one module of this name."""
        return ModuleSpec(fullname, _Loader()) if fullname == ALIAS else None


class _Loader(Loader):
    def exec_module(self, module: ModuleType) -> None:
        """Give it the public names."""
        found = importlib.import_module(TARGET)
        names: list[str] = found.__all__
        module.__doc__ = found.__doc__
        vars(module).update({name: getattr(found, name) for name in names}, __all__=list(names))
