"""What a step has found out, written down as it goes: what ends the step loses nothing said before.

    with Findings.of_command(__doc__) as found:
        found.check("the page keeps its contents", seen == written)
        found.figure("granularity_bytes", 2 << 20)

A step is a program: `python -m benchmarks.gpu.steps.NAME --json PATH [--quick]`. The file has
`done` (false until the step has come to its end), `checks` (all must hold), `figures` (what the
page's decisions are derived from), `lines` and `tables` (what the page says), and `skipped` (why
the step could not be tried).
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.vmm.section import Section


class Findings:
    """Written to its file after every addition; also printed, for a file that cannot be written."""

    def __init__(self, path: Path | None, *, quick: bool = False) -> None:
        self.quick = quick
        """The short form: it shows that the step works, and its figures are no evidence."""
        self._path = path
        self.figures: dict[str, Any] = {}
        self._told: dict[str, Any] = {
            "done": False, "skipped": "", "checks": [], "figures": self.figures, "lines": [],
            "tables": [],
        }  # fmt: skip
        self._save()

    @classmethod
    @contextmanager
    def of_command(
        cls, doc: str | None, more: Callable[[argparse.ArgumentParser], object] | None = None
    ) -> Iterator[Findings]:
        """Reads `--json` and `--quick`, and what `more` adds (it is in `arguments`)."""
        parser = argparse.ArgumentParser(description=(doc or "").split("\n")[0])
        parser.add_argument("--json", type=Path, help="where to write what was found")
        parser.add_argument("--quick", action="store_true", help="short; figures are no evidence")
        if more is not None:
            more(parser)
        given = parser.parse_args()
        # A step that is told to end leaves nothing behind.
        harness.end_by_exception()
        found = cls(given.json, quick=given.quick)
        found.arguments = given
        yield found
        found._told["done"] = True
        found._save()

    arguments: argparse.Namespace

    def check(self, name: str, passed: bool, said: str = "") -> None:
        """Something that must hold."""
        self._told["checks"].append({"name": name, "passed": bool(passed), "said": said})
        print(f"{'ok' if passed else 'FAILED'}: {name}{said and ': '}{said}", flush=True)
        self._save()

    def figure(self, name: str, value: Any) -> None:
        """A measured quantity, its unit in its name."""
        self.figures[name] = value
        self._save()

    def line(self, text: str) -> None:
        """A sentence for the page."""
        self._told["lines"].append(text)
        print(text, flush=True)
        self._save()

    def table(self, section: Section) -> None:
        """A table for the page."""
        self._told["tables"].append(
            {
                "title": section.title,
                "headings": section.headings,
                "rows": section.rows,
                "notes": section.notes,
            }
        )
        print(section.text(), flush=True)
        self._save()

    def skip(self, why: str) -> None:
        """The step cannot be tried here."""
        self._told["skipped"] = why
        print(f"skipped: {why}", flush=True)
        self._save()

    def _save(self) -> None:
        if self._path is None:
            return
        aside = self._path.with_suffix(f".{os.getpid()}")
        aside.write_text(json.dumps(self._told))
        aside.replace(self._path)


def read(path: Path) -> tuple[dict[str, Any], str]:
    """What a step's file says, and what is wrong with it; whatever is in the file."""
    try:
        told = json.loads(path.read_text())
    except FileNotFoundError:
        return {}, "it left no findings"
    except (OSError, ValueError, RecursionError) as error:
        return {}, f"its findings cannot be read: {error}"
    if not _is_findings(told):
        return {}, "its findings are malformed"
    return told, "" if told["done"] or told["skipped"] else "it did not come to its end"


def _is_findings(told: object) -> bool:
    kinds = (
        ("checks", list), ("lines", list), ("tables", list), ("figures", dict),
        ("done", bool), ("skipped", str),
    )  # fmt: skip
    return (
        isinstance(told, dict)
        and all(isinstance(told.get(name), kind) for name, kind in kinds)
        and all(map(_is_check, told["checks"]))
        and all(map(_is_table, told["tables"]))
    )


def _is_check(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("name"), str) and "passed" in value


def _is_table(value: object) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("title"), str):
        return False
    rows = value.get("rows")
    lists = [value.get("headings"), value.get("notes"), *(rows if isinstance(rows, list) else [0])]
    return all(isinstance(each, list) for each in lists)
