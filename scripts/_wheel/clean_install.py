"""Checks a wheel like a user would: in a clean environment, away from the checkout.

It installs the wheel with its dependencies and the extra `controller`, and runs the commands and
README's Python example. After `pip uninstall` no new file may be left.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import zipfile
from email.parser import HeaderParser
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"
FORBIDDEN = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")


class CleanEnvironment:
    """A new virtual environment in its own folder, without packages of the caller."""

    def __init__(self, python: Path, folder: Path) -> None:
        subprocess.run([python, "-m", "venv", folder], check=True)
        self.folder = folder
        kept = {name: value for name, value in os.environ.items() if name not in FORBIDDEN}
        self._variables = {
            name: value for name, value in kept.items() if not name.startswith("KVELASTIC_")
        }

    def run(self, program: str, *arguments: str | Path, **variables: str) -> str:
        """Run a program of the environment; return its stdout.

        Raises SystemExit with the whole output if it fails.
        """
        done = subprocess.run(
            [self.folder / "bin" / program, *arguments],
            cwd=self.folder,
            env=self._variables | variables,
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )
        if done.returncode != 0:
            said = " ".join([program, *map(str, arguments)])
            raise SystemExit(f"{said}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout

    def pip(self, *arguments: str | Path) -> None:
        self.run("pip", "--disable-pip-version-check", "-qq", *arguments)

    def files(self) -> set[str]:
        """Return every file and link, including compiled Python."""
        return {str(path.relative_to(self.folder)) for path in self.folder.rglob("*")}

    @property
    def packages(self) -> Path:
        """Its site-packages folder."""
        return next(self.folder.glob("lib/python*/site-packages"))


def dependencies(wheel: Path) -> list[str]:
    """Return the requirements of a wheel and its extra `controller`."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        fields = HeaderParser().parsestr(archive.read(name).decode())
    found = []
    for need in fields.get_all("Requires-Dist") or []:
        # pip accepts markers, but not those about an extra.
        wanted = re.sub(r"""(\s+and)?\s+extra\s*==\s*['"]controller['"]""", "", need)
        if not re.search(r"\bextra\b", wanted):
            found.append(wanted.rstrip("; "))
    return found


def python_example(readme: Path = README) -> str:
    """Return the example of README's section about Python."""
    found = re.search(r"^## From Python$.*?^```python\n(.*?)^```", readme.read_text(), re.M | re.S)
    if found is None:
        raise SystemExit("README.md has no example under `## From Python`")
    return found.group(1)


def check_install(python: Path, wheel: Path, folder: Path, torch_of: Path | None) -> None:
    """Check a wheel with a Python. Raises SystemExit with the failure.

    torch is taken from `torch_of`, or installed if it is None.
    """
    clean = CleanEnvironment(python, folder)
    clean.pip("install", *dependencies(wheel))
    if torch_of is None:
        clean.pip("install", "torch>=2.6", "numpy")
    before = clean.files()
    clean.pip("install", "--no-index", wheel)
    clean.pip("install", "--no-index", "kvelastic[controller]")  # the command of README

    clean.run("kvctl", "list")
    findings = json.loads(clean.run("kvctl", "doctor", "--json"))
    native = [each["state"] for each in findings if each["check"] == "python.native"]
    if native != ["ok"]:
        raise SystemExit(f"kvctl doctor: the native module is {native}")
    clean.run("kvtop", "--once")
    clean.run("kvelastic-controller", "--help")
    borrowed = clean.packages / "torch_of_another_environment.pth"
    if torch_of is not None:
        borrowed.write_text(f"{torch_of.resolve()}\n")
    (clean.folder / "example.py").write_text(python_example())
    clean.run("python", "-W", "ignore", "example.py", KVELASTIC_HOST_MEMORY="512M")
    (clean.folder / "example.py").unlink()
    borrowed.unlink(missing_ok=True)

    clean.pip("uninstall", "-y", "kvelastic")
    left = clean.files() - before
    if left:
        raise SystemExit("pip uninstall left: " + ", ".join(sorted(left)))
