"""Imports a module of vLLM with the plugin, once for each of several changes to vLLM before it.

`changed_engine.py MODULE` reads a JSON list of statements, each run in a fork of this process, and
answers with a list of [exit status, stderr] in their order. What all of them need is imported once.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
import traceback

from vllm.utils import mem_utils
from vllm.v1.core import block_pool
from vllm.v1.worker.gpu import block_table as tables

NAMES = {"block_pool": block_pool, "mem_utils": mem_utils, "tables": tables}


def import_changed(change: str, module: str) -> int:
    """In the child; its exit status."""
    try:
        exec(change, dict(NAMES))
        from kvelastic.integration.vllm.plugin import register

        register()
        importlib.import_module(module)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def outcome(change: str, module: str) -> tuple[int, str]:
    """What a fork of this process ended with, and what it wrote to stderr."""
    with tempfile.TemporaryFile("w+") as told:
        child = os.fork()
        if child == 0:
            os.dup2(told.fileno(), 2)
            status = import_changed(change, module)
            sys.stderr.flush()
            os._exit(status)
        _, status = os.waitpid(child, 0)
        told.seek(0)
        return os.waitstatus_to_exitcode(status), told.read()


if __name__ == "__main__":
    assert sys.argv[1] not in sys.modules, "it is there already: nothing would be found"
    print(json.dumps([outcome(change, sys.argv[1]) for change in json.load(sys.stdin)]))
