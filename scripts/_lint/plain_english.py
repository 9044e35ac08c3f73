"""A ratchet on the prose: it may not get harder to read than it is.

    plain_english.py               fails if the score is above MOST
    plain_english.py FILE ...      lists the phrases to replace

The score is the number of phrases of `phrases.txt` in 1,000 words of docstrings, comments, messages
and pages. Other code bases have 0.0 to 0.8; the aim is 2.0. Lower MOST whenever the score falls.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Final

MOST: Final = 0.8
ROOTS: Final = (
    "kvelastic", "cli", "controller", "vmm_csrc", "docs", "README.md", "CONTRIBUTING.md",
    "scripts", "examples",
)  # fmt: skip
PHRASES: Final = re.compile(
    "|".join(Path(__file__).with_name("phrases.txt").read_text().splitlines()),
    re.IGNORECASE | re.MULTILINE,
)
"""One regular expression a line: relative clauses for nouns, idioms for verbs, fillers."""


def prose_of(path: Path) -> Iterator[tuple[int, str]]:
    """Line numbers and texts: comments and strings of code, every line of a page."""
    source = path.read_text(errors="ignore")
    if path.suffix in {".py", ".pyi"}:
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            is_text = token.type == tokenize.STRING and token.string.count(" ") >= 3
            if is_text or token.type == tokenize.COMMENT:
                yield token.start[0], token.string
        return
    pattern = {".md": r"(.+)", ".h": r"//+<?\s?(.*)", ".cpp": r"//+<?\s?(.*)", ".js": r"//\s?(.*)"}
    for number, line in enumerate(source.splitlines(), 1):
        if found := re.search(pattern.get(path.suffix, r"^\s*#\s?(.*)"), line):
            yield number, found[1]


def main(names: list[str]) -> int:
    """Print the score, or the phrases of the files that are named; return the exit code."""
    for name in names:
        for number, text in prose_of(Path(name)):
            for found in PHRASES.finditer(text):
                line = number + text[: found.start()].count("\n")
                print(f"{name}:{line}: {found[0].strip()}")
    if names:
        return 0
    listed = subprocess.run(["git", "ls-files", *ROOTS], capture_output=True, text=True, check=True)
    words = phrases = 0
    for path in map(Path, listed.stdout.split()):
        if path.suffix in {".png", ".svg", ".json"} or "tests" in path.parts or not path.is_file():
            continue
        for _, text in prose_of(path):
            words += len(text.split())
            phrases += len(PHRASES.findall(text))
    score = 1000 * phrases / words
    print(f"{score:.1f} phrases to replace in 1,000 words; at most {MOST}", file=sys.stderr)
    return int(score > MOST)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
