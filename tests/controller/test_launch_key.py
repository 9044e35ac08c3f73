"""A launched engine's key and environment: whose they are, and who gets to see them."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml
from called_kvctl import kvctl
from processes import run_python
from running import FAKES, Controller
from test_launch import launched
from waiting import wait_until

from kvelastic.controller.launch.launch_environment import engine_environment, new_engine_key
from kvelastic.controller.settings.named_files import programs_not_found
from kvelastic.controller.settings.settings import Settings
from kvelastic.controller.settings.settings_file import parse
from kvelastic.controller.settings.settings_warnings import warnings_of
from kvelastic.errors import ControllerConfigError

SECRET, ADMIN, OTHERS = "controller-key-1", "admin-key-1", "key-of-a-remote-engine"


def settings_of(*command: str, engine: str = "vllm", **model: Any) -> Settings:
    launch = {"command": command or ["engine"], "port": 9000, **model.pop("launch", {})}
    models: list[Any] = [
        {"name": "m", "engine": engine, "launch": launch, **model},
        {"name": "remote", "url": "https://example.org", "api_key": OTHERS},
    ]
    digest = "sha256:" + hashlib.sha256(ADMIN.encode()).hexdigest()
    auth = {"api_keys": [SECRET], "admin_keys": [digest]}
    return Settings.model_validate({"models": models, "auth": auth})


def warnings_of_the_model(settings: Settings) -> list[str]:
    """What is said of its command, without what is said of the controller's own keys."""
    return [warning for warning in warnings_of(settings) if warning.startswith("model ")]


def environment(environ: dict[str, str], settings: Settings) -> dict[str, str]:
    return engine_environment(environ, settings, settings.models[0], "its-key", "its-mark")


def test_engine_environment_has_no_controller_keys() -> None:
    kept = {"PATH": "/bin", "HF_TOKEN": "hf", "CUDA_VISIBLE_DEVICES": "0", "KVELASTIC_LEDGER": "x"}
    taken = {
        "KVELASTIC_API_KEY": "whatever",
        "ANY_NAME": SECRET,
        "PLAIN_OF_A_DIGEST": ADMIN,
        "OF_ANOTHER_MODEL": OTHERS,
    }
    plus = {"KVELASTIC_ENGINE_KEY": "its-key", "KVELASTIC_LAUNCHED_BY": "its-mark"}
    assert environment(kept | taken, settings_of(engine="sglang")) == kept | plus
    assert environment(kept | taken, settings_of()) == kept | plus | {"VLLM_API_KEY": "its-key"}
    told = settings_of(launch={"env": {"ANY_NAME": "told", "VLLM_API_KEY": "told"}})
    found = environment(kept | taken, told)
    assert (found["ANY_NAME"], found["VLLM_API_KEY"]) == ("told", "told")


def test_engine_key_is_generated_unless_configured() -> None:
    model = settings_of().models[0]
    assert new_engine_key(model) != new_engine_key(model)
    assert len(new_engine_key(model)) >= 32
    assert new_engine_key(settings_of(api_key="given").models[0]) == "given"
    told = settings_of(launch={"env": {"VLLM_API_KEY": "told"}})
    assert new_engine_key(told.models[0]) == "told"


@pytest.mark.parametrize(
    ("command", "warning"),
    [
        (["vllm", "serve", "/m"], "without --host"),
        (["vllm", "serve", "/m", "--host", "0.0.0.0"], "listens on 0.0.0.0"),
        (["vllm", "serve", "/m", "--host=::"], "listens on ::"),
        (["vllm", "serve", "/m", "--host", "127.0.0.1"], None),
        (["vllm", "serve", "/m", "--host=::1"], None),
        (["sh", "-c", "exec vllm serve /m --host $HOST"], None),
        (["vllm", "serve", "--host=localhost", "--api-key", "k"], "--api-key"),
    ],
)
def test_command_listening_on_all_interfaces_warns(command: list[str], warning: str | None) -> None:
    found = warnings_of_the_model(settings_of(*command, api_key="k"))
    assert len(found) == (warning is not None)
    assert warning is None or warning in found[0]


def test_sglang_default_host_gives_no_warning() -> None:
    settings = settings_of("python", "-m", "sglang.launch_server", engine="sglang")
    assert not warnings_of_the_model(settings)


def test_unconfigured_key_in_command_is_refused() -> None:
    with pytest.raises(ControllerConfigError, match="--api-key"):
        parse(
            "models: [{name: m, engine: vllm, launch: {command: [vllm, --api-key=k], port: 9000}}]"
        )


@pytest.mark.parametrize("program", ["no-such-program", "/no/such/program", "./engine"])
def test_check_warns_of_a_missing_launch_program(tmp_path: Path, program: str) -> None:
    settings = settings_of(program, launch={"cwd": str(tmp_path)})
    (warning,) = programs_not_found(settings, {"PATH": str(tmp_path)})
    assert warning.startswith(f"model 'm': launch.command: the program {program!r} is not there")
    for name in ("no-such-program", "engine"):
        (tmp_path / name).touch(0o700)
    if not program.startswith("/"):
        assert programs_not_found(settings, {"PATH": str(tmp_path)}) == []
    (warning,) = programs_not_found(settings_of(program, launch={"cwd": f"{tmp_path}/no"}), {})
    assert warning == f"model 'm': launch.cwd {tmp_path}/no is not a folder"


def test_kvctl_serve_checks_and_starts_nothing(tmp_path: Path) -> None:
    path = tmp_path / "controller.yaml"
    path.write_text(yaml.safe_dump(launched(tmp_path, command=["/no/such/program"])))
    checked = kvctl("serve", "--config", str(path), "--check")
    assert checked.exit_code == 0
    assert checked.stdout == f"{path}: 1 model: configuration valid.\n"
    assert "the program '/no/such/program' is not there" in checked.stderr
    path.write_text("models: 3")
    assert kvctl("serve", "--config", str(path), "--check").exit_code == 2


@pytest.mark.slow
def test_check_prints_warnings(tmp_path: Path) -> None:
    path = tmp_path / "controller.yaml"
    path.write_text(yaml.safe_dump(launched(tmp_path)))
    done = run_python("-m", "kvelastic.controller", "--config", path, "--check")
    assert "without --host vLLM listens on all interfaces" in done.stderr


@pytest.mark.slow
def test_launched_engine_key_is_never_disclosed(tmp_path: Path) -> None:
    seen = tmp_path / "environment"
    engine = (
        "import json, os, sys;"
        f" open({str(seen)!r}, 'a').write(json.dumps(dict(os.environ)) + '\\n');"
        f" fake = {str(FAKES / 'engine.py')!r};"
        " os.execv(sys.executable, [sys.executable, fake, sys.argv[1]])"
    )
    config = launched(tmp_path, command=[sys.executable, "-c", engine, "--port={port}"])
    config["auth"] = {"api_keys": ["${SOME_NAME}"]}
    bearer = {"authorization": f"Bearer {SECRET}"}
    address = f"http://127.0.0.1:{config['models'][0]['launch']['port']}"

    def environments() -> list[dict[str, str]]:
        # The last line may be half written.
        return [json.loads(line) for line in seen.read_text().split("\n")[:-1]]

    with Controller(
        config, environment={"SOME_NAME": SECRET, "KVELASTIC_API_KEY": "other"}
    ) as front:
        front.client.headers.update(bearer)
        assert front.complete().status_code == 200
        [environ] = environments()
        key = environ["VLLM_API_KEY"]
        assert environ["KVELASTIC_ENGINE_KEY"] == key
        assert environ["PATH"] == os.environ["PATH"]
        assert not {"SOME_NAME", "KVELASTIC_API_KEY"} & environ.keys()

        body = {"model": "m"}
        for headers in ({}, bearer, {"x-api-key": key}):
            assert httpx.post(address + "/v1/completions", json=body, headers=headers).is_error
        state = httpx.get(address + "/fake/state").json()
        sent = {name.lower(): value for name, value in state["headers"]}
        assert sent["authorization"] == f"Bearer {key}"
        assert SECRET not in json.dumps(sent)

        front.post("/action/sleep/m")
        assert front.complete().status_code == 200  # woken, with the key
        shown = front.get("/models").text + front.get("/metrics").text + front.get("/memory").text
        assert key not in shown
        assert not [word for pid in psutil.pids() for word in cmdline(pid) if key in word]

        os.kill(psutil.Process(front.process.pid).children()[0].pid, signal.SIGKILL)
        wait_until(lambda: len(environments()) == 2 and front.complete().status_code == 200)
        assert environments()[1]["VLLM_API_KEY"] != key
    assert key not in "\n".join(front.lines)
    assert key not in (tmp_path / "engine.log").read_text()


def cmdline(pid: int) -> list[str]:
    try:
        return psutil.Process(pid).cmdline()
    except psutil.Error:
        return []
