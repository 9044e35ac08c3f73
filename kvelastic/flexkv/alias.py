"""Makes `import flexkv` import `kvelastic.flexkv`, unless FlexKV itself is installed.

    from kvelastic.flexkv import alias
    alias.switch_on()

    KVELASTIC_FLEXKV_ALIAS=true vllm serve ...    # in every Python process, from its start

The alias is off by default, and no package named flexkv is installed. A module is the same object
under both names, so its classes are identical. An installed FlexKV has precedence.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Final

ALIAS: Final = "flexkv"
TARGET: Final = "kvelastic.flexkv"


def switch_on() -> None:
    """Enable the alias in this process. Idempotent; any thread may call."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        # Before Python's own finders, which would load the modules again from the package's path.
        sys.meta_path.insert(0, _Finder())


def switch_off() -> None:
    """Disable the alias. Modules imported through it stay usable.

    Their alias names are removed; otherwise Python would load further modules a second time from
    the package's path.
    """
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]
    if ALIAS in sys.modules and sys.modules[ALIAS] is sys.modules.get(TARGET):
        for name in [one for one in sys.modules if one == ALIAS or one.startswith(f"{ALIAS}.")]:
            del sys.modules[name]


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of kvelastic's module, unless FlexKV itself is installed."""
        if fullname != ALIAS and not fullname.startswith(f"{ALIAS}."):
            return None
        if self._is_installed():
            return None
        real = TARGET + fullname.removeprefix(ALIAS)
        try:
            found = importlib.util.find_spec(real)
        except ModuleNotFoundError:
            return None
        if found is None:
            return None
        is_package = found.submodule_search_locations is not None
        return ModuleSpec(fullname, _Loader(real), is_package=is_package)

    def _is_installed(self) -> bool:
        """Whether FlexKV itself is imported, or another finder finds it."""
        package = sys.modules.get(ALIAS)
        if package is not None:
            return package is not sys.modules.get(TARGET)
        others = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]
        return any(finder.find_spec(ALIAS, None) is not None for finder in others)


class _Loader(Loader):
    """Loads the module under its own name and returns the same object."""

    def __init__(self, real: str) -> None:
        self._real = real

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return kvelastic's module; remember its own spec."""
        module = importlib.import_module(self._real)
        self._own = module.__spec__, getattr(module, "__loader__", None)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the module's spec, which the import replaced. The module has run already."""
        module.__spec__, module.__loader__ = self._own
