"""Reads FlexKV's configuration file and environment variables.

    user = load_user_config()             # FLEXKV_CONFIG_PATH, FLEXKV_*; the file has precedence
    update_default_config_from_user_config(model_config, cache_config, user)

One warning lists the settings without effect. An unknown name is an error in a file. In the
environment it is a warning, because other versions of FlexKV have more variables. Both suggest the
nearest name. A setting for a missing feature is refused; the error names its replacement.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvelastic.errors import ConfigError, UnsupportedError
from kvelastic.flexkv.common.known_settings import BY_NAME, SETTINGS
from kvelastic.logs import log_once

if TYPE_CHECKING:
    from kvelastic.flexkv.common.config import CacheConfig, ModelConfig

_PREFIX: Final = "FLEXKV_"
_MOST_FILE_BYTES: Final = 64 << 10
_GIB: Final = 1 << 30


class GlobalConfig:
    """All settings by name: a file's value, the environment's, or the default.

    The environment is read at the first use, which raises as `load_user_config` does.
    """

    def __getattr__(self, name: str) -> Any:
        """Read the environment, at the first use."""
        if name not in BY_NAME:
            raise AttributeError(f"{name} is no setting of FlexKV; is {_nearest(name)} meant?")
        found = _user_config(_from_environment(os.environ) | vars(self)).settings
        for setting in SETTINGS:
            vars(self).setdefault(setting.name, found.get(setting.name, setting.default))
        return vars(self)[BY_NAME[name].name]


GLOBAL_CONFIG_FROM_ENV: Final = GlobalConfig()


@dataclass
class UserConfig:
    """The sizes of the tiers, the disk tier's folders, and all settings by name."""

    cpu_cache_gb: float = 16
    ssd_cache_gb: float = 0
    """0: no disk tier; otherwise more than `cpu_cache_gb`, because the disk also has its blocks."""
    ssd_cache_dir: str | list[str] = "./ssd_cache"
    enable_gds: bool = False
    settings: dict[str, Any] = field(default_factory=dict)
    """All values that were set, by FlexKV's names; a file overrides the environment."""

    def value(self, name: str) -> Any:
        """Return the value of a setting that was set, or its default."""
        return self.settings.get(name, BY_NAME[name].default)

    def __post_init__(self) -> None:
        """Raise `ConfigError` for sizes that FlexKV refuses."""
        if self.cpu_cache_gb <= 0:
            raise ConfigError(f"cpu_cache_gb={self.cpu_cache_gb} is not accepted; set it above 0")
        if self.ssd_cache_gb != 0 and self.ssd_cache_gb <= self.cpu_cache_gb:
            raise ConfigError(
                f"ssd_cache_gb={self.ssd_cache_gb} is not accepted; set it to 0 for no disk tier,"
                f" or above cpu_cache_gb ({self.cpu_cache_gb}), for it has a copy of that"
            )


def load_user_config(environ: Mapping[str, str] = os.environ) -> UserConfig:
    """Read the file at FLEXKV_CONFIG_PATH and the environment; the file has precedence. Blocks.

    Raises `ConfigError` for unreadable, unknown or invalid settings, and `UnsupportedError` for
    missing features. The error lists all of them.
    """
    path = environ.get("FLEXKV_CONFIG_PATH", "").strip()
    values = _from_environment(environ)
    if path:
        values |= _from_file(Path(path))
    return _user_config(values)


def load_user_config_from_file(config_file: str) -> UserConfig:
    """Read only a `.yaml`, `.yml` or `.json` file. Raises as `load_user_config` does."""
    return _user_config(_from_file(Path(config_file)))


def load_user_config_from_env(environ: Mapping[str, str] = os.environ) -> UserConfig:
    """Read only the variables. Raises as `load_user_config` does, except for unknown ones."""
    return _user_config(_from_environment(environ))


def convert_to_block_num(size_in_GB: float, block_size_in_bytes: int) -> int:  # noqa: N803  # FlexKV's
    """Return how many whole blocks fit."""
    return int(size_in_GB * _GIB) // block_size_in_bytes


def update_default_config_from_user_config(
    model_config: ModelConfig, cache_config: CacheConfig, user_config: UserConfig
) -> None:
    """Convert sizes to block counts and set them and other settings in `cache_config`.

    The remaining settings go to `GLOBAL_CONFIG_FROM_ENV`. Raises `ConfigError` if a tier holds no
    block, and what `CacheConfig.check` raises.
    """
    block_bytes = model_config.token_size_in_bytes * cache_config.tokens_per_block
    if block_bytes <= 0:
        raise ConfigError(
            f"a block of this model has {block_bytes} bytes: num_layers, num_kv_heads, head_size"
            " and tokens_per_block have to be above 0"
        )
    cache_config.num_cpu_blocks = _blocks("cpu_cache_gb", user_config.cpu_cache_gb, block_bytes)
    cache_config.enable_ssd = user_config.ssd_cache_gb > 0
    if cache_config.enable_ssd:
        cache_config.num_ssd_blocks = _blocks("ssd_cache_gb", user_config.ssd_cache_gb, block_bytes)
        cache_config.ssd_cache_dir = user_config.ssd_cache_dir
    for name in vars(cache_config).keys() & user_config.settings.keys() - _SIZES:
        setattr(cache_config, name, user_config.settings[name])
    if user_config.value("enable_trace"):
        cache_config.trace_path = user_config.value("trace_file_path")
    cache_config.check()
    for name, value in user_config.settings.items():
        setattr(GLOBAL_CONFIG_FROM_ENV, name, value)
    if "log_level" in user_config.settings:
        set_log_level(user_config.settings["log_level"])


def set_log_level(level: str) -> None:
    """Set the lowest severity that FlexKV's interface logs; `off` logs nothing."""
    is_off = level == "off"
    logger = logging.getLogger("kvelastic.flexkv")
    logger.setLevel(logging.CRITICAL + 1 if is_off else level.upper())


_SIZES: Final = frozenset({"cpu_cache_gb", "ssd_cache_gb", "ssd_cache_dir"})


def _blocks(name: str, size_gib: float, block_bytes: int) -> int:
    blocks = convert_to_block_num(size_gib, block_bytes)
    if blocks == 0:
        raise ConfigError(f"{name}={size_gib} holds no block of {block_bytes} bytes; set it higher")
    return blocks


def _user_config(values: Mapping[str, Any]) -> UserConfig:
    _refuse(values)
    names = ("cpu_cache_gb", "ssd_cache_gb", "ssd_cache_dir", "enable_gds")
    fields = {name: values.get(name, BY_NAME[name].default) for name in names}
    return UserConfig(**fields, settings=dict(values))


def _refuse(values: Mapping[str, Any]) -> None:
    refused = [
        f"{name}={value}: use {BY_NAME[name].instead}"
        for name, value in values.items()
        if BY_NAME[name].instead and value
    ]
    if refused:
        raise UnsupportedError(
            "kvelastic has not what these settings of FlexKV ask for. " + "; ".join(refused)
        )
    idle = [f"{name} ({BY_NAME[name].idle})" for name in values if BY_NAME[name].idle]
    if idle:
        log_once(logging.WARNING, f"Settings of FlexKV that do nothing here: {', '.join(idle)}.")


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    given = {
        name.removeprefix(_PREFIX).lower(): value
        for name, value in environ.items()
        if name.startswith(_PREFIX) and value.strip()
    }
    for name in sorted(given.keys() - BY_NAME.keys()):
        del given[name]
        log_once(
            logging.WARNING,
            f"{_PREFIX}{name.upper()} is no setting of FlexKV that is known here, and does nothing;"
            f" is {_PREFIX}{_nearest(name).upper()} meant?",
        )
    return _read(given, lambda name: f"{_PREFIX}{name.upper()}")


def _from_file(path: Path) -> dict[str, Any]:
    given = _parsed(path)
    for name in given:
        setting = BY_NAME.get(name)
        if setting is not None and setting.only == "environment":
            raise ConfigError(
                f"{path}: {name} is read from the environment alone; set {setting.variable}"
            )
    return _read(given, lambda name: f"{path}: {name}")


def _read(given: Mapping[str, object], shown: Callable[[str], str]) -> dict[str, Any]:
    """Parse values, by the current name of each setting. `shown` returns a name for messages."""
    values: dict[str, Any] = {}
    for name, value in given.items():
        setting = BY_NAME.get(name)
        if setting is None:
            raise ConfigError(
                f"{shown(name)} is no setting of FlexKV; is {shown(_nearest(name))} meant?"
            )
        try:
            values[setting.name] = setting.read(value)
        except ValueError as error:
            raise ConfigError(
                f"{shown(name)}={value!r:.100} is not accepted; set it to {error}"
            ) from None
    return values


def _nearest(name: str) -> str:
    return str(get_close_matches(name[:100], BY_NAME, n=1, cutoff=0.0)[0])


def _parsed(path: Path) -> dict[str, object]:
    if path.suffix not in (".json", ".yaml", ".yml"):
        raise ConfigError(f"{path} is not read: name it .yaml, .yml or .json")
    try:
        with path.open("rb") as file:
            raw = file.read(_MOST_FILE_BYTES + 1)
        written = raw.decode()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not text in UTF-8") from None
    if len(raw) > _MOST_FILE_BYTES:
        raise ConfigError(f"{path} is longer than {_MOST_FILE_BYTES} bytes")
    found = _json(path, written) if path.suffix == ".json" else _yaml(path, written)
    if found is None:
        return {}
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise ConfigError(f"{path} has to be a list of names with a value each")
    return found


def _json(path: Path, written: str) -> object:
    try:
        return json.loads(written, object_pairs_hook=lambda pairs: _once(path, pairs))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is no JSON: {error}") from None


def _yaml(path: Path, written: str) -> object:
    try:
        import yaml
    except ImportError:
        raise ConfigError(
            f"{path}: YAML needs the package pyyaml (pip install pyyaml); a .json file does not"
        ) from None
    try:
        node = yaml.compose(written, Loader=yaml.SafeLoader)
        found = yaml.safe_load(written)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError(f"{path} is no YAML: {error}") from None
    if isinstance(node, yaml.MappingNode):
        _once(path, [(key.value, 0) for key, _ in node.value if isinstance(key.value, str)])
    return found


def _once(path: Path, pairs: Iterable[tuple[str, object]]) -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in pairs:
        if key in found:
            raise ConfigError(f"{path}: {key!r:.100} is there twice; write it once")
        found[key] = value
    return found
