"""A ratchet on the prose, the names of tests and the words: they may not get harder to read.

    plain_english.py               fails if the score is above MOST, a test's name is too long, or a
                                   word that was replaced is back
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
MOST_WORDS: Final = 8
"""In the name of a test, without `test_`."""
REPLACED: Final = re.compile(
    r"(?<![a-z])(keeper|ladder|ballast|upkeep|nap)s?(?![a-z])", re.IGNORECASE
)
"""Words of our own that the field's words have replaced: maintenance thread, reclaim steps, closed
slots, maintenance, backoff. They are replaced in identifiers, too."""
TEST_NAME: Final = re.compile(r"^ *(?:async )?def test_(\w+)|^TEST\((\w+)\)", re.MULTILINE)
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


def faults_of_code() -> Iterator[str]:
    """Yield names of tests with more than `MOST_WORDS` words, and words of `REPLACED`."""
    listed = subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True)
    for path in map(Path, listed.stdout.split()):
        if path.suffix not in {".py", ".cpp", ".h"} or not path.is_file():
            continue
        text = path.read_text()
        for found in TEST_NAME.finditer(text):
            name = found[1] or found[2]
            if len(name.split("_")) > MOST_WORDS:
                yield f"{path}: {name} has more than {MOST_WORDS} words"
        for found in REPLACED.finditer(text) if path.name != Path(__file__).name else ():
            yield f"{path}:{text.count(chr(10), 0, found.start()) + 1}: {found[0]}"


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
    faults = list(faults_of_code())
    print("".join(f"{fault}\n" for fault in faults), end="", file=sys.stderr)
    return int(score > MOST or bool(faults))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
