"""Benchmarks and the demo find what they import: they share programs with the tests, which move."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import needs
import pytest
from processes import run_python
from waiting import DEADLINE_S

ROOT = Path(__file__).parents[2]
BENCHMARKS = sorted(path.parent.name for path in ROOT.glob("benchmarks/*/__main__.py"))


@pytest.mark.slow
@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_prints_help(name: str) -> None:
    done = run_python("-m", f"benchmarks.{name}", "--help", folder=ROOT)
    command = "scripts/gpu" if name == "gpu" else f"scripts/bench {name}"
    assert done.stdout.startswith(f"usage: {command}")


HELD_BENCHMARK = """
import signal
def end(number, _):
    print(signal.Signals(number).name, flush=True)
    raise SystemExit(1)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, end)
print("begun", flush=True)
while True:
    signal.pause()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_to_bench_ends_the_benchmark(number: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "bench", tmp_path / "scripts")
    (tmp_path / "scripts" / "setup").symlink_to("/bin/true")
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").symlink_to(sys.executable)
    for name in ("held", "next"):
        (tmp_path / "benchmarks" / name).mkdir(parents=True)
        (tmp_path / "benchmarks" / name / "__main__.py").write_text(HELD_BENCHMARK)
    with subprocess.Popen(
        [tmp_path / "scripts" / "bench", "held", "next"], stdout=subprocess.PIPE, text=True
    ) as bench:
        assert bench.stdout is not None
        assert bench.stdout.readline() == "== held\n"
        assert bench.stdout.readline() == "begun\n"
        bench.send_signal(number)
        assert bench.stdout.read() == f"{number.name}\n"
        assert bench.wait(DEADLINE_S) != 0


SCRIPTS = sorted(path.name for path in (ROOT / "scripts").iterdir() if path.is_file())


@pytest.mark.parametrize("name", SCRIPTS)
def test_script_help_has_no_side_effects(name: str, tmp_path: Path) -> None:
    """In a clone that has no set-up yet, from another folder."""
    clone = tmp_path / "clone"
    shutil.copytree(ROOT / "scripts", clone / "scripts")
    if name == "gpu":  # it has a parser of its own
        shutil.copytree(ROOT / "benchmarks", clone / "benchmarks")
    before = sorted(clone.rglob("*"))
    done = subprocess.run(
        [f"clone/scripts/{name}", "--help"],
        cwd=tmp_path,
        env=os.environ | {"PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert f"scripts/{name}" in done.stdout
    assert sorted(clone.rglob("*")) == before


DEMO_PATH = os.pathsep.join(str(ROOT / path) for path in ("scripts/_demo", "tests/programs"))
DEMO_ENGINES = ("vllm", "sglang", "transformers")


def run_demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ROOT / "scripts" / "demo", *arguments], capture_output=True, text=True, check=False
    )


@pytest.mark.slow
@needs.vllm
@pytest.mark.parametrize("engine", DEMO_ENGINES)
def test_demo_finds_its_programs(engine: str, tmp_path: Path) -> None:
    """And the controller takes what it is to launch."""
    program = f"""
import json, demo, front
from pathlib import Path
folder = Path({str(tmp_path)!r})
names = ("first", "second")
settings = front.settings_of(demo.ENGINES[{engine!r}], 8000, 8001, folder, names, folder / "log")
(folder / "controller.yaml").write_text(json.dumps(settings))
"""
    run_python("-c", program, environment={"PYTHONPATH": DEMO_PATH}, folder=ROOT)
    controller = Path(sys.executable).with_name("kvelastic-controller")
    checked = subprocess.run(
        [controller, "--check", "--config", tmp_path / "controller.yaml"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stderr


@needs.vllm
def test_cluster_demo_configuration_is_valid(tmp_path: Path) -> None:
    program = f"""
import cluster
from pathlib import Path
from kvelastic.integration.ray.settings import parse
folder = Path({str(tmp_path)!r})
print(*(model.replicas for model in parse(cluster.config_of(folder, folder, 256)).models))
"""
    path = os.pathsep.join((DEMO_PATH, str(ROOT / "tests" / "cluster")))
    done = run_python("-c", program, environment={"PYTHONPATH": path}, folder=ROOT)
    assert done.stdout == "2 1\n"


@needs.vllm
def test_prefill_decode_demo_configuration_is_valid() -> None:
    program = """
import json, prefill_decode
from kvelastic.controller.settings.settings_file import parse
print(*(model.prefill for model in parse(json.dumps(prefill_decode.settings_of(1, 2, 3))).models))
"""
    done = run_python("-c", program, environment={"PYTHONPATH": DEMO_PATH}, folder=ROOT)
    assert done.stdout == "chat-prefill None\n"


def test_demo_rejects_unknown_arguments() -> None:
    others = [[story, "--engine", "sglang"] for story in ("--cluster", "--prefill-decode")]
    for arguments in (["--engine"], ["--engine", "ollama"], ["--engine="], ["--quick"], *others):
        done = run_demo(*arguments)
        assert done.returncode == 2, arguments
        assert "usage: scripts/demo [--engine vllm|sglang|transformers]" in done.stderr
        assert arguments[0].partition("=")[0] in done.stderr or "ollama" in done.stderr
    shown = run_demo("--help")
    assert shown.returncode == 0
    assert shown.stdout.count("scripts/demo") >= len(DEMO_ENGINES)


@needs.vllm
@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("engine", DEMO_ENGINES)
def test_demo_runs_to_the_end(engine: str) -> None:
    done = run_demo("--engine", engine)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "== 8. The end" in done.stdout


@needs.vllm
@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_prefill_decode_demo_runs_to_the_end() -> None:
    done = run_demo("--prefill-decode")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "== 6. The end" in done.stdout


def test_parent_of_the_repository_is_not_on_path(tmp_path: Path) -> None:
    """What lies there by chance, a checkout of triton say, is nobody's package."""
    program = "import sys, kvelastic.cli; print(*sys.path, sep='\\n')"
    done = run_python("-c", program, folder=tmp_path)
    assert str(ROOT.parent) not in done.stdout.splitlines()
