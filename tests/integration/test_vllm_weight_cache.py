"""Weights that vLLM's weight-cache daemon (`vllm preload`) holds are not reserved a second time."""

from __future__ import annotations

import textwrap
from pathlib import Path

import needs
import pytest
from processes import run_python
from vllm_server import engine_environment

pytestmark = [pytest.mark.slow, needs.vllm]

DAEMON = """
    import os, socket, sys, threading
    from types import SimpleNamespace

    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader.weight_cache.protocol import recv_msg, send_msg

    from kvelastic.integration.vllm.start_reserve import held_elsewhere_bytes

    path = sys.argv[1]
    daemon = socket.socket(socket.AF_UNIX)
    daemon.bind(path)
    os.chmod(path, 0o600)
    daemon.listen()

    def answer():
        while True:
            connection, _ = daemon.accept()
            with connection:
                assert recv_msg(connection) == {"cmd": "get_memory"}
                send_msg(connection, {"status": "ok", "memory_bytes": 7 << 30})

    def held(load_format, **more):
        loading = LoadConfig(load_format=load_format, model_loader_extra_config=more)
        config = SimpleNamespace(load_config=loading, speculative_config=None)
        return held_elsewhere_bytes(SimpleNamespace(vllm_config=config))

    threading.Thread(target=answer, daemon=True).start()
    print(
        held("auto"),
        held("ipc_cache", socket_path=path),
        held("ipc_cache", socket_path=path, mode="copy"),
        held("ipc_cache", socket_path=path + ".gone"),
    )
"""
"""vLLM's own client asks this daemon, which speaks vLLM's protocol."""


def test_weights_in_the_daemon_are_known(tmp_path: Path) -> None:
    environment = engine_environment(ENABLE_KVELASTIC="true")
    done = run_python(
        "-c", textwrap.dedent(DAEMON), str(tmp_path / "daemon"), environment=environment
    )
    assert done.stdout.splitlines()[-1].split() == ["0", str(7 << 30), "0", "0"]
