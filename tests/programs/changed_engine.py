"""Loads kvelastic into an engine, once for each of several changes to the engine before it.

`changed_engine.py vllm MODULE` has the plugin register and imports a module of vLLM then;
`changed_engine.py transformers` and `changed_engine.py sglang` have it register in the modules of
continuous batching, or of a scheduler, that are imported already.
Reads a JSON list of statements, each run in a fork of this process, and answers with a list of
[exit status, stderr] in their order. What all of them need is imported once.
As a module, for tests:

    for status, text in outcomes_of(["del block_pool.BlockPool"], environment, "vllm", MODULE): ...
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path

from waiting import DEADLINE_S

# What the statements may name.
NAMES = {
    "vllm": {
        "block_pool": "vllm.v1.core.block_pool",
        "mem_utils": "vllm.utils.mem_utils",
        "tables": "vllm.v1.worker.gpu.block_table",
    },
    "transformers": {
        name: f"transformers.generation.continuous_batching.{module}"
        for name, module in (
            ("cache", "cache"),
            ("pool", "cache_allocators.cache_pool"),
            ("api", "continuous_api"),
        )
    },
    "sglang": {
        "arguments": "sglang.srt.server_args",
        "batch": "sglang.srt.managers.schedule_batch",
        "paged": "sglang.srt.mem_cache.allocator.paged",
        "platform": "sglang.srt.platforms.interface",
        "scheduler": "sglang.srt.managers.scheduler",
    },
}


def outcomes_of(
    changes: Iterable[str],
    environment: Mapping[str, str],
    engine: str,
    *modules: str,
    python: str | Path = sys.executable,
) -> list[tuple[int, str]]:
    """Run the program with `python`; what came of each change. Without one the engine loads."""
    done = subprocess.run(
        [python, __file__, engine, *modules],
        input=json.dumps(["pass", *changes]),
        env=dict(environment),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stderr
    (unchanged, told), *changed = json.loads(done.stdout.splitlines()[-1])
    assert unchanged == 0, told
    return [(status, text) for status, text in changed]


def import_changed(change: str, engine: str, modules: list[str]) -> int:
    """In the child; its exit status."""
    try:
        exec(change, {name: sys.modules[path] for name, path in NAMES[engine].items()})
        importlib.import_module(f"kvelastic.integration.{engine}.plugin").register()
        for module in modules:
            importlib.import_module(module)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def outcome(change: str, engine: str, modules: list[str]) -> tuple[int, str]:
    """What a fork of this process ended with, and what it wrote to stderr."""
    with tempfile.TemporaryFile("w+") as told:
        child = os.fork()
        if child == 0:
            os.dup2(told.fileno(), 2)
            status = import_changed(change, engine, modules)
            sys.stderr.flush()
            os._exit(status)
        _, status = os.waitpid(child, 0)
        told.seek(0)
        return os.waitstatus_to_exitcode(status), told.read()


if __name__ == "__main__":
    _, engine, *modules = sys.argv
    for path in NAMES[engine].values():
        importlib.import_module(path)
    assert not set(modules) & set(sys.modules), "it is there already: nothing would be found"
    print(json.dumps([outcome(change, engine, modules) for change in json.load(sys.stdin)]))
