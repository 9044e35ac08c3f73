"""The configuration file: YAML in, `Settings` out, and its JSON schema.

settings = load(Path("controller.yaml"))     # raises ControllerConfigError with every fault in it
python -m kvelastic.controller --schema      # prints the schema
"""

from __future__ import annotations

import os
import re
import select
import stat
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from kvelastic.controller.settings.named_files import faults_of_files
from kvelastic.controller.settings.settings import MOST_CHARS, Settings
from kvelastic.controller.settings.strict_yaml import YamlFaultError, read_yaml
from kvelastic.controller.settings.validation_faults import faults_of
from kvelastic.errors import ControllerConfigError

MOST_BYTES: Final = 256 << 10
"""Maximum size of a configuration. A hundred models with long commands need a tenth of it."""
PIPE_WAIT_S: Final = 10.0
_MOST_FAULTS: Final = 100
_VARIABLE: Final = re.compile(r"\$(?:\$|\{([A-Za-z_][A-Za-z0-9_]{0,255})(?::-([^}]{0,1024}))?\})")
"""The lengths are bounded because a text of repeated `${a:-` would take quadratic time."""


def load(path: Path, environ: Mapping[str, str] | None = None) -> Settings:
    """Read and check a configuration file and the files that it names.

    Raises `ControllerConfigError`. Changes nothing. Blocks briefly, or for at most `PIPE_WAIT_S` if
    the file is a pipe.
    """
    try:
        text = _read(path).decode("utf-8")
    except OSError as error:
        raise ControllerConfigError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise ControllerConfigError(f"cannot read {path}: {error}") from error
    settings = parse(text, environ, source=str(path))
    faults = faults_of_files(settings)
    if faults:
        raise ControllerConfigError(f"{path}: {'; '.join(faults)}")
    return settings


def _read(path: Path) -> bytes:
    """Return the contents of a file or a pipe (`--config <(command)`).

    Raises `OSError` and `ValueError`.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(fd, "rb", 0) as file:
        mode = os.fstat(fd).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):
            raise ValueError("it is neither a regular file nor a pipe")
        poll = select.poll()
        poll.register(file, select.POLLIN)
        end_s = time.monotonic() + PIPE_WAIT_S
        data = bytearray()
        while len(data) <= MOST_BYTES:
            piece = file.read(MOST_BYTES + 1 - len(data))
            if piece is None:
                if not poll.poll(max(0.0, end_s - time.monotonic()) * 1e3):
                    raise ValueError(f"this pipe has no end after {PIPE_WAIT_S:g} s")
            elif piece:
                data += piece
            elif data or stat.S_ISREG(mode):
                return bytes(data)
            else:
                raise ValueError("no program writes to this pipe")
    raise ValueError(f"it has more than {MOST_BYTES} bytes")


def parse(
    text: str, environ: Mapping[str, str] | None = None, *, source: str = "the configuration"
) -> Settings:
    """Return the settings of a text.

    Values may contain `${NAME}` and `${NAME:-default}` from `environ`, and `$$` for `$`. Raises
    `ControllerConfigError`, which names every wrong key and shows no value.
    """
    try:
        raw = read_yaml(text)
    except YamlFaultError as error:
        raise ControllerConfigError(f"{source} is not YAML: {error}") from None
    if raw is None:
        raw = {}
    if not isinstance(raw, dict):
        raise ControllerConfigError(f"{source}: the top level has keys (server, models, ...)")
    try:
        environ = os.environ if environ is None else environ
        settings = Settings.model_validate(_substitute(raw, environ))
        _mark_keys(settings, raw, environ)
        return settings
    except ValidationError as error:
        faults = faults_of(error, Settings)
        if len(faults) > _MOST_FAULTS:
            faults[_MOST_FAULTS:] = [f"and {len(faults) - _MOST_FAULTS} more faults"]
        raise ControllerConfigError(f"{source}: {'; '.join(faults)}") from None
    except (ControllerConfigError, RecursionError) as error:
        raise ControllerConfigError(f"{source}: {error}") from None


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of the configuration."""
    return Settings.model_json_schema()


def _mark_keys(settings: Settings, raw: dict[str, Any], environ: Mapping[str, str]) -> None:
    """Mark the keys that came from an environment variable that the file names."""
    auth = raw.get("auth") or {}
    for name, keys in (
        ("api_keys", settings.auth.api_keys),
        ("admin_keys", settings.auth.admin_keys),
    ):
        for key, written in zip(keys, auth.get(name) or (), strict=True):
            text = written["key"] if isinstance(written, dict) else written
            variable = _VARIABLE.fullmatch(text)
            if variable and variable[1] in environ:
                key.mark_from_environment()


def _substitute(value: Any, environ: Mapping[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: _substitute(item, environ) for key, item in value.items()}
    if isinstance(value, list):
        return [_substitute(item, environ) for item in value]
    if not isinstance(value, str) or "$" not in value or len(value) > MOST_CHARS:
        return value  # a text longer than `MOST_CHARS` is refused later

    def put(match: re.Match[str]) -> str:
        name = match[1]
        if name is None:
            return "$"
        found = environ.get(name, match[2])
        if found is None:
            raise ControllerConfigError(f"the environment variable {name} is not set")
        return found

    return _VARIABLE.sub(put, value)
