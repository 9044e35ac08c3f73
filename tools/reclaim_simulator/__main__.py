"""Replay a trace of arrivals by the policy of reclaim, and print who got what.

    python -m tools.reclaim_simulator TRACE [--capacity 8G] [--json]
    python -m tools.reclaim_simulator --example bursts

Exit codes: 0 done; 2 wrong usage, or no trace.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from kvelastic.errors import InvalidArgumentError
from kvelastic.units import parse_size
from tools.reclaim_simulator.examples import EXAMPLES, example_trace
from tools.reclaim_simulator.report import report_table, summary
from tools.reclaim_simulator.simulation import simulate
from tools.reclaim_simulator.trace import Trace, load_trace

_PIPE_COLUMNS: Final = 180
"""Wide enough for all columns; a terminal folds them."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command. Raises SystemExit with code 2 for wrong usage, or for a bad trace."""
    parser = _parser()
    asked = parser.parse_args(arguments)
    if (asked.trace is None) == (asked.example is None):
        parser.error("give a TRACE or --example, one of the two.")
    if asked.print_example:
        if asked.example is None:
            parser.error("--print-example needs --example.")
        print(json.dumps(EXAMPLES[asked.example].document, indent=2))
        return
    try:
        trace = _find(asked.trace, asked.example, asked.capacity)
    except InvalidArgumentError as error:
        sys.exit(_usage_error(str(error)))
    shared, split = simulate(trace), simulate(trace.split_evenly())
    if asked.json:
        report = {
            "capacity_bytes": trace.capacity_bytes,
            "shared": shared.as_dict(),
            "split": split.as_dict(),
        }
        print(json.dumps(report, indent=2))
        return
    from rich.console import Console

    if asked.example is not None:
        print(EXAMPLES[asked.example].what)
    width = None if sys.stdout.isatty() else _PIPE_COLUMNS
    Console(width=width).print(report_table(shared, split))
    print(summary(shared, split))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m tools.reclaim_simulator",
        description="Replay TRACE, a file, by the policy of reclaim: shared, and split into equal"
        " parts. Every model has two rows: one for a device that all share, and one for an equal,"
        " fixed part of its own.",
        epilog="The format of a TRACE and what the columns mean: docs/reclaim.md.",
        allow_abbrev=False,
    )
    parser.add_argument("trace", metavar="TRACE", nargs="?", type=Path)
    parser.add_argument("--example", choices=list(EXAMPLES), help="replay an example instead")
    parser.add_argument(
        "--capacity", type=_size, metavar="SIZE", help="of the device, if not the trace's own"
    )
    parser.add_argument("--json", action="store_true", help="print one object (docs/reclaim.md)")
    parser.add_argument(
        "--print-example", action="store_true", help="print the example as a TRACE, and end"
    )
    return parser


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _usage_error(message: str) -> int:
    print(f"Error: {message}", file=sys.stderr)
    return 2


def _find(trace: Path | None, example: str | None, capacity_bytes: int | None) -> Trace:
    if trace is not None:
        return load_trace(trace, capacity_bytes)
    assert example is not None
    return example_trace(example, capacity_bytes)


if __name__ == "__main__":
    # `| head` ends it, as any program, without a traceback.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    main()
