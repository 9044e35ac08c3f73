"""One vLLM server: stock, kvelastic, stock again; tokens, speed, memory, a limit under load.

Each is a server of its own, one after another, with the same prompts: short answers, the same
prompts again (their prefixes are cached), long answers. The elastic one also has its limit lowered
while it answers. Every sequence is compared with stock's; what stock differs from itself is the
control. Model: a Llama shape with random weights, Triton attention.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.gpu.driver_calls import has_torch
from benchmarks.gpu.findings import Findings
from benchmarks.gpu.line_child import ChildError
from benchmarks.gpu.vllm_servers import Server, environment, how_on_gpu, llama
from benchmarks.vmm.section import Section
from kvelastic import _vmm
from kvelastic.shared import ledger, segment

KINDS = STOCK, ELASTIC, AGAIN = ("stock", "kvelastic", "stock again")
START_S, BURST_S, END_S = 90.0, 40.0, 10.0
REHEARSAL_S = 900.0
"""For a start and for a burst, on whichever CPU is there."""
LOOK_S = 0.005
LIMITED_AFTER_S, LIMITED_FOR_S = 0.5, 1.5
SHAPE = {
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "vocab_size": 32000,
}
TINY = {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_size": 64,
    "intermediate_size": 128,
    "vocab_size": 512,
}


class Memory:
    """The most that the device has had in use since `begin`. A context manager."""

    def __init__(self, *, on_gpu: bool) -> None:
        self._driver = _vmm.CudaDriver("cuda") if on_gpu else None
        self._before_bytes = self._free_bytes()
        self._least_bytes = self._before_bytes
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def _free_bytes(self) -> int:
        return 0 if self._driver is None else self._driver.free_bytes

    def _look(self) -> None:
        while not self._ends.wait(LOOK_S):
            self._least_bytes = min(self._least_bytes, self._free_bytes())

    def begin(self) -> None:
        self._least_bytes = self._free_bytes()

    @property
    def most_mib(self) -> int:
        return (self._before_bytes - self._least_bytes) >> 20

    def __enter__(self) -> Memory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()


class Alone:
    """The servers of a step, one at a time."""

    def __init__(self, found: Findings, folder: Path, *, dtype: str, on_gpu: bool) -> None:
        self._found, self._folder, self._on_gpu = found, folder, on_gpu
        self._dtype = dtype
        self._shape = SHAPE if on_gpu else TINY
        self._name = f"vllm-alone-{os.getpid()}"
        self._load = {"count": 16, "prompt_tokens": 512} if on_gpu else {
            "count": 4, "prompt_tokens": 40,
        }  # fmt: skip
        self._short, self._long = (64, 256) if on_gpu else (4, 12)
        self._tokens: dict[str, list[list[int]]] = {}
        (folder / "config.json").write_text(json.dumps(llama(dtype, **self._shape)))

    def _engine(self) -> dict[str, Any]:
        made = {
            "model": str(self._folder),
            "skip_tokenizer_init": True,
            "load_format": "dummy",
            "dtype": self._dtype,
            "max_model_len": 1024 if self._on_gpu else 128,
            "max_num_seqs": 32,
            "max_num_batched_tokens": 4096 if self._on_gpu else 128,
            "enable_prefix_caching": True,
            "seed": 1,
        }
        if self._on_gpu:
            how = how_on_gpu(graphs=self._dtype == "bfloat16")
            return made | {"gpu_memory_utilization": 0.3} | how
        return made | {"kv_cache_memory_bytes": 8 << 20, "enforce_eager": True}

    def run(self, kind: str, memory: Memory) -> tuple[str, ...]:
        """A row of the table. Raises `ChildError`."""
        own = {}
        if kind == ELASTIC:
            own = {"KVELASTIC_LEDGER": self._name, "KVELASTIC_IPC_NAME": self._name}
            if not self._on_gpu:
                own["KVELASTIC_HOST_MEMORY"] = "64M"
        options = {"engine": self._engine(), "vocabulary": self._shape["vocab_size"]}
        begun = time.monotonic()
        server = Server(
            kind.replace(" ", "-"), options, environment(self._folder, **own), self._folder
        )
        with ExitStack() as stack:
            stack.callback(server.end, END_S)
            stack.callback(server.send_end)
            server.answer(START_S if self._on_gpu else REHEARSAL_S)
            ready_s = time.monotonic() - begun
            self._burst(server, 1, self._short)
            memory.begin()
            short = [self._compare(kind, f"short {seed}", server, seed) for seed in (2, 3)]
            self._compare(kind, "prefix-cached", server, 2, "short 2")
            long = self._compare(kind, "long", server, 4)
            most_mib = memory.most_mib
            if kind == ELASTIC:
                self._limited(server)
            self._compare(kind, "after it" if kind == ELASTIC else "at last", server, 3, "short 3")
        figures = {"short": short, "long": long, "most_mib": most_mib, "ready_s": ready_s}
        self._found.figure(kind, figures)
        speeds = (*(f"{one:,.0f}" for one in short), f"{long:,.0f}")
        return (kind, f"{ready_s:.1f}", *speeds, str(most_mib) if self._on_gpu else "")

    def _burst(self, server: Server, seed: int, new_tokens: int) -> dict[str, Any]:
        server.tell("burst", seed=seed, new_tokens=new_tokens, rate=0.0, **self._load)
        return server.answer(BURST_S if self._on_gpu else REHEARSAL_S)

    def _compare(
        self, kind: str, what: str, server: Server, seed: int, reference: str = ""
    ) -> float:
        """Answers beside stock's; tokens a second."""
        new_tokens = self._long if what == "long" else self._short
        told = self._burst(server, seed, new_tokens)
        self._judge(kind, what, told["tokens"], reference or what)
        return sum(map(len, told["tokens"])) / float(told["total_s"])

    def _judge(self, kind: str, what: str, tokens: list[list[int]], reference: str) -> None:
        theirs = self._tokens.setdefault(reference, tokens)
        if theirs is tokens:
            return
        equal = sum(mine == other for mine, other in zip(tokens, theirs, strict=True))
        named = f"{kind}, {what}: the tokens of stock"
        self._found.check(named, equal == len(theirs), f"{equal} of {len(theirs)} sequences")

    def _limited(self, server: Server) -> None:
        """The limit is lowered while the long prompts are answered, and raised again."""
        usage = segment.inspect(self._name).usage
        server.tell("burst", seed=4, new_tokens=self._long, rate=0.0, **self._load)
        time.sleep(LIMITED_AFTER_S if self._on_gpu else 0.0)
        mapped_bytes = int(segment.inspect(self._name).usage["mapped_bytes"])
        limit_bytes = max(mapped_bytes // 10, 2 * usage["page_bytes"])
        begun = time.monotonic()
        answer = segment.request(self._name, limit_bytes=limit_bytes, wait_s=LIMITED_FOR_S)
        applied = answer.state == "applied"
        took_ms = 1e3 * (time.monotonic() - begun)
        segment.request(self._name, limit_bytes=usage["capacity_bytes"], wait_s=LIMITED_FOR_S)
        told = server.answer(BURST_S if self._on_gpu else REHEARSAL_S)
        self._judge(ELASTIC, "under a limit", told["tokens"], "long")
        self._found.figure("limit", {"mib": limit_bytes >> 20, "ms": took_ms, "applied": applied})
        self._found.line(
            f"A limit of {limit_bytes >> 20} MiB under load, {mapped_bytes >> 20} MiB mapped:"
            f" {'held' if applied else 'not held'} after {took_ms:.0f} ms."
        )


def main() -> None:
    def dtype(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")

    with Findings.of_command(__doc__, dtype) as found, ExitStack() as stack:
        on_gpu = has_torch() and not found.quick
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="vllm_alone_")))
        stack.callback(segment.reap)
        stack.callback(ledger.reap)
        alone = Alone(found, folder, dtype=found.arguments.dtype, on_gpu=on_gpu)
        memory = stack.enter_context(Memory(on_gpu=on_gpu))
        rows: list[tuple[str, ...]] = []
        try:
            rows.extend(alone.run(kind, memory) for kind in KINDS)
        except ChildError as error:
            found.check("the servers answer", False, str(error))
        header = ("", "ready, s", "tokens/s", "tokens/s, again", "tokens/s, long", "most MiB")
        found.table(Section(f"One vLLM server, {found.arguments.dtype}", header, rows))


if __name__ == "__main__":
    main()
