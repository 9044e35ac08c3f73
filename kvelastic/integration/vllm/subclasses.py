"""Subclasses of the classes that vLLM's platform or the user chose.

vLLM names its worker and scheduler classes in its settings, by path. A module here that has
overriding methods in a mixin serves one subclass for each such class, under a name that contains
the class's path::

    _subclasses = Subclasses(ElasticWorker)
    __getattr__ = _subclasses.find         # of the module
    _subclasses.path("vllm.v1.worker.cpu_worker.CPUWorker")
        # kvelastic.integration.vllm.worker_class.vllm/v1/worker/cpu_worker:CPUWorker

So every process finds the same class by that name, also when it unpickles the class.
"""

from __future__ import annotations

import types
from importlib import import_module
from typing import Any


class Subclasses:
    """The subclasses with the methods of one mixin."""

    def __init__(self, mixin: type) -> None:
        self._mixin = mixin
        self._made: dict[str, type] = {}

    def over(self, base: type) -> type:
        """Return the subclass of `base`, or `base` if it has the mixin already."""
        if issubclass(base, self._mixin):
            return base
        name = _name(base.__module__, base.__qualname__)
        if name not in self._made:
            space = {"__module__": self._mixin.__module__, "__doc__": base.__doc__}
            # Unlike `type(...)`, this finds the metaclass of `base`.
            self._made[name] = types.new_class(
                name, (self._mixin, base), exec_body=lambda body: body.update(space)
            )
        return self._made[name]

    def path(self, base: str) -> str:
        """Return the path of the subclass of the class at `base`, which is not imported."""
        if base.startswith(f"{self._mixin.__module__}."):
            return base
        module, _, name = base.rpartition(".")
        return f"{self._mixin.__module__}.{_name(module, name)}"

    def path_over(self, base: type) -> str:
        """Return the path of the subclass of `base`."""
        made = self.over(base)
        return f"{made.__module__}.{made.__qualname__}"

    def find(self, name: str) -> type:
        """Return the subclass with that name; imports the base. A module's `__getattr__`.

        Raises `AttributeError` for a name that no subclass has.
        """
        if name in self._made:
            return self._made[name]
        module, colon, path = name.replace("/", ".").partition(":")
        if not colon:
            raise AttributeError(f"{self._mixin.__module__} has no attribute {name!r}")
        base: Any = import_module(module)
        for part in path.split("."):
            base = getattr(base, part)
        return self.over(base)


def _name(module: str, name: str) -> str:
    return f"{module}:{name}".replace(".", "/")
