"""`scripts/bench tiers [--part NAME]`: one module a part, one table for all of them."""

from __future__ import annotations

import argparse
import importlib

from benchmarks.harness import Figure, report

PARTS = ("index", "copies", "reclaim", "disk", "flexkv", "vllm", "vllm_load")
"""Each is a module `<part>_part` with `figures() -> list[Figure]`."""


def main() -> None:
    parser = argparse.ArgumentParser("scripts/bench tiers", description=__doc__)
    parser.add_argument(
        "--part", choices=PARTS, help="only this one; samples are kept of whole runs"
    )
    part = parser.parse_args().part
    figures: list[Figure] = []
    for name in PARTS if part is None else (part,):
        figures += importlib.import_module(f"benchmarks.tiers.{name}_part").figures()
    report("tiers", figures, keep=part is None)


if __name__ == "__main__":
    main()
