"""Loading at Python's start: what the wheel installs, what a start costs, and what it survives."""

from __future__ import annotations

import fcntl
import json
import os
import pkgutil
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import needs
import pytest
from waiting import DEADLINE_S

from kvelastic.doctor.children import STARTUP_PROGRAM, ask_startup
from kvelastic.engines import ENGINES

pytestmark = pytest.mark.slow


ROOT = Path(__file__).parents[2]
FILES = ROOT / "startup_files"
NAMES = ("kvelastic.pth", "kvelastic.start")
CHEAP = {
    "kvelastic",
    "kvelastic.startup",
    "kvelastic.engines",
    "kvelastic.integration",
    "kvelastic.integration.hooks",
    "kvelastic.integration.hooks.late_import",
}
"""All that a start with the variable set may import of ours."""
OURS = ("KVELASTIC", "KVCACHED", "PYTHON")
BARE = {key: value for key, value in os.environ.items() if not any(o in key for o in OURS)}
ON = {"ENABLE_KVELASTIC": "true"}
ARMED = tuple(engine.loading_module for engine in ENGINES if engine.loaded_by)
SAY_ARMED = """
import sys
late_import = sys.modules.get("kvelastic.integration.hooks.late_import")
print(late_import.armed() if late_import else ())
"""


def run(
    program: str, *options: str, python: str = sys.executable, **environ: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python, *options, "-c", program],
        env=BARE | environ,
        cwd="/",  # else kvelastic would be found in a working directory that has one
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )


def said(program: str, *options: str, python: str = sys.executable, **environ: str) -> str:
    """What a program prints that ends well and complains of nothing."""
    done = run(program, *options, python=python, **environ)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout.strip()


# -------------------------------------------------------------------- what is installed and removed


class Environment:
    """A virtual environment with a wheel of this tree in it, and nothing else."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = str(folder / "bin/python")
        (self.packages,) = folder.glob("lib/python*/site-packages")

    def pip(self, *arguments: str) -> None:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", self.python]
        done = subprocess.run([*pip, *arguments], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    def modules(self, **environ: str) -> set[str]:
        """All modules of a Python that has just started."""
        return set(said("import sys; print(*sys.modules)", python=self.python, **environ).split())


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    folder = tmp_path_factory.mktemp("empty")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    return Environment(folder)


@pytest.fixture(scope="module")
def environment(empty: Environment, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Built where scripts/setup has built the native module, which is not built anew then."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", str(ROOT)]
    options = ["--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", str(folder)]
    tools = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    with (ROOT / "build/setup.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = subprocess.run(
            [*command, *options], env=os.environ | tools, capture_output=True, text=True
        )
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    made = Environment(shutil.copytree(empty.folder, folder / "venv", symlinks=True))
    made.pip("install", "--no-index", "--no-deps", str(wheel))
    return made


def test_wheel_installs_both_files_and_uninstall_removes_them(
    environment: Environment, tmp_path: Path
) -> None:
    """In a copy, which others need not share."""
    copy = Environment(shutil.copytree(environment.folder, tmp_path / "venv", symlinks=True))
    (record,) = copy.packages.glob("kvelastic-*.dist-info/RECORD")
    recorded = {line.split(",")[0] for line in record.read_text().splitlines()}
    assert set(NAMES) < recorded
    for name in NAMES:
        assert (copy.packages / name).read_bytes() == (FILES / name).read_bytes()
    assert said(SAY_ARMED, python=copy.python, **ON) == str(ARMED)
    copy.pip("uninstall", "--yes", "kvelastic")
    assert not list(copy.packages.glob("*kvelastic*"))
    assert said(SAY_ARMED, python=copy.python, **ON) == "()"


def test_start_without_the_variable_imports_nothing_more(
    empty: Environment, environment: Environment
) -> None:
    assert environment.modules() == empty.modules() == empty.modules(**ON)
    assert environment.modules(**ON) - empty.modules() == CHEAP | {"__future__"}


def test_editable_install_has_both_files() -> None:
    installed = {str(path): path for path in metadata.distribution("kvelastic").files or ()}
    for name in NAMES:
        assert Path(installed[name].locate()).read_bytes() == (FILES / name).read_bytes()


def test_both_start_files_call_the_same_function() -> None:
    lines = (FILES / NAMES[0]).read_text().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("import os; ")
    (entry_point,) = (FILES / NAMES[1]).read_text().split()
    function = pkgutil.resolve_name(entry_point)
    assert f"from {function.__module__} import {function.__name__}" in lines[0]


# ------------------------------------------------------------------------------------ what it costs


@pytest.mark.parametrize("environ", [{}, {"ENABLE_KVELASTIC": ""}])
def test_without_the_variable_kvelastic_is_not_imported(environ: dict[str, str]) -> None:
    program = "import sys; print([m for m in sys.modules if m.partition('.')[0] == 'kvelastic'])"
    assert said(program, **environ) == "[]"


@pytest.mark.parametrize(
    "environ",
    [ON, {"ENABLE_KVELASTIC": "false"}, {"ENABLE_KVELASTIC": "banana"}, {"ENABLE_KVCACHED": "1"}],
)
def test_set_variable_arms_with_minimal_imports(environ: dict[str, str]) -> None:
    modules = "print(*[m for m in sys.modules if m.partition('.')[0] == 'kvelastic'])"
    program = f"{SAY_ARMED}{modules}"
    armed, modules = said(program, **environ).splitlines()
    assert armed == str(ARMED)
    assert set(modules.split()) == CHEAP


# --------------------------------------------------------------------------------- what it survives

FAILING = "raise RuntimeError('broken')"
BROKEN: dict[str, dict[str, str | None]] = {
    "the package is gone": {},
    "no startup": {"__init__": ""},
    "the package fails": {"__init__": FAILING},
    "startup is no Python": {"__init__": "", "startup": "def ("},
    "startup has another function": {"__init__": "", "startup": ""},
    "startup fails": {"__init__": "", "startup": FAILING},
    "engines are gone": {"__init__": "", "startup": None},
    "engines fail": {"__init__": "", "startup": None, "engines": FAILING},
    "hooks are gone": {"__init__": "", "startup": None, "engines": None},
    "the hook fails": {
        "__init__": "",
        "startup": None,
        "engines": None,
        "hooks/__init__": "",
        "hooks/late_import": f"def armed(): return ()\ndef when_imported(name, action): {FAILING}",
    },
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_install_does_not_break_python(case: str, tmp_path: Path) -> None:
    """The files as `site` reads them, beside a kvelastic that lacks what they need."""
    for name, text in BROKEN[case].items():
        path = tmp_path / f"kvelastic/{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        source = ROOT / f"kvelastic/{name}.py"
        path.write_text(source.read_text() if text is None else text)
    (tmp_path / NAMES[0]).write_bytes((FILES / NAMES[0]).read_bytes())
    program = f"""
import site
site.addsitedir({str(tmp_path)!r})
{SAY_ARMED}
import sys
startup = sys.modules.get("kvelastic.startup")
print(repr(getattr(startup, "failure", None)) if startup else "not loaded")
"""
    armed, failure = said(program, "-S", **ON).splitlines()
    assert armed == "()"
    # What could be loaded knows why it did not arm, and the doctor asks it.
    assert (failure not in ("None", "not loaded")) == (BROKEN[case].get("startup", "") is None)


def test_complete_folder_arms(tmp_path: Path) -> None:
    """Else the test before this one would pass for a line that does nothing."""
    (tmp_path / "kvelastic").symlink_to(ROOT / "kvelastic")
    (tmp_path / NAMES[0]).write_bytes((FILES / NAMES[0]).read_bytes())
    program = f"import site\nsite.addsitedir({str(tmp_path)!r})\n{SAY_ARMED}"
    assert said(program, "-S", **ON) == str(ARMED)


# -------------------------------------------------------------------------- where it is, and is not


def test_every_kind_of_child_process_is_armed(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        f"""
import multiprocessing, os, subprocess, sys
from kvelastic.integration.hooks.late_import import armed
def answer(queue): queue.put(armed())
if __name__ == "__main__":
    for method in ("fork", "spawn", "forkserver"):
        context = multiprocessing.get_context(method)
        queue = context.SimpleQueue()
        child = context.Process(target=answer, args=(queue,))
        child.start(); child.join()
        print(queue.get())
    sys.stdout.flush()
    subprocess.run([sys.executable, "-c", {SAY_ARMED!r}], check=True)
"""
    )
    done = subprocess.run(
        [sys.executable, program], env=BARE | ON, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [str(ARMED)] * 4


@pytest.mark.parametrize(
    ("options", "is_armed"), [(["-I"], True), (["-E"], True), (["-s"], True), (["-S"], False)]
)
def test_arming_under_python_options(
    options: list[str], is_armed: bool, environment: Environment
) -> None:
    armed = said(SAY_ARMED, *options, python=environment.python, **ON)
    assert armed == str(ARMED if is_armed else ())


def test_venv_with_system_packages_is_armed(environment: Environment, tmp_path: Path) -> None:
    """`--system-site-packages`, as venv sets it up, with `environment` as the system."""
    packages = tmp_path / "site-packages"
    packages.mkdir()
    (packages / "system.pth").write_text(
        f"import site; site.addsitedir({str(environment.packages)!r})\n"
    )
    program = f"import site\nsite.addsitedir({str(packages)!r})\n{SAY_ARMED}"
    assert said(program, "-S", **ON) == str(ARMED)


def test_arming_a_checkout_is_idempotent() -> None:
    program = """
import os, sys
from kvelastic.startup import arm, at_start
arm()
before = list(sys.meta_path)
os.environ["ENABLE_KVELASTIC"] = "true"
arm(); arm(); at_start()
from kvelastic.integration.hooks.late_import import armed
print(armed(), len(sys.meta_path) - len(before))
"""
    assert said(program, "-S", PYTHONPATH=str(ROOT)) == f"{ARMED} 1"


# ---------------------------------------------------------------------- when the engine is imported


@pytest.fixture
def fake_engine(tmp_path: Path) -> str:
    """A path with a package of the engine's name, of a version that nobody serves."""
    (engine,) = [engine for engine in ENGINES if engine.loaded_by]
    module = tmp_path / engine.loading_module.replace(".", "/")
    module.mkdir(parents=True)
    for folder in (module, *module.parents):
        if folder == tmp_path:
            break
        (folder / "__init__.py").write_text("__version__ = '1.0'\n")
    (module / "__init__.py").write_text(
        f"class {engine.loading_class}:\n    def __init__(self, model): self.model = model\n"
        "class Other: pass\n"
    )
    return str(tmp_path)


MODULE, _, CLASS = next(engine.loaded_by for engine in ENGINES if engine.loaded_by).partition(":")
MAKE = f"""
import {MODULE} as module
module.Other()
try:
    print(module.{CLASS}("a model").model)
except Exception as error:
    print(f"{{type(error).__name__}}: {{error}}")
"""


@pytest.mark.parametrize(
    ("environ", "outcome"),
    [
        ({}, "a model"),
        ({"ENABLE_KVELASTIC": "false"}, "a model"),
        (ON, "UnsupportedEngineError: kvelastic does not know transformers 1.0: it was tried with"),
        (ON | {"KVELASTIC_LIMIT": "banana"}, "ConfigError: KVELASTIC_LIMIT='banana'"),
        ({"ENABLE_KVELASTIC": "banana"}, "ConfigError: ENABLE_KVELASTIC='banana'"),
    ],
)
def test_unsupported_engine_fails_at_use_not_at_import(
    environ: dict[str, str], outcome: str, fake_engine: str
) -> None:
    assert said(MAKE, PYTHONPATH=fake_engine, **environ).startswith(outcome)


def test_importing_the_engine_loads_only_minimal_modules(fake_engine: str) -> None:
    """So vLLM, which imports it in each of its processes, is as it was."""
    modules = "print(*sorted(m for m in sys.modules if m.partition('.')[0] == 'kvelastic'))"
    program = f"import sys, {MODULE}\n{modules}"
    assert set(said(program, PYTHONPATH=fake_engine, **ON).split()) == CHEAP


def test_failed_registration_is_retried_until_success(fake_engine: str) -> None:
    """What is registered once is not registered again; until then it is tried each time."""
    program = f"""
import os, sys
import {MODULE} as module
from kvelastic.startup import arm
arm()
import kvelastic.integration.transformers.plugin as plugin
calls = []
def register():
    calls.append(len(calls))
    if len(calls) < 3: raise RuntimeError("not yet")
plugin.register = register
for attempt in range(5):
    arm()
    try:
        print(module.{CLASS}(attempt).model)
    except Exception as error:
        print(type(error).__name__)
print(calls)
"""
    lines = said(program, PYTHONPATH=fake_engine, **ON).splitlines()
    assert lines == ["EngineError", "EngineError", "2", "3", "4", "[0, 1, 2]"]


def test_already_imported_engine_is_still_hooked(fake_engine: str) -> None:
    program = f"""
import os
import {MODULE}
os.environ["ENABLE_KVELASTIC"] = "true"
import kvelastic.startup
kvelastic.startup.arm()
{MAKE}
"""
    assert said(program, PYTHONPATH=fake_engine).startswith("UnsupportedEngineError: ")


def test_failed_integration_import_raises_at_each_use(fake_engine: str) -> None:
    program = f"import sys\nsys.modules['kvelastic.config'] = None\n{MAKE}{MAKE}"
    lines = said(program, PYTHONPATH=fake_engine, **ON).splitlines()
    assert len(lines) == 2
    for line in lines:
        assert line.startswith("EngineError: kvelastic could not be loaded into transformers: ")
        assert "kvelastic.config" in line


def test_missing_engine_class_is_logged(fake_engine: str) -> None:
    source = Path(fake_engine, MODULE.replace(".", "/"), "__init__.py")
    source.write_text("class Other: pass\n")
    done = run(f"import {MODULE}; print('goes on')", PYTHONPATH=fake_engine, **ON)
    assert (done.returncode, done.stdout) == (0, "goes on\n")
    assert f"This transformers has no {MODULE}:{CLASS}: it runs without kvelastic" in done.stderr


@needs.transformers
def test_real_engine_fails_at_use_not_at_import() -> None:
    program = f"""
from {MODULE} import {CLASS}
try:
    {CLASS}()
except Exception as error:
    print(f"{{type(error).__name__}}: {{error}}")
"""
    done = run(program, KVELASTIC_LIMIT="banana", **ON)
    assert done.stdout.startswith("ConfigError: KVELASTIC_LIMIT='banana'"), done.stderr


# ----------------------------------------------------------------------------- what the doctor sees


def test_doctor_reports_an_armed_start() -> None:
    facts = ask_startup(BARE)
    assert (facts.armed, facts.failure) == (ARMED, "")
    assert {Path(name).name for name in facts.start_files} == set(NAMES)


def test_doctor_detects_missing_start_files(environment: Environment) -> None:
    """A folder on PYTHONPATH: its kvelastic can be imported, and is not at Python's start."""
    python = (environment.python, "-c", STARTUP_PROGRAM)
    assert ask_startup(BARE, command=python).armed == ARMED
    hidden = environment.packages / "hidden"
    hidden.mkdir()
    for path in list(environment.packages.glob("kvelastic.*")):
        path.rename(hidden / path.name)
    try:
        facts = ask_startup(BARE, command=python)
    finally:
        for path in hidden.iterdir():
            path.rename(environment.packages / path.name)
    assert (facts.armed, facts.failure, facts.start_files) == ((), "", ())
    assert str(environment.packages) in facts.site_folders


def test_doctor_reports_why_an_install_is_broken(environment: Environment) -> None:
    python = (environment.python, "-c", STARTUP_PROGRAM)
    for name, expected in (("startup", "ImportError"), ("engines", "ModuleNotFoundError")):
        path = environment.packages / f"kvelastic/{name}.py"
        hidden = path.with_suffix(".hidden")
        path.rename(hidden)
        try:
            if name == "startup":
                path.write_text("raise ImportError('odd')")
            facts = ask_startup(BARE, command=python)
        finally:
            hidden.rename(path)
        assert facts.armed == ()
        assert facts.failure.startswith(f"{expected}: ")


@pytest.mark.parametrize(
    ("script", "failure"),
    [
        ("exit 3", "a new Python ended with exit code 3"),
        ("kill -SEGV $$", "a new Python died of SIGSEGV"),
        ("echo hello", "a new Python said nothing of it"),
        ("echo '[]'", "a new Python said nothing of it"),
        ("echo '{\"armed\": []}'", "a new Python said nothing of it"),
        ("cat", "a new Python said nothing of it"),
    ],
)
def test_doctor_reports_a_python_that_fails_to_start(script: str, failure: str) -> None:
    assert ask_startup(command=("sh", "-c", script)).failure == failure


def test_doctor_kills_a_hanging_python(tmp_path: Path) -> None:
    script = f"cd {tmp_path}; mkfifo pipe; exec cat pipe"
    facts = ask_startup(command=("sh", "-c", script), timeout_s=2)
    assert facts.failure == "a new Python gave no answer within 2 s"


def test_doctor_ignores_output_of_other_start_files() -> None:
    said = json.dumps({"armed": ["a"], "failure": "", "start_files": [], "site_folders": []})
    assert ask_startup(command=("sh", "-c", f"echo hello; echo '{said}'")).armed == ("a",)
