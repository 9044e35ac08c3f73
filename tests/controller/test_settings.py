"""The configuration: what is read, what is refused and how it is said."""

from __future__ import annotations

import hashlib
from pathlib import Path

import jsonschema_rs
import pytest
import yaml

from kvelastic.controller.models.engine_calls import KINDS
from kvelastic.controller.settings.settings_file import json_schema, load, parse
from kvelastic.controller.settings.settings_warnings import warnings_of
from kvelastic.errors import ControllerConfigError, InvalidArgumentError
from kvelastic.units import parse_duration_s

EXAMPLE = Path(__file__).parents[2] / "docs" / "controller.example.yaml"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("5m", 300), ("1h30m", 5400), ("250ms", 0.25), (7, 7), ("7", 7), ("1d", 86400)],
)
def test_durations(text: object, seconds: float) -> None:
    assert parse_duration_s(text) == seconds


@pytest.mark.parametrize("text", ["", "5 m", "-1", -1, "1x", "m", True, None, float("nan"), "1e9"])
def test_invalid_durations_are_refused(text: object) -> None:
    with pytest.raises(InvalidArgumentError):
        parse_duration_s(text)


def test_all_configuration_keys_are_read() -> None:
    settings = parse(
        """
        server: {host: 127.0.0.1, port: 8080}
        sleep: {auto: false, wake_on_request: true, idle_after: 5m, min_sleep: 60s,
                queue_limit: 1024, queue_timeout: 120s}
        auth: {api_keys: ["${KEY}"], admin_keys: ["${OTHER:-x}", "cost$$"]}
        models:
          - name: org/model-a
            engine: vllm
            url: http://127.0.0.1:9001/
            aliases: [model-a]
            instance: kvelastic_vllm_1
            memory: {min: 1G, limit: 8G, priority: 10}
          - name: model-b
            engine: vllm
            launch: {command: [vllm, serve, DIR, --port, "{port}"],
                     env: {ENABLE_KVELASTIC: "true"}, port: 9002, ready_timeout: 120s}
        """,
        {"KEY": "secret"},
    )
    assert settings.sleep.idle_after == 300
    assert [key.key for key in settings.auth.api_keys] == ["secret"]
    assert [key.key for key in settings.auth.admin_keys] == ["x", "cost$"]
    first, second = settings.models
    assert first.memory.limit == 8 << 30
    assert first.addresses == ("http://127.0.0.1:9001",)
    assert second.addresses == ("http://127.0.0.1:9002",)


LAUNCH = "models: [{name: a, launch: {port: 1, command: [x], %s}}]"
MODEL = "models: [{name: a, url: 'http://h:1'%s}]"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("server: {hots: x}", "server.hots"),
        ("server: {port: 70000}", "server.port"),
        ("server: {host: 0.0.0.0}", "auth.api_keys"),
        ("server: {host: example.org}", "auth.api_keys"),
        ("server: {tls_cert: x}", "tls_key"),
        ("sleep: {idle_after: soon}", "sleep.idle_after"),
        ("auth: {api_keys: ['${NOT_THERE}']}", "NOT_THERE"),
        ("auth: {api_keys: ['sha256:12']}", "auth.api_keys"),
        ("auth: {api_keys: ['']}", "auth.api_keys"),
        ("models: [{name: a}]", "one of url, urls and launch"),
        (MODEL % ", urls: ['http://h:2']", "one of url, urls and launch"),
        (MODEL % ", memory: {min: 2G, limit: 1G}", "min is above limit"),
        (MODEL % ", memory: {limit: 1G}", "memory.limit needs `instance`"),
        (MODEL % ", engine: ollama", "models.0.engine: must be 'vllm'"),
        (MODEL % ", memory: {device: gpu9}", "memory.device 'gpu9' is not `host`"),
        (MODEL % ", memory: {limt: 1G}", "memory.limt: there is no such key here; is limit meant?"),
        ("model: []", "x.yaml: model: there is no such key here; is models meant?"),
        ("models: [{name: a, launch: {port: 1, command: vllm serve}}]", "command: must be a list"),
        ("sleep: {auto: yess}", "sleep.auto: must be true or false"),
        ("server: {port: x}", "server.port: must be a valid integer"),
        (MODEL % ", max_in_flight: true", "models.0.max_in_flight"),
        (MODEL % ", served_name: ''", "models.0.served_name"),
        ("models: [{name: a, url: 'http://127.0.0.1:8080'}]", "the controller itself listens"),
        ("models: [{name: a, urls: ['http://h:1', 'http://localhost:8080/x']}]", "itself listens"),
        (LAUNCH % "ready_timeout: 0", "models.0.launch.ready_timeout"),
        ("server: {max_body: 0}", "server.max_body"),
        ("server: {max_buffered: 0}", "server.max_buffered"),
        ("server: {max_headers: 0}", "server.max_headers"),
        ("server: {header_timeout: 0}", "server.header_timeout"),
        ("server: {body_timeout: 0}", "server.body_timeout"),
        ("models: [{name: a, url: 'ftp://h'}]", "no address"),
        ("models: [{name: a, url: 'http://h', aliases: [b]}, {name: b, url: 'http://h'}]", "twice"),
        ("models: [{name: '/a', url: 'http://h'}]", "cannot be a model's name"),
        (LAUNCH % "env: {'A=B': x}", "models.0.launch.env"),
        (LAUNCH % "env: {'': x}", "models.0.launch.env"),
        (LAUNCH % 'env: {A: "x\\0y"}', "models.0.launch.env"),
        (LAUNCH % 'cwd: "/tmp\\0"', "models.0.launch.cwd"),
        ('models: [{name: a, launch: {port: 1, command: ["x\\0"]}}]', "models.0.launch.command"),
        ("models: [{name: a, launch: {port: 1, command: ['']}}]", "models.0.launch.command"),
        ("models: 3", "models"),
        ("[]", "top level"),
        ("a: [", "not YAML"),
        ("sleep: {auto: true, auto: false}", "twice"),
    ],
)
def test_configuration_errors_name_the_fault(text: str, said: str) -> None:
    with pytest.raises(ControllerConfigError) as caught:
        parse(text, {}, source="x.yaml")
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("of_model", "of_pool", "group", "said"),
    [
        ({"prefill": "q"}, {}, {}, "model 'm': prefill names 'q', and no model has this name"),
        ({"prefill": "m"}, {}, {}, "prefill names this model"),
        ({}, {"prefill": "m"}, {}, "names 'p', which has a prefill pool itself"),
        ({}, {"engine": "sglang"}, {}, "engine: vllm in both models; 'p' has sglang"),
        ({"engine": "openai"}, {}, {}, "engine: vllm in both models; 'm' has openai"),
        ({}, {"url": "http://h:1/"}, {}, "has the same engine, http://h:1"),
        ({}, {}, {"models": ["m", "p"], "at_once": 1}, "their groups forbid that both are awake"),
        ({}, {}, {"models": ["p"], "exclusive": True}, "their groups forbid that both are awake"),
        ({}, {}, {"models": ["m"], "exclusive": True}, "their groups forbid that both are awake"),
    ],
)
def test_impossible_prefill_pools_are_refused(
    of_model: dict[str, str], of_pool: dict[str, str], group: dict[str, object], said: str
) -> None:
    model = {"name": "m", "engine": "vllm", "url": "http://h:1", "prefill": "p", **of_model}
    pool = {"name": "p", "engine": "vllm", "url": "http://h:2", **of_pool}
    groups = [{"name": "g", **group}] if group else []
    with pytest.raises(ControllerConfigError) as caught:
        parse(yaml.safe_dump({"models": [model, pool], "groups": groups}), {})
    assert said in str(caught.value)


def test_prefill_pools_that_fit_are_accepted() -> None:
    text = """
models:
  - {name: m, engine: vllm, url: 'http://h:1', prefill: p}
  - {name: p, engine: vllm, urls: ['http://h:2', 'http://h:3'], pin: true}
groups:
  - {name: g, models: [m], exclusive: true}
"""
    settings = parse(text, {})
    assert settings.models[0].prefill == "p"
    (warning,) = warnings_of(settings)
    assert "waits up to 600 s for a prefill engine that hangs" in warning
    assert warnings_of(parse(text.replace("pin:", "timeouts: {idle: 60s}, pin:"), {})) == []


SHARED = "sleep: {auto: true}\nmodels: [{name: a, %s}, {name: b, served_name: adapter, %s}]"
VLLM = "engine: vllm, url: 'http://h:1'"
ON_DEMAND = "launch: {on_demand: true, port: 1, command: [x]}"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (VLLM, VLLM),
        (VLLM, f"{VLLM}, pin: true"),
        ("engine: openai, url: 'http://h:1'", VLLM),
        ("engine: sglang, urls: ['http://h:1/', 'http://h:2']", f"{VLLM}, pin: true"),
        (VLLM + ", instance: i", "url: 'http://h:2', instance: i"),
        (ON_DEMAND, "url: 'http://127.0.0.1:1'"),
    ],
)
def test_models_share_no_engine_that_sleeps(one: str, other: str) -> None:
    with pytest.raises(ControllerConfigError, match="models 'a' and 'b' have the same engine, "):
        parse(SHARED % (one, other), {})


@pytest.mark.parametrize("one", [f"{VLLM}, pin: true", "engine: openai, url: 'http://h:1'"])
def test_models_may_share_an_engine_without_sleep(one: str) -> None:
    assert len(parse(SHARED % (one, f"{VLLM}, pin: true"), {}).models) == 2


def test_models_that_never_sleep_may_share_an_engine() -> None:
    text = SHARED.partition("\n")[2]
    assert len(parse(text % (VLLM, VLLM), {}).models) == 2
    with pytest.raises(ControllerConfigError, match="have the same engine"):
        parse(text % (VLLM, VLLM + ", ttl: 10m"), {})


def test_may_sleep_knows_all_kinds() -> None:
    for engine, kind in KINDS.items():
        (model,) = parse(MODEL % f", engine: {engine}", {}).models
        assert model.may_sleep == kind.can_sleep


def test_accepted_device_names() -> None:
    for device in ("host", "gpu0", "GPU-5bf5a4ac-0d34-4f0e-8a0e-0123456789ab", "MIG-" + "0a" * 16):
        text = f"devices: {{gpu0: 1G}}\n{MODEL % f', memory: {{device: {device}}}'}"
        assert parse(text, {}).models[0].memory.device == device


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("auth: {api_keys: {a: hunter2}}", "auth.api_keys"),
        ("auth:\n  api_keys: hunter2: x", "line 2, column 20: a value with `: `"),
        ("auth:\n  api_keys:\n    - hunter2\n    admin_keys: [x]", "line 4, column 5: this line"),
        ("auth: {api_keys: ['hunter2}", "line 1, column 28: a quote that is not closed"),
        ('auth: {api_keys: ["hun\\ter2"]}\n"\\qhunter2"', "line 2"),
        ("auth: {api_keys: [*hunter2]}", "line 1, column 19: a value that begins with *"),
        ("auth: {api_keys: [!hunter2 x]}", "line 1, column 19: a value that begins with !"),
        ("auth: {api_keys: [!hunter2!a x]}", "line 1, column 19: a value that begins with !"),
        ("auth: {api_keys: [&hunter2 x, &hunter2 y]}", "line 1, column 31: a value that"),
        ("auth: {api_keys: [@hunter2]}", "line 1, column 19: a value that begins with this"),
        ("auth: {api_keys: [a, hunter2}", "line 1, column 29: a list needs"),
        ("auth: {api_keys: a, hunter2", "line 1, column 28: a mapping needs"),
        ("auth: {hunter2: a, hunter2: b}", "line 1, column 20: a key that is there twice"),
        ("auth: {? [hunter2] : a}", "line 1, column 10: a key has to be a word"),
        ("auth: {api_keys: [!!int hunter2]}", "line 1, column 19: a number"),
        ("auth: {api_keys: [!!bool hunter2]}", "line 1, column 19: a number"),
        ("auth: {api_keys: [!!timestamp hunter2]}", "line 1, column 19: a number"),
        ("auth:\n  api_keys: [hunter2\x01]", "line 2: a character that YAML does not allow"),
        ("[" * 5000, "nested too deep"),
        ("auth: {sk-hunter2: x}", "auth.(no name)"),
        ("models: [{name: a, url: 'http://u:hunter2@h:1'}]", "models.0.url"),
        ("models: [{name: a, url: hunter2}]", "models.0.url"),
        ("server: {keep_alive: hunter2}", "server.keep_alive: this is no duration"),
        ("server: {max_body: hunter2}", "server.max_body: this is no size"),
    ],
)
def test_errors_name_the_position_but_no_values(text: str, said: str) -> None:
    with pytest.raises(ControllerConfigError) as caught:
        parse(text, {})
    assert said in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_all_errors_are_reported_together() -> None:
    with pytest.raises(ControllerConfigError) as caught:
        parse("server: {port: x}\nsleep: {auto: perhaps}", {})
    assert "server.port" in str(caught.value)
    assert "sleep.auto" in str(caught.value)


def test_the_example_loads_and_names_every_key() -> None:
    environ = {"KVELASTIC_API_KEY": "k", "KVELASTIC_ADMIN_KEY": "a"}
    settings = load(EXAMPLE, environ)
    assert settings.models
    text = EXAMPLE.read_text()
    definitions = json_schema()["$defs"]
    for section in definitions.values():
        for key in section["properties"]:
            assert f"{key}:" in text, f"{key} is not in {EXAMPLE.name}"


def test_json_schema_accepts_the_same_as_the_parser() -> None:
    check = jsonschema_rs.validator_for(json_schema())
    example = yaml.safe_load(EXAMPLE.read_text())
    check.validate(example)
    bounded = {"key": "k", "max_priority": 5}
    for key, good in [
        ("k", True), (bounded, True), (5, False), ({"name": "no key"}, False),
        ({**bounded, "max_priority": 5000}, False), ({**bounded, "other": 1}, False),
    ]:  # fmt: skip
        text = {"auth": {"api_keys": [key]}}
        assert check.is_valid(text) is good, key
        if good:
            parse(yaml.safe_dump(text), {})
        else:
            with pytest.raises(ControllerConfigError):
                parse(yaml.safe_dump(text), {})


def test_only_keys_written_in_the_file_warn() -> None:
    text = """
auth:
  api_keys: ["${HERE}", "plain", "${GONE:-default}", {key: "x${HERE}"}]
  admin_keys: ["sha256:%s", {key: "${HERE}"}]
""" % ("ab" * 32)
    (warning,) = warnings_of(parse(text, {"HERE": "secret"}))
    assert warning.startswith("auth.api_keys: every reader of the configuration file has 3 of the")
    assert "4 keys" in warning
    assert "secret" not in warning
    assert warnings_of(parse("auth: {api_keys: ['${HERE}']}", {"HERE": "secret"})) == []


def test_duplicate_key_is_refused() -> None:
    digest = "sha256:" + hashlib.sha256(b"k").hexdigest()
    with pytest.raises(ControllerConfigError, match="twice in api_keys"):
        parse(f"auth: {{api_keys: [k, '{digest}']}}", {})


@pytest.mark.parametrize("path", ["/v2/x", "v1/x", "/v1/a/../b", "/v1//a", "/v1/", "/v1/a%20b"])
def test_invalid_model_paths_are_refused(path: str) -> None:
    with pytest.raises(ControllerConfigError, match=r"auth\.model_paths"):
        parse(f"auth: {{model_paths: ['{path}']}}", {})


def test_missing_file_is_refused() -> None:
    with pytest.raises(ControllerConfigError, match=r"cannot read \S+: No such file or directory$"):
        load(Path("/nowhere/at/all.yaml"))
