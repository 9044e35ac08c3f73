"""The native module by CMake and the nanobind of this Python; then it is loaded. No pip.

It goes to build/gpu/native-<Python>, and build/gpu/tree is the package as an install would lay it
out: links to kvelastic/, cli/ and controller/, and the module among them. What is built already is
built again only where a source has changed.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from benchmarks.gpu import places
from benchmarks.gpu.findings import Findings
from benchmarks.gpu.native_sources import digest
from benchmarks.gpu.requirements import tool


def missing() -> str:
    """Why nothing can be built here; empty: it can."""
    if sys.version_info < (3, 11):
        # PYTHONSAFEPATH is from 3.11 on.
        return "Python 3.11 or later is needed to run from links; or scripts/setup"
    lacking = [name for name in ("cmake",) if tool(name) is None]
    lacking += [] if importlib.util.find_spec("nanobind") else ["nanobind"]
    include = Path(sysconfig.get_paths()["include"])
    lacking += [] if (include / "Python.h").is_file() else [f"{include}/Python.h"]
    lacking += [] if tool(os.environ.get("CXX", "c++")) else ["a C++20 compiler"]
    return f"there is no {' and no '.join(lacking)}" if lacking else ""


def compile_module() -> None:
    """Raises `CalledProcessError`; what the tools say goes to stdout."""
    places.NATIVE.mkdir(parents=True, exist_ok=True)
    asked = subprocess.run(
        [sys.executable, "-m", "nanobind", "--cmake_dir"],
        check=True, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    cmake, ninja = tool("cmake"), tool("ninja")
    generator = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"] if ninja else []
    subprocess.run(
        [
            str(cmake), "-S", str(places.ROOT), "-B", str(places.NATIVE), *generator,
            f"-DPython_EXECUTABLE={sys.executable}", f"-Dnanobind_DIR={asked.stdout.strip()}",
            "-DCMAKE_BUILD_TYPE=Release",
            # A compiler of another age warns of more, and each warning is an error.
            "-DCMAKE_CXX_FLAGS=-w",
        ],
        check=True,
    )  # fmt: skip
    subprocess.run(
        [str(cmake), "--build", str(places.NATIVE), "--target", "_vmm", "--parallel"], check=True
    )


def lay_out() -> None:
    """The tree of links, made anew."""
    package = places.TREE / "kvelastic"
    shutil.rmtree(places.TREE, ignore_errors=True)
    package.mkdir(parents=True)
    sources = [
        *(places.ROOT / "kvelastic").iterdir(),
        places.ROOT / "cli",
        places.ROOT / "controller",
    ]
    for path in sources:
        if path.name != "__pycache__" and path.suffix != ".so":
            (package / path.name).symlink_to(path)
    (module,) = places.NATIVE.glob("_vmm*.so")
    (package / module.name).symlink_to(module)


def main() -> None:
    with Findings.of_command(__doc__) as found:
        if why := missing():
            found.check("what a build needs is here", False, why)
            return
        made = digest()
        stamp = places.NATIVE / "digest"
        if not places.is_built():
            stamp.unlink(missing_ok=True)
            compile_module()
            lay_out()
            stamp.write_text(made)
            found.line("Built by CMake with the installed nanobind; nothing was installed.")
        loads = subprocess.run(
            [sys.executable, "-c", "import kvelastic._vmm, kvelastic; print(kvelastic.__file__)"],
            check=False, capture_output=True, text=True,
        )  # fmt: skip
        said = (loads.stdout + loads.stderr).strip()
        found.check("the module loads", loads.returncode == 0, said[-2000:])
        ours = loads.stdout.startswith(str(places.TREE))
        found.check("no other kvelastic comes first on the path", ours)
        if names := places.stood_in_for():
            found.line(f"Not installed, and stood in for: {', '.join(names)}.")


if __name__ == "__main__":
    main()
