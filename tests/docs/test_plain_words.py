"""Words that only we used, and phrases that no reader would expect, stay out of code and docs.

What the field calls otherwise is called so here: a request (not a wish), kvcached (not the seed).
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("kvelastic", "cli", "controller", "vmm_csrc", "docs", "scripts", "benchmarks", "tools")
PAGES = ("README.md", "CONTRIBUTING.md", "pyproject.toml", ".ci/run")
TEXTS = {".py", ".pyi", ".h", ".cpp", ".md", ".js", ".css", ".html", ".yaml", ".toml", ".json", ""}

BANNED = {
    "wish": "request",
    r"the seed's": "kvcached's",
    r"is none any more": "expires, ends",
    r"cannot be meant": "is malformed",
    r"\bno fault\.": "valid",
    r"\bwho it is\.": "identity",
    r"misses its bar": "missed target",
    r"(?:what|that|which|who) (?:is|are) no (?!longer|more)[a-z]+": "not a ...",
    r"\b(?:that|which) is none\b": "invalid, unknown",
    r"by those who": "by others, by processes that",
}


def texts() -> list[Path]:
    """What git knows or would add, without recorded results."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", *FOLDERS, *PAGES],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\n")
    paths = [ROOT / name for name in listed if name and "/results/" not in name]
    return [path for path in paths if path.is_file() and path.suffix in TEXTS]


@pytest.mark.parametrize("banned", BANNED)
def test_banned_words_are_absent(banned: str) -> None:
    pattern = re.compile(banned, re.IGNORECASE)
    found = []
    for path in texts():
        text = path.read_text(errors="replace")
        for number, line in enumerate(text.split("\n"), 1):
            if pattern.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:120]}")
    assert not found, f"say {BANNED[banned]}:\n" + "\n".join(found)


def test_search_finds_existing_text() -> None:
    """Else a wrong folder would make every search a success."""
    assert any("paged" in path.read_text(errors="replace") for path in texts())
    assert len(texts()) > 200
