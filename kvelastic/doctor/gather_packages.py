"""What is installed beside kvelastic, without importing any of it."""

from __future__ import annotations

import sys
from importlib import metadata
from importlib.util import find_spec
from typing import Final

from kvelastic.doctor.facts import PackageFacts
from kvelastic.engines import ENGINES

# Distribution, and the module that it brings.
_WANTED: Final = {
    **{engine.name: engine.name for engine in ENGINES},
    "torch": "torch",
    "kvcached": "kvcached",
    "nvidia-ml-py": "pynvml",
}


def gather_packages() -> PackageFacts:
    """Versions by their metadata, and the plugins that engines will find in this environment."""
    try:
        from kvelastic import _vmm  # noqa: F401  (whether it can be imported is the question)

        native_error = ""
    except ImportError as error:
        native_error = str(error)
    hooked = [engine for engine in ENGINES if engine.tried]
    versions = {name: _version(name, module) for name, module in _WANTED.items()}
    return PackageFacts(
        python=(sys.version_info.major, sys.version_info.minor, sys.version_info.micro),
        native_error=native_error,
        versions=tuple(versions.items()),
        plugins=tuple(
            (engine.name, _plugins(engine.plugin_group)) for engine in hooked if engine.plugin_group
        ),
        # By the integration's own table, which imports neither the engine nor torch.
        hooks=tuple((engine.name, engine.hooks(versions[engine.name] or "")) for engine in hooked),
    )


def _plugins(group: str) -> tuple[str, ...]:
    return tuple(sorted({point.name for point in metadata.entry_points(group=group)}))


def _version(distribution: str, module: str) -> str | None:
    try:
        # None is what a broken installation answers (a folder of metadata without its file).
        return metadata.version(distribution) or "unknown"
    except metadata.PackageNotFoundError:
        return "unknown" if _is_importable(module) else None


def _is_importable(module: str) -> bool:
    """Whether there is such a top-level module; a mere folder of that name is not."""
    try:
        spec = find_spec(module)
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.origin is not None
