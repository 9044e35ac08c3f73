"""Stands for SGLang's package of GPU kernels, of which there is no build for a CPU.

SGLang imports functions from it whatever device it runs on. Here any of its modules can be imported
and has any name; to call one raises, so that a test cannot pass by work that was never done.
"""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

__version__ = "0.4.10"


class AbsentKernel:
    """A function of sgl_kernel that this machine cannot have."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{self._path} needs SGLang's GPU kernels")

    def __getattr__(self, name: str) -> AbsentKernel:
        return _absent(self._path, name)


def _absent(path: str, name: str) -> AbsentKernel:
    # Whoever asks for a dunder wants to know what kind of object this is.
    if name.startswith("__"):
        raise AttributeError(name)
    return AbsentKernel(f"{path}.{name}")


def __getattr__(name: str) -> AbsentKernel:
    return _absent(__name__, name)


class _Submodules(MetaPathFinder, Loader):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if not fullname.startswith(f"{__name__}."):
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: Any) -> None:
        module.__getattr__ = lambda name: _absent(module.__name__, name)


sys.meta_path.append(_Submodules())
