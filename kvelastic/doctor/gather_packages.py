"""What is installed beside kvelastic, without importing any of it."""

from __future__ import annotations

import sys
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Final

from kvelastic import engine_versions
from kvelastic.doctor.facts import PackageFacts

# Distribution, and the module that it brings; a module in a namespace package is not looked for.
_WANTED: Final = {
    "vllm": "vllm",
    "sglang": "sglang",
    "torch": "torch",
    "kvcached": "kvcached",
    "cuda-python": "",
    "cuda-bindings": "",
    "nvidia-ml-py": "pynvml",
}
_VLLM_GROUP: Final = "vllm.general_plugins"


def gather_packages() -> PackageFacts:
    """Versions by their metadata, and the plugins that vLLM will find in this environment."""
    try:
        from kvelastic import _vmm  # noqa: F401  (whether it can be imported is the question)

        native_error = ""
    except ImportError as error:
        native_error = str(error)
    versions = {name: _version(name, module) for name, module in _WANTED.items()}
    return PackageFacts(
        python=(sys.version_info.major, sys.version_info.minor, sys.version_info.micro),
        native_error=native_error,
        versions=tuple(versions.items()),
        vllm_plugins=tuple(sorted({point.name for point in _vllm_plugins()})),
        vllm_hooks=_vllm_hooks(versions["vllm"] or ""),
    )


def _vllm_hooks(version: str) -> tuple[str, ...]:
    """By the integration's own table; it imports neither vLLM nor torch."""
    series = engine_versions.series_of(version)
    if series is None or series not in engine_versions.VLLM:
        return ()
    table = import_module(engine_versions.VLLM_HOOKS).HOOKS
    return tuple(hook.path.partition(":")[2] for hook in table)


def _version(distribution: str, module: str) -> str | None:
    try:
        # None is what a broken installation answers (a folder of metadata without its file).
        return metadata.version(distribution) or "unknown"
    except metadata.PackageNotFoundError:
        return "unknown" if module and _is_importable(module) else None


def _is_importable(module: str) -> bool:
    """Whether there is such a top-level module; a mere folder of that name is not."""
    try:
        spec = find_spec(module)
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.origin is not None


def _vllm_plugins() -> metadata.EntryPoints:
    return metadata.entry_points(group=_VLLM_GROUP)
