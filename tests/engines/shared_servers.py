"""vLLM with kvelastic beside stock vLLM, which most tests of this folder share: they start slowly.

The fixtures `servers`, `stock` and `elastic` (conftest.py) hand them out.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from vllm_server import VllmServer


class SharedServers:
    """Stock vLLM (0) and vLLM with kvelastic (1): started together when one is first asked for.

    `end()` ends both, for a test that needs their memory; the next one that asks starts them again.
    """

    def __init__(self, model: Path, logs: Path, name: str) -> None:
        self._model = model
        self._logs = logs
        self._environment = {
            "ENABLE_KVELASTIC": "true",
            "KVELASTIC_IPC_NAME": name,
            # It runs beside other tests: in their ledger it would hold them to its own idea of the
            # device's capacity.
            "KVELASTIC_LEDGER": f"test-{os.getpid()}-servers",
            "KVELASTIC_MAX_CACHED_TOKENS": "-1",
            "KVELASTIC_IDLE_TRIM_SECONDS": "0.5",
            "KVELASTIC_SANITY_CHECK": "true",
            "VLLM_SERVER_DEV_MODE": "1",  # /sleep and /wake_up
        }
        self._running: tuple[VllmServer, ...] = ()
        self._kills = contextlib.ExitStack()

    def __getitem__(self, index: int) -> VllmServer:
        if not self._running:
            self._running = self._start()
        return self._running[index]

    def _start(self) -> tuple[VllmServer, ...]:
        with contextlib.ExitStack() as unfinished:
            stock = unfinished.enter_context(VllmServer(self._model, self._logs / "stock.log"))
            elastic = unfinished.enter_context(
                VllmServer(self._model, self._logs / "elastic.log", self._environment)
            )
            started = stock.wait_until_ready(), elastic.wait_until_ready()
            self._kills = unfinished.pop_all()
        return started

    def end(self) -> None:
        running, self._running = self._running, ()
        with self._kills:
            for server in running:
                if server.process.poll() is None:
                    server.stop()
