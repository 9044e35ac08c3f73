"""A real vLLM with a disk tier: SmolLM2, prompts of 1,600 tokens, one request at a time.

with Served(model_folder, work_folder) as served:
    first = served.ask(prompt)          # first.first_token_ms, .tokens, .own, .loaded
    served.evict(); served.sleep_and_wake(); served.kill()
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import shared_files
from engine_server import Request
from vllm_server import BLOCK_TOKENS, VllmServer

from benchmarks.vllm.streams import stream_all
from kvelastic.shared import ledger, segment, tier_status
from kvelastic.shared.tier_status import TiersStatus

PROMPT_TOKENS = 1600
ANSWER_TOKENS = 24
CACHE_BYTES = 768 << 20
_WORDS = range(1000, 40_000)
"""Token ids of prompts: ordinary ones, above every special token of SmolLM2."""
_WAKING = Request([1000] * 8, 4)
"""Asked before the clock starts: after a rest the first step may be late."""
_WAIT_S = 60.0
LOG_CHARACTERS = 20_000
"""Of the server's log, shown where something went wrong."""


def prompt(name: str, tokens: int = PROMPT_TOKENS) -> list[int]:
    """The same for the same name; two names share no block."""
    return random.Random(name).choices(_WORDS, k=tokens)


@dataclass(frozen=True)
class First:
    """How one request was answered."""

    first_token_ms: float
    tokens: list[int]
    own: int
    """Prompt tokens found in vLLM's own prefix cache."""
    loaded: int
    """Prompt tokens found in the tiers."""

    def check(self, cold: First, *, most_computed: int = BLOCK_TOKENS + 1) -> None:
        """Raise unless the tokens are those of `cold` and all but so many were found."""
        if self.tokens != cold.tokens:
            raise AssertionError(f"other tokens: {self.tokens} instead of {cold.tokens}")
        computed = PROMPT_TOKENS - self.own - self.loaded
        if computed > most_computed:
            raise AssertionError(f"{computed} tokens were computed again: {self}")


class Served:
    """One server at a time, over a folder that outlives it. Leaving it ends the server."""

    def __init__(
        self,
        model: Path,
        work_folder: Path,
        environment: Mapping[str, str] | None = None,
        *,
        tiers: bool = True,
        under: Sequence[str] = (),
        arguments: Sequence[str] = (),
        suffix: str = "",
    ) -> None:
        """`suffix`: of the instance's name, where several run at once."""
        self.name = f"bench_tiers_{os.getpid()}{suffix}"
        self.group = f"bench-tiers-{os.getpid()}"
        self._model = model
        self._work_folder = work_folder
        self._under = under
        self._arguments = arguments
        self._environment = {
            "ENABLE_KVELASTIC": "true",
            "KVELASTIC_IPC_NAME": self.name,
            "KVELASTIC_LEDGER": self.group,
            "KVELASTIC_HOST_MEMORY": str(CACHE_BYTES),
            "KVELASTIC_MAX_CACHED_TOKENS": "-1",  # stock vLLM's prefix cache has no bound either
            "KVELASTIC_TIER_LIMIT_SECONDS": "30",
            "KVELASTIC_TIER_IDLE_SECONDS": "1",
            "VLLM_SERVER_DEV_MODE": "1",  # /sleep and /wake_up
            "VLLM_RPC_BASE_PATH": str(work_folder),  # its sockets go with the folder
            **(environment or {}),
        }
        if tiers:
            folder = work_folder / "disk"
            folder.mkdir(mode=0o700, exist_ok=True)
            self._environment["KVELASTIC_TIERS"] = f"disk:{folder}:4G"
        self._files: set[Path] = set()
        self.server: VllmServer

    def start(self) -> Served:
        """Block until it is ready."""
        self.server = VllmServer(
            self._model,
            self._work_folder / "server.log",
            self._environment,
            [
                "--max-model-len", "2048",
                "--kv-cache-memory-bytes", str(CACHE_BYTES),
                *self._arguments,
            ],
            self._under,
        )  # fmt: skip
        self.server.wait_until_ready()
        pids = [process.pid for process in self.server.processes().values()]
        self._files |= shared_files.in_use_by(pids)
        return self

    def __enter__(self) -> Served:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            print(self.server.log_but_for_refusals()[-LOG_CHARACTERS:], flush=True)
        with contextlib.suppress(Exception):
            self.server.stop()
        self.kill()
        shared_files.remove(self._files | {shared_files.SHM / self.name})
        ledger.reap()

    def kill(self) -> None:
        """SIGKILL to every process of it."""
        self.server.kill()
        segment.reap()

    def ask(self, tokens: list[int]) -> First:
        """One streamed answer of a server that has nothing else to do."""
        self.server.complete(_WAKING)
        before = self.server.metrics()
        (answer,) = stream_all(self.server.port, [Request(tokens, ANSWER_TOKENS)], 1)
        after = self.server.metrics()
        names = ("prefix_cache_hits_total", "external_prefix_cache_hits_total")
        own, loaded = (int(after[name] - before[name]) for name in names)
        return First(1e3 * answer.first_token_s, answer.tokens, own, loaded)

    def evict(self) -> None:
        """A limit of one page, and back."""
        page_bytes = segment.inspect(self.name).usage["page_bytes"]
        segment.request(self.name, limit_bytes=page_bytes, wait_s=_WAIT_S)
        segment.request(self.name, limit_bytes=CACHE_BYTES, wait_s=_WAIT_S)

    def sleep_and_wake(self) -> None:
        """As vLLM itself does it."""
        self.server.post("/sleep?level=1")
        self.server.post("/wake_up")

    def status_file(self) -> TiersStatus:
        """What the tiers say of themselves; half a second old."""
        status_file = tier_status.read(segment.inspect(self.name))
        if status_file is None:
            raise AssertionError(f"{self.name} has no tiers; see {self.server.log}")
        return status_file
