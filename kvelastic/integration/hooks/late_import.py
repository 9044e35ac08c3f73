"""Calls a function right after a module has been imported, without importing it now.

kvelastic is loaded long before an engine: while vLLM parses its command line, in small helper
processes that never run an engine, or (for transformers) when Python itself starts. Importing an
engine there to patch it would cost each process seconds. Because of the start of Python, this
module imports almost nothing.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # typing.TYPE_CHECKING would cost the import of typing
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.abc import Loader, MetaPathFinder
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import TypeAlias

    Action: TypeAlias = Callable[[ModuleType], None]
else:
    # The import system asks for the methods only.
    Loader = MetaPathFinder = object


def when_imported(name: str, action: Action) -> None:
    """Call `action(module)` after `name` is imported; immediately if it already is.

    An error of `action` is raised by the import statement. The module is then removed, so it is
    never left partly patched, and a second import tries again. There is one action per name.
    """
    module = sys.modules.get(name)
    if module is not None:
        action(module)
        return
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    _finder.actions[name] = action


def armed() -> tuple[str, ...]:
    """Names of modules with a pending or completed action in this process."""
    return tuple(_finder.actions)


class _Finder(MetaPathFinder):
    """The first finder in `sys.meta_path`. Other finders find the module; it wraps the loader."""

    def __init__(self) -> None:
        self.actions: dict[str, Action] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the other finders' spec with a loader that runs the action after loading."""
        action = self.actions.get(fullname)
        if action is None:
            return None
        for finder in sys.meta_path:
            look = getattr(finder, "find_spec", None)
            if finder is self or look is None:
                continue
            spec: ModuleSpec | None = look(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, action)
                return spec
        return None


_finder = _Finder()


class _Loader(Loader):
    """Delegates to the wrapped loader, then runs the action on the module."""

    def __init__(self, inner: Loader, action: Action) -> None:
        self._inner = inner
        self._action = action

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Delegate to the wrapped loader."""
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Run the module's code, then the action."""
        self._inner.exec_module(module)
        # Tools that read sources (inspect, linecache) ask the module for its real loader.
        module.__loader__ = self._inner
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner
        self._action(module)
