"""The example of three models on one GPU: as it stands it holds two of them, and they take turns.

vLLM and llama.cpp are fakes under the programs' own names; the ports are free ones.
"""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path

import pytest
import yaml
from ports import free_port
from running import FAKES, Controller
from waiting import wait_until

from kvelastic.controller.models.admission import Admission, Claim, Device, Model
from kvelastic.controller.settings.settings_file import load
from kvelastic.controller.settings.settings_warnings import warnings_of

EXAMPLE = Path(__file__).parents[2] / "examples" / "three_models_on_one_gpu.yaml"

STAND_IN = """#!{python}
import os, sys
kind = "vllm" if os.path.basename(sys.argv[0]) == "vllm" else "openai"
name = "--served-model-name" if kind == "vllm" else "--alias"
value = dict(zip(sys.argv, sys.argv[1:]))
os.execv(sys.executable, [sys.executable, "{fake}", "--kind=" + kind, "--model=" + value[name],
                          "--host=" + value["--host"], "--port=" + value["--port"]])
"""


def stand_ins(folder: Path) -> str:
    """A PATH that begins with programs called vllm and llama-server."""
    for program in ("vllm", "llama-server"):
        path = folder / program
        path.write_text(STAND_IN.format(python=sys.executable, fake=FAKES / "engine.py"))
        path.chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def test_example_has_no_warnings_and_fits_two_models() -> None:
    settings = load(EXAMPLE)
    assert warnings_of(settings) == []
    ((name, size_bytes),) = settings.devices.items()
    models = [
        Model(m.name, {name: Claim(m.memory.needs or 0, m.memory.min or 0)})
        for m in settings.models
    ]
    admission = Admission({name: Device(size_bytes)}, {})
    for one, two, three in itertools.permutations(models):
        assert admission.obstacle(one, [two]) is None
        assert admission.obstacle(one, [two, three]) is not None


@pytest.mark.slow
def test_requested_model_is_awake_beside_another(tmp_path: Path) -> None:
    config = yaml.safe_load(EXAMPLE.read_text())
    for model in config["models"]:
        model["launch"]["port"] = free_port()
        model["launch"]["log_file"] = str(tmp_path / f"{model['name']}.log")
    config["swap"]["min_awake"] = 0
    config["models"][0]["instance"] += f"-{os.getpid()}"  # of this test only
    environ = {"PATH": stand_ins(tmp_path), "KVELASTIC_LEDGER": f"example-{os.getpid()}"}
    names = [model["name"] for model in config["models"]]
    with Controller(config, environment=environ) as front:
        wait_until(lambda: front.state("chat") == "awake")
        for name in ("coder", "vision", "chat", "coder", "vision"):
            assert front.complete(name).status_code == 200
            awake = [each for each in names if front.state(each) == "awake"]
            assert name in awake
            assert len(awake) == 2
        assert front.state("chat") == "awake"  # it is the most important one
        assert front.post("/api/show", {"model": "vision"}).json()["capabilities"] == [
            "completion",
            "vision",
        ]
        assert front.end() == 0
