"""A server in a child process, which starts from plain values and ends with its parent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Final

from kvelastic.errors import ConfigError
from kvelastic.flexkv.common.config import CacheConfig, ModelConfig

_KEPT: Final = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "XDG_RUNTIME_DIR", "LD_LIBRARY_PATH")
_PREFIXES: Final = ("FLEXKV_", "KVELASTIC_", "PYTHON")
_END_S: Final = 30.0


class KVServerHandle:
    """A server that this process started: `python -m kvelastic.flexkv.server -`.

    Its configuration comes by standard input, which closes when this process ends; that ends the
    server.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        cache_config: CacheConfig,
        gpu_register_port: str = "",
        server_recv_port: str | None = None,
        child_env: Mapping[str, str] | None = None,
        inherit_env: bool = True,
    ) -> None:
        """Start it. Does not block. `child_env` is added to its environment.

        With `inherit_env` False, it gets only the variables that Python needs and those of FlexKV
        and kvelastic.
        """
        kept = {
            name: value
            for name, value in os.environ.items()
            if inherit_env or name in _KEPT or name.startswith(_PREFIXES)
        }
        self.process: Final = subprocess.Popen(
            [sys.executable, "-m", "kvelastic.flexkv.server", "-"],
            stdin=subprocess.PIPE,
            env={**kept, **(child_env or {})},
        )
        assert self.process.stdin is not None
        raw = dump(model_config, cache_config, gpu_register_port, server_recv_port or "")
        self.process.stdin.write(raw + b"\n")
        self.process.stdin.flush()

    @property
    def is_alive(self) -> bool:
        """Whether the server runs."""
        return self.process.poll() is None

    def shutdown(self, timeout_s: float = _END_S) -> None:
        """Send SIGTERM, and SIGKILL after `timeout_s`. Blocks. Idempotent."""
        if self.is_alive:
            self.process.terminate()
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stdin is not None:
            self.process.stdin.close()


def dump(
    model: ModelConfig, cache: CacheConfig, gpu_register_port: str, server_recv_port: str
) -> bytes:
    """Return a server's configuration as one line of JSON."""
    return json.dumps(
        {
            "model_config": {**vars(model), "dtype": model.dtype_name},
            "cache_config": vars(cache),
            "gpu_register_port": gpu_register_port,
            "server_recv_port": server_recv_port,
        }
    ).encode()


def load(raw: bytes) -> tuple[ModelConfig, CacheConfig, str, str]:
    """Read a configuration. Raises `ConfigError`."""
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the server's configuration is no JSON: {error}") from None
    known = ("cache_config", "gpu_register_port", "model_config", "server_recv_port")
    _check_keys(found, known, "server's configuration")
    ports = [found.get(name, "") for name in ("gpu_register_port", "server_recv_port")]
    if not all(isinstance(port, str) for port in ports):
        raise ConfigError("gpu_register_port and server_recv_port are endpoints: ipc:///path")
    model, cache = found.get("model_config", {}), found.get("cache_config", {})
    for kind, values in ((ModelConfig, model), (CacheConfig, cache)):
        _check_keys(values, [one.name for one in fields(kind)], kind.__name__)
    return ModelConfig(**model), CacheConfig(**cache), ports[0], ports[1]


def _check_keys(values: object, names: Sequence[str], what: str) -> None:
    if not isinstance(values, dict) or not values.keys() <= set(names):
        raise ConfigError(f"a {what} has the keys {', '.join(sorted(names))}")
