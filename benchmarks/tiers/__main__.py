"""`scripts/bench tiers [--part NAME]`: the tiers' index, copies, disk and loads."""

from __future__ import annotations

import sys

from benchmarks.pages import arguments, of_module, run

TITLES = {
    "index": "1. The index",
    "copies": "2. Copies of blocks",
    "reclaim": "3. Reclaim with tiers",
    "disk": "4. Records on a disk",
    "flexkv": "5. FlexKV's interface",
    "vllm": "6. A prompt from a tier, vLLM",
    "vllm_load": "7. A load with tiers, vLLM",
}
PARTS = {
    name: (title, of_module(f"benchmarks.tiers.{name}_part")) for name, title in TITLES.items()
}

if __name__ == "__main__":
    given = arguments("tiers", __doc__, PARTS, has_quick=False)
    sys.exit(run("tiers", "Tiers benchmark", given, PARTS))
