"""What an engine's newest release has changed of what kvelastic touches: scripts/engines."""

from __future__ import annotations

import argparse
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

from signatures import signature
from touched import touched

ENGINES = ("vllm", "transformers", "sglang")
ROOT = Path(__file__).parents[2]


def installed(engine: str) -> Path | None:
    """Return the folder of packages with the supported version of the engine, or None."""
    folders = [Path(sysconfig.get_paths()["purelib"])]
    folders += sorted(ROOT.glob(".venv-sglang/lib/python*/site-packages"))
    return next((each for each in folders if (each / engine).is_dir()), None)


def fetch(engine: str, folder: Path) -> Path:
    """Download the engine's newest wheel from the index; return its path."""
    command = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", "download"]
    arguments = ["--no-deps", "--only-binary=:all:", "--dest", str(folder), engine]
    subprocess.run([*command, *arguments], check=True)
    return next(folder.glob("*.whl"))


def unpack(wheel: Path, folder: Path) -> Path:
    """Extract only the Python files of a wheel; return their folder."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.endswith(".py"):
                archive.extract(name, folder)
    return folder


def compare(engine: str, ours: Path, theirs: Path) -> list[str]:
    """Return a line for each name that has been removed or changed."""
    lines = []
    for name in touched(engine):
        before, after = signature(ours, name), signature(theirs, name)
        if before == after:
            continue
        if after is None:
            lines.append(f"gone     {name}\n           was {before}")
        elif before is None:
            lines.append(f"new      {name}\n           is  {after}")
        else:
            lines.append(f"changed  {name}\n           was {before}\n           is  {after}")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/engines", description=__doc__)
    parser.add_argument("--newest", action="store_true", help="fetch the newest release")
    parser.add_argument("--wheel", type=Path, help="a wheel that is here already")
    parser.add_argument("--engine", choices=ENGINES, help="one engine (else all)")
    options = parser.parse_args()
    if options.newest == (options.wheel is not None):
        parser.error("give --newest or --wheel")
    if options.wheel is not None and options.engine is None:
        parser.error("--wheel needs --engine")
    differs = False
    for engine in [options.engine] if options.engine else ENGINES:
        ours = installed(engine)
        if ours is None:
            print(f"{engine} is not installed here, so nothing can be compared; run scripts/setup")
            differs = True
            continue
        with tempfile.TemporaryDirectory(prefix="kvelastic-engines-") as name:
            wheel = options.wheel or fetch(engine, Path(name))
            lines = compare(engine, ours, unpack(wheel, Path(name) / "unpacked"))
        print(f"{wheel.name}: {len(touched(engine))} names looked at, {len(lines)} differ")
        print("".join(f"  {line}\n" for line in lines), end="")
        differs = differs or bool(lines)
    return 1 if differs else 0


if __name__ == "__main__":
    sys.exit(main())
