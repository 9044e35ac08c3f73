"""vLLM servers in processes of their own (`vllm_server.py`), and what all of them are started with.

server = Server("stock", {"engine": {...}, "vocabulary": 32000}, environment(folder), folder)
server.answer(150.0)
server.tell("burst", ...); told = server.answer(150.0)
server.send_end(); server.end(15.0)
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

SERVER = Path(__file__).with_name("vllm_server.py")


class ServerError(Exception):
    """A server has ended, or has not answered."""


class Server:
    """A process with one vLLM."""

    def __init__(self, name: str, options: dict[str, Any], environ: dict[str, str], folder: Path):
        self.name, self._log, self._read = name, folder / f"{name}.log", b""
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(SERVER), json.dumps(options)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environ,
                start_new_session=True,
            )  # fmt: skip

    def tell(self, do: str, **more: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **more}).encode() + b"\n")
        self._process.stdin.flush()

    def answer(self, within_s: float) -> dict[str, Any]:
        """The next line. Raises `ServerError` with the end of its log."""
        assert self._process.stdout is not None
        ends = time.monotonic() + within_s
        while b"\n" not in self._read:
            if not select.select([self._process.stdout], [], [], max(0, ends - time.monotonic()))[
                0
            ]:
                raise ServerError(f"{self.name} was silent for {within_s:.0f} s\n{self._tail()}")
            piece = os.read(self._process.stdout.fileno(), 1 << 20)
            if not piece:
                raise ServerError(f"{self.name} has ended\n{self._tail()}")
            self._read += piece
        line, _, self._read = self._read.partition(b"\n")
        told: dict[str, Any] = json.loads(line)
        if "failed" in told:
            raise ServerError(f"{self.name}: {told['failed']}\n{self._tail()}")
        return told

    def _tail(self) -> str:
        return self._log.read_text(errors="replace")[-3000:]

    def send_end(self) -> None:
        """It shuts its engine down, so that nothing of it is left in shared memory."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()

    def end(self, within_s: float) -> None:
        """Wait for the end that was sent; kill what is left then."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(within_s)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def llama(dtype: str, **shape: int) -> dict[str, Any]:
    """A model's config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **shape,
    }


def how_on_gpu(*, graphs: bool) -> dict[str, Any]:
    """Arguments of an engine without vLLM's compiled kernels."""
    plain: dict[str, Any] = {"custom_ops": ["none"], "mode": 0}
    attention = {"attention_backend": "TRITON_ATTN"}
    if not graphs:
        return {"compilation_config": plain, "enforce_eager": True, **attention}
    captured = {
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 24, 32, 48, 64],
    }
    return {"compilation_config": plain | captured, **attention}


def environment(folder: Path, **elastic: str) -> dict[str, str]:
    """Of a server whose caches are in `folder`. With `elastic` it runs on kvelastic, so named."""
    ours = ("KVELASTIC_", "KVCACHED_", "ENABLE_KV")
    environ = {key: value for key, value in os.environ.items() if not key.startswith(ours)}
    environ |= {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": str(folder / "cache"),
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        # Sums in float32 as they are written: stock and kvelastic are compared to the last token.
        "TRITON_F32_DEFAULT": "ieee",
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "OMP_NUM_THREADS": "1",
    }
    return environ | ({"ENABLE_KVELASTIC": "true"} | elastic if elastic else {})
