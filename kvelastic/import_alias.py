"""Lets one of kvelastic's packages be imported under the name of the package that it replaces.

    flexkv = ImportAlias("flexkv", lambda name: importlib.import_module(f"kvelastic.{name}"))
    flexkv.switch_on()                                  # `import flexkv` finds kvelastic.flexkv

An installed package of that name takes precedence as a whole.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class ImportAlias(MetaPathFinder, Loader):
    """Finds and loads the modules of one name. Any thread may call."""

    def __init__(self, name: str, module_of: Callable[[str], ModuleType]) -> None:
        """`module_of` returns the module of a name; it raises `ModuleNotFoundError` for others."""
        self._name = name
        self._module_of = module_of
        self._modules: dict[str, ModuleType] = {}

    def switch_on(self) -> None:
        """Enable the alias in this process. Idempotent."""
        if self not in sys.meta_path:
            # Before Python's own finders, which would load modules again from a package's path.
            sys.meta_path.insert(0, self)

    def switch_off(self) -> None:
        """Disable the alias. Modules imported through it stay usable.

        Their alias names are removed; otherwise Python would load further modules a second time
        from the package's path.
        """
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        for name, module in self._modules.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module; None for other names, and for an installed package's."""
        if fullname.partition(".")[0] != self._name or self._is_installed():
            return None
        try:
            module = self._modules[fullname] = self._module_of(fullname)
        except ModuleNotFoundError as error:
            missing = error.name or ""
            if missing != fullname and not f"kvelastic.{fullname}".startswith(missing or "."):
                raise  # a package that the module needs
            return None
        return ModuleSpec(fullname, self, is_package=hasattr(module, "__path__"))

    def _is_installed(self) -> bool:
        """Whether a package of that name is imported, or another finder finds it."""
        package = sys.modules.get(self._name)
        if package is not None:
            return package is not self._modules.get(self._name)
        others = [finder for finder in sys.meta_path if finder is not self]
        return any(finder.find_spec(self._name, None) is not None for finder in others)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return kvelastic's module; remember its own spec."""
        module = self._modules[spec.name]
        spec.loader_state = module.__spec__, module.__loader__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the module's spec, which the import replaced. The module has run already."""
        assert module.__spec__ is not None
        module.__spec__, module.__loader__ = module.__spec__.loader_state
