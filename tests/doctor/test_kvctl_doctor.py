"""kvctl doctor as a program: exit codes, JSON, colours, and the simulated CUDA driver."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import needs
import pytest
from terminal import written_to_a_terminal

from kvelastic.cli.commands.doctor import report
from kvelastic.doctor.finding import Finding

pytestmark = pytest.mark.slow


KVCTL = str(Path(sys.executable).with_name("kvctl"))
SIM_BUILD = Path(__file__).parents[1] / "sim" / "build"
STATES = {"ok", "note", "warning", "problem"}
# A shell that has set nothing, so that this machine's variables decide no test.
OURS = ("KVELASTIC", "KVCACHED", "KVSIM", "VLLM_PLUGINS", "CUDA_VISIBLE_DEVICES", "NO_COLOR")
BARE = {key: value for key, value in os.environ.items() if not any(o in key for o in OURS)}


def doctor(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [KVCTL, "doctor", *arguments]
    return subprocess.run(command, env=BARE | environment, capture_output=True, text=True)


def findings(**environment: str) -> tuple[int, dict[str, list[dict[str, str]]]]:
    """The exit code, and the findings by check."""
    done = doctor("--json", **environment)
    assert done.stderr == ""
    by_check: dict[str, list[dict[str, str]]] = {}
    for entry in json.loads(done.stdout):
        by_check.setdefault(entry["check"], []).append(entry)
    return done.returncode, by_check


@pytest.fixture(scope="module")
def built() -> str:
    done = subprocess.run([SIM_BUILD], check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def simulated(built: str, tmp_path: Path) -> dict[str, str]:
    return {"LD_LIBRARY_PATH": built, "KVSIM_MACHINE": str(tmp_path / "machine")}


def test_json_is_an_array_of_findings():
    done = doctor("--json")
    entries = json.loads(done.stdout)
    assert all(set(entry) == {"check", "state", "what", "do"} for entry in entries)
    assert {entry["state"] for entry in entries} <= STATES
    problems = [entry for entry in entries if entry["state"] == "problem"]
    assert done.returncode == (1 if problems else 0), problems
    topics = "gpu host limits shm segments ledgers instances permissions config engines python"
    assert {entry["check"].partition(".")[0] for entry in entries} == set(topics.split())


@needs.no_gpu
def test_no_driver_is_a_note():
    _, by_check = findings()
    (driver,) = by_check["gpu.driver"]
    assert driver["state"] == "note"
    assert "no NVIDIA driver" in driver["what"]
    assert "gpu.vmm" not in by_check


def test_page_native_and_shm_checks_are_run():
    _, by_check = findings()
    assert by_check["host.page"][0]["state"] in {"ok", "warning", "note"}
    assert by_check["python.native"][0]["state"] == "ok"
    assert by_check["shm.write"][0]["state"] == "ok"


def test_simulated_gpus(simulated):
    _, by_check = findings(KVSIM_DEVICES="2", KVSIM_MEMORY="64M", **simulated)
    (driver,) = by_check["gpu.driver"]
    assert (driver["state"], "CUDA 13.0" in driver["what"]) == ("ok", True)
    assert "2 GPUs" in driver["what"]
    gpus = by_check["gpu.vmm"]
    assert [gpu["state"] for gpu in gpus] == ["ok", "ok"]
    assert "cuda:1" in gpus[1]["what"]
    assert "pages of 2.00 MiB, 64.00 MiB of 64.00 MiB free" in gpus[1]["what"]
    assert "cuda:0" in by_check["gpu.device"][0]["what"]


def test_cuda_context_is_created_in_a_child_process(simulated, tmp_path):
    trace = tmp_path / "trace"
    findings(KVSIM_TRACE=str(trace), KVSIM_CONTEXT_BYTES="8M", KVSIM_MEMORY="64M", **simulated)
    lines = [line.split() for line in trace.read_text().splitlines()]
    assert "cuDevicePrimaryCtxRetain" in {line[0] for line in lines}
    pids = {line[-1] for line in lines}
    assert len(pids) == 1
    assert not Path(f"/proc/{pids.pop()}").exists()


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_old_driver_is_a_problem(simulated, device):
    code, by_check = findings(KVSIM_DRIVER_VERSION="11000", KVELASTIC_DEVICE=device, **simulated)
    assert code == 1
    (driver,) = by_check["gpu.driver"]
    assert driver["state"] == "problem"
    assert "CUDA 11.0" in driver["what"]
    assert "CUDA 11.3" in driver["do"]


def test_gpu_without_virtual_memory_management_is_a_problem(simulated):
    code, by_check = findings(KVSIM_NO_VMM="1", **simulated)
    assert code == 1
    assert by_check["gpu.driver"][0]["state"] == "ok"
    (gpu,) = by_check["gpu.vmm"]
    assert gpu["state"] == "problem"
    assert "no virtual memory management" in gpu["what"]
    assert "KVELASTIC_DEVICE=host" in gpu["do"]


def test_driver_without_gpu_is_a_warning(simulated):
    _, by_check = findings(KVSIM_NO_DEVICE="1", **simulated)
    assert by_check["gpu.driver"][0]["state"] == "warning"
    _, by_check = findings(KVSIM_NO_DEVICE="1", CUDA_VISIBLE_DEVICES="", **simulated)
    assert by_check["gpu.driver"][0]["state"] == "note"


def test_failed_cuinit_and_full_gpu_are_reported(simulated):
    _, by_check = findings(KVSIM_FAIL="cuInit:1:999", **simulated)
    assert "CUDA_ERROR_UNKNOWN (999)" in by_check["gpu.driver"][0]["what"]
    _, by_check = findings(KVSIM_FAIL="cuDevicePrimaryCtxRetain:1:2", **simulated)
    assert "CUDA_ERROR_OUT_OF_MEMORY" in by_check["gpu.vmm"][0]["what"]


def test_invalid_driver_library_is_a_problem(tmp_path):
    (tmp_path / "libcuda.so.1").write_text("not a library")
    _, by_check = findings(LD_LIBRARY_PATH=str(tmp_path), KVELASTIC_DEVICE="cuda")
    assert by_check["gpu.driver"][0]["state"] == "problem"


def test_invalid_value_is_a_problem_but_typo_not():
    code, by_check = findings(KVELASTIC_LIMIT="banana")
    assert code == 1
    (value,) = by_check["config.value"]
    assert value["what"] == "KVELASTIC_LIMIT='banana' is not accepted"
    assert value["do"].startswith("set it to none;")
    before, _ = findings()
    code, by_check = findings(KVELASTIC_LIMTI="1G")
    assert code == before
    assert "KVELASTIC_LIMIT" in by_check["config.unknown"][0]["do"]


def test_process_open_file_limit_is_reported():
    done = subprocess.run(
        ["sh", "-c", f"ulimit -n 200; exec {KVCTL} doctor"],
        env=BARE, capture_output=True, text=True,
    )  # fmt: skip
    assert "limit of open files: 200;" in done.stdout


def test_piped_output_is_plain_and_grouped():
    done = doctor(KVELASTIC_LIMIT="banana")
    assert done.returncode == 1
    assert "\x1b" not in done.stdout
    lines = done.stdout.splitlines()
    for title in ("GPU", "Host memory", "Limits", "Shared memory", "Configuration", "Engines"):
        assert lines.count(title) == 1
    at = next(number for number, line in enumerate(lines) if "config.value" in line)
    assert lines[at].startswith("  problem  config.value")
    assert lines[at + 1].lstrip().startswith("-> set it to none;")
    assert lines[-1].startswith("1 problem, ")


@pytest.mark.parametrize(("no_color", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_no_color_turns_colours_off(no_color, coloured):
    environment = BARE | {"TERM": "xterm-256color", "KVELASTIC_LIMIT": "banana"} | no_color
    written = written_to_a_terminal([KVCTL, "doctor"], environment, exit_code=1)
    assert ("\x1b[31mproblem" in written) is coloured
    assert ("\x1b" in written) is coloured


def test_control_characters_in_texts_are_replaced():
    text = report([Finding("segments.dead", "warning", "a\x1b[31mb", "\x1b[2J")], in_colour=True)
    assert "\x1b[31mb" not in text
    assert "\x1b[2J" not in text
    assert text.endswith("0 problems, 1 warning, 0 notes, 0 ok")


def test_kvctl_list_does_not_import_the_doctor():
    program = (
        "import sys; from kvelastic.cli.kvctl import main\n"
        "try: main(['list', '--json'])\n"
        "except SystemExit: pass\n"
        "print([m for m in sys.modules if m.startswith('kvelastic.doctor')], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stderr.splitlines()[-1] == "[]"


def test_the_doctor_imports_no_engine():
    program = (
        "import sys; from kvelastic.doctor.gather import gather\n"
        "from kvelastic.doctor.judge import judge; judge(gather())\n"
        "print(sorted({'torch', 'vllm', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=BARE)
    assert done.stdout == "[]\n", done.stderr


def test_a_missing_native_module_is_a_finding():
    program = (
        "import sys; sys.modules['kvelastic._vmm'] = None\n"
        "from kvelastic.cli.kvctl import main; main(['doctor', '--json'])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=BARE)
    assert done.stderr == ""
    (native,) = [one for one in json.loads(done.stdout) if one["check"] == "python.native"]
    assert (done.returncode, native["state"]) == (1, "problem")


def test_long_text_wraps_with_indent_on_terminals():
    finding = Finding("engines.hooks", "ok", "one two three " * 10, "four five " * 10)
    lines = report([finding], in_colour=False, columns=60).splitlines()
    assert max(map(len, lines)) <= 60
    first, *others = lines[1:6]
    assert first.index("one") == 26
    assert all(line.startswith(" " * 26) and line[26] != " " for line in others)
    assert report([finding], in_colour=False).count("\n") == 4
    assert report([finding], in_colour=False, columns=40).count("\n") == 4
