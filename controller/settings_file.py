"""The configuration file: YAML in, `Settings` out, and its JSON schema.

settings = load(Path("controller.yaml"))     # raises ControllerConfigError with every fault in it
python -m kvelastic.controller --schema      # prints the schema
"""

from __future__ import annotations

import os
import re
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any, Final

import yaml
from pydantic import ValidationError

from kvelastic.controller.settings import Settings
from kvelastic.errors import ControllerConfigError

_VARIABLE: Final = re.compile(r"\$(?:\$|\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\})")


def load(path: Path, environ: Mapping[str, str] | None = None) -> Settings:
    """Read and check a file. Raises `ControllerConfigError`; nothing else is touched. Blocking."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ControllerConfigError(f"cannot read {path}: {error}") from error
    return parse(text, environ, source=str(path))


def parse(
    text: str, environ: Mapping[str, str] | None = None, *, source: str = "the configuration"
) -> Settings:
    """Check a text. `${NAME}` and `${NAME:-default}` in values come from `environ`; `$$` is `$`.

    Raises `ControllerConfigError`, which names every key that is wrong and shows no value of it.
    """
    try:
        raw = yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ControllerConfigError(f"{source} is not YAML: {error}") from error
    if raw is None:
        raw = {}
    if not isinstance(raw, dict):
        raise ControllerConfigError(f"{source}: the top level has keys (server, models, ...)")
    try:
        raw = _substitute(raw, os.environ if environ is None else environ)
        return Settings.model_validate(raw)
    except ValidationError as error:
        faults = "; ".join(
            f"{'.'.join(str(part) for part in fault['loc']) or 'all'}:"
            f" {fault['msg'].removeprefix('Value error, ')}"
            for fault in error.errors(include_input=False, include_url=False)
        )
        raise ControllerConfigError(f"{source}: {faults}") from None
    except (ControllerConfigError, RecursionError) as error:
        raise ControllerConfigError(f"{source}: {error}") from None


def json_schema() -> dict[str, Any]:
    """The JSON schema of the configuration."""
    return Settings.model_json_schema()


def _substitute(value: Any, environ: Mapping[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: _substitute(item, environ) for key, item in value.items()}
    if isinstance(value, list):
        return [_substitute(item, environ) for item in value]
    if not isinstance(value, str) or "$" not in value:
        return value

    def put(match: re.Match[str]) -> str:
        name = match[1]
        if name is None:
            return "$"
        found = environ.get(name, match[2])
        if found is None:
            raise ControllerConfigError(f"the environment variable {name} is not set")
        return found

    return _VARIABLE.sub(put, value)


class _Loader(yaml.SafeLoader):
    """Refuses a key that is written twice: of two limits, the wrong one would hold."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable) or key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is there twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep=deep)
