"""Installed as `torch` beside kvcached: as much of PyTorch as its setup and command line use.

kvcached's extension needs CUDA's compiler, and its command line does not need the extension. The
machine has one GPU of 1 GiB, a quarter of which is free.
"""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

_GPU_BYTES = 1 << 30

__version__ = "2.10.0"
_C = SimpleNamespace(_GLIBCXX_USE_CXX11_ABI=True)
version = SimpleNamespace(cuda="13.0", hip=None)
cuda = SimpleNamespace(
    is_available=lambda: True,
    get_device_properties=lambda _: SimpleNamespace(total_memory=_GPU_BYTES),
    mem_get_info=lambda: (_GPU_BYTES // 4, _GPU_BYTES),
)


def _cpp_extension() -> ModuleType:
    from setuptools import Extension
    from setuptools.command.build_ext import build_ext

    class BuildNothing(build_ext):
        def run(self) -> None:
            pass

        def get_outputs(self) -> list[str]:
            return []

    module: Any = ModuleType("torch.utils.cpp_extension")
    module.BuildExtension = BuildNothing
    module.CppExtension = module.CUDAExtension = lambda name, *_, **__: Extension(name, [])
    module.include_paths = module.library_paths = lambda **_: []
    return module


if "setuptools" in sys.modules:
    sys.modules["torch.utils"] = ModuleType("torch.utils")
    sys.modules["torch.utils.cpp_extension"] = _cpp_extension()
