"""The commands to try after the demo. A test checks that README has the same lines."""

from __future__ import annotations

from typing import Final

LINES: Final = (
    "source .venv/bin/activate",
    "MODEL=$(scripts/model --print-folder)",
    'ENABLE_KVELASTIC=true KVELASTIC_IPC_NAME=chat vllm serve "$MODEL" --served-model-name smol'
    " --dtype float32 --enforce-eager",
    "curl localhost:8000/v1/completions -H 'Content-Type: application/json'"
    """ -d '{"model": "smol", "prompt": "The sea is"}'""",
)
AFTERWARDS: Final = (
    "vllm serve takes a minute. --enforce-eager saves two minutes of compiling on a CPU."
    " curl, kvctl and kvtop run in another terminal, after the first line there."
)
