"""A server in a process of its own: started with plain values, and ended with its parent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import fields
from typing import Any, Final

from kvelastic.errors import ConfigError
from kvelastic.flexkv.common.config import CacheConfig, ModelConfig

_KEPT: Final = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "XDG_RUNTIME_DIR", "LD_LIBRARY_PATH")
_PREFIXES: Final = ("FLEXKV_", "KVELASTIC_", "PYTHON")
_END_S: Final = 30.0


class KVServerHandle:
    """A server that this process has started."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process: Final = process

    @property
    def is_alive(self) -> bool:
        """Whether it runs."""
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


def start_process(
    model: ModelConfig,
    cache: CacheConfig,
    gpu_register_port: str,
    server_recv_port: str,
    environment: dict[str, str],
    *,
    inherit_env: bool,
) -> KVServerHandle:
    """`python -m kvelastic.flexkv.server -`, with its configuration on its standard input.

    The input is closed when this process ends, and the server ends then.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if inherit_env or name in _KEPT or name.startswith(_PREFIXES)
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "kvelastic.flexkv.server", "-"],
        stdin=subprocess.PIPE,
        env={**kept, **environment},
    )
    assert process.stdin is not None
    process.stdin.write(dump(model, cache, gpu_register_port, server_recv_port) + b"\n")
    process.stdin.flush()
    return KVServerHandle(process)


def dump(
    model: ModelConfig, cache: CacheConfig, gpu_register_port: str, server_recv_port: str
) -> bytes:
    """A server's configuration as one line of JSON."""
    plain_model = {one.name: getattr(model, one.name) for one in fields(model)}
    plain_model["dtype"] = model.dtype_name
    return json.dumps(
        {
            "model_config": plain_model,
            "cache_config": {one.name: getattr(cache, one.name) for one in fields(cache)},
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
    known = {"model_config", "cache_config", "gpu_register_port", "server_recv_port"}
    if not isinstance(found, dict) or not found.keys() <= known:
        raise ConfigError(f"a server's configuration has the keys {', '.join(sorted(known))}")
    ports = [found.get(name, "") for name in ("gpu_register_port", "server_recv_port")]
    if not all(isinstance(port, str) for port in ports):
        raise ConfigError("gpu_register_port and server_recv_port are endpoints: ipc:///path")
    model = _made(ModelConfig, found.get("model_config", {}))
    return model, _made(CacheConfig, found.get("cache_config", {})), ports[0], ports[1]


def _made(kind: Any, values: object) -> Any:
    names = {one.name for one in fields(kind)}
    if not isinstance(values, dict) or not values.keys() <= names:
        raise ConfigError(f"a {kind.__name__} has the keys {', '.join(sorted(names))}")
    return kind(**values)
