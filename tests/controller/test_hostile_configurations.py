"""A hundred configurations that mean harm, through `--check`: each refused, with the key's name."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import needs
import pytest
from certificates import make_certificate
from click.testing import CliRunner

from kvelastic.controller.__main__ import main
from kvelastic.controller.settings.settings_file import MOST_BYTES

SECRET = "hunter2"
MODEL = "models: [{name: a, url: 'http://h:1', %s}]"
LAUNCH = "models: [{name: a, launch: {port: 9001, command: [x], %s}}]"
URL = "models: [{name: a, url: %s}]"
BOMB = "a: &a [x, x]\n" + "".join(
    f"{c}: &{c} [{', '.join([f'*{b}'] * 10)}]\n"
    for b, c in zip("abcdefghijklmnop", "bcdefghijklmnopq", strict=True)
)
"""10^16 values in a kilobyte."""
MERGES = "a: &a {x: 1, y: 2}\n" + "".join(
    f"{c}: &{c} {{<<: [{', '.join([f'*{b}'] * 10)}], {c}: 1}}\n"
    for b, c in zip("abcdefghijklmnop", "bcdefghijklmnopq", strict=True)
)
LONG = "9" * 20_000

BOMBS = [
    (BOMB, "aliases"),
    (MERGES, "aliases"),
    (BOMB + "models: *q", "aliases"),
    ("models: &a [*a]", "alias"),
    ("models: &a {b: *a}", "alias"),
    ("models: &a\n  - {name: x, aliases: *a}", "alias"),
    ("[" * 5_000, "nested too deep"),
    ("{a: " * 5_000, "nested too deep"),
    ("- " * 5_000, "nested too deep"),
    (f"server: {{port: {LONG}}}", "line 1, column 16: a number"),
    (f"server: {{port: 0x{LONG}}}", "line 1, column 16: a number"),
    (f"server: {{port: 1{':1' * 50_000}}}", "line 1, column 16: a number"),
    (f"server: {{port: 1{':1' * 50_000}.5}}", "line 1, column 16: a number"),
    (f"server: {{port: 1e{LONG}}}", "server.port"),
    (f"sleep: {{idle_after: {LONG}}}", "line 1, column 21: a number"),
    (f"sleep: {{idle_after: '{LONG}'}}", "sleep.idle_after"),
    (f"sleep: {{idle_after: '{'1d' * 30_000}'}}", "sleep.idle_after"),
    (f"sleep: {{idle_after: '{'1' * 60_000}h'}}", "sleep.idle_after"),
    (f"server: {{max_body: '{'1' * 60_000}G'}}", "server.max_body"),
    (f"server: {{host: '{'a' * 60_000}'}}", "server.host"),
    (MODEL % f"api_key: '{'${a:-' * 13_000} '", "models.0.api_key"),
    (MODEL % f"api_key: '{'${a:-' * 20_000}'", "models.0.api_key"),
    (MODEL % f"api_key: '{'$' * 70_000}'", "models.0.api_key"),
    (f"server: {{allowed_origins: ['{'a' * 60_000}']}}", "server.allowed_origins"),
    (f"auth: {{model_paths: ['/v1/{'/' * 60_000}']}}", "auth.model_paths"),
    (f"models: [{', '.join(['3'] * 500)}]", "more faults"),
    (
        "models: [" + ", ".join(f"{{name: m{n}, url: 'ftp://h'}}" for n in range(1500)) + "]",
        "models.99",
    ),
    (
        "groups: [" + ", ".join(f"{{name: g, models: [m{n}]}}" for n in range(1500)) + "]",
        "group 'g'",
    ),
    ("x" * (MOST_BYTES + 1), "bytes"),
    (f"models: [{', '.join(['3'] * 10_001)}]", "more than 10,000 values"),
    ("#" * (MOST_BYTES * 4), "bytes"),
]
"""Each is small, and without a bound hours of work or all memory."""
CHARACTERS = [
    (MODEL % r'api_key: "hunter2\r\nX-Other: y"', "models.0.api_key"),
    (MODEL % r'api_key: "hunter2\n"', "models.0.api_key"),
    (MODEL % r'api_key: "hunter2 "', "models.0.api_key"),
    (MODEL % r'api_key: "hunter2\xe9"', "models.0.api_key"),
    (r'auth: {api_keys: ["hunter2\r\n"]}', "auth.api_keys.0.key"),
    (r'auth: {admin_keys: ["hunter2\0"]}', "auth.admin_keys.0.key"),
    (r'auth: {admin_keys: ["hunter2\ud800"]}', "auth.admin_keys.0.key"),
    ("auth: {api_keys: ['sha256:hunter2']}", "auth.api_keys.0.key"),
    ("auth: {api_keys: ['']}", "auth.api_keys.0.key"),
    ("auth: {api_keys: [hunter2, hunter2]}", "api_keys"),
    ("auth: {api_keys: !!set {hunter2, 7}}", "auth.api_keys"),
    ("auth: {api_keys: !!binary aHVudGVyMg==}", "auth.api_keys"),
    ("auth: {api_keys: {hunter2: x}}", "auth.api_keys"),
    ("auth: {max_priority: 1e9}", "auth.max_priority"),
    ("auth: {model_paths: [/v1/../admin]}", "auth.model_paths"),
    ("auth: {model_paths: ['/v1/x y']}", "auth.model_paths"),
    ("auth: {model_paths: [/admin]}", "auth.model_paths"),
    (URL % r'"http://h:1\r\nX: y"', "models.0.url"),
    (URL % r'"http://h:1/\n"', "models.0.url"),
    (URL % r'"http://h\0:1"', "models.0.url"),
    (URL % r'"\thttp://h:1"', "models.0.url"),
    (URL % "'http://h :1'", "models.0.url"),
    (URL % "'http://h:0'", "models.0.url"),
    (URL % "'http://h:65536'", "models.0.url"),
    (URL % "'http://h:-1'", "models.0.url"),
    (URL % "'http://h:port'", "models.0.url"),
    (URL % "'http://[::1'", "models.0.url"),
    (URL % "'http://[h]:1'", "models.0.url"),
    (URL % "'http://:1'", "models.0.url"),
    (URL % "'http://user:hunter2@h:1'", "models.0.url"),
    (URL % "'http://h:1/?a=b'", "models.0.url"),
    (URL % "'http://h;rm:1'", "models.0.url"),
    (URL % "'file:///etc/passwd'", "models.0.url"),
    (URL % "'http://h\\:1'", "models.0.url"),
    ("models: [{name: a, urls: ['http://h:1', 'http://h:0']}]", "models.0.urls"),
    (MODEL % r'health: "/x\r\nX: y"', "models.0.health"),
    (MODEL % "health: x", "models.0.health"),
    (MODEL % "health: '/a b'", "models.0.health"),
    (MODEL % "instance: ../../etc/passwd", "models.0.instance"),
    (MODEL % r'instance: "a\0"', "models.0.instance"),
    (MODEL % f"instance: {'a' * 65}", "models.0.instance"),
    (MODEL % r'served_name: "a\r\nb"', "models.0.served_name"),
    (MODEL % r'aliases: ["a\n"]', "models.0.aliases"),
    (MODEL % "aliases: [a]", "twice"),
    (r'models: [{name: "a\e[31m", url: "http://h"}]', "models.0.name"),
    (f"models: [{{name: {'a' * 257}, url: 'http://h'}}]", "models.0.name"),
]
"""They end a header, a line, a path or a string of C."""
NUMBERS = [
    ("server: {port: 65536}", "server.port"),
    ("server: {port: -1}", "server.port"),
    ("server: {port: true}", "server.port"),
    ("server: {port: .nan}", "server.port"),
    ("server: {port: .inf}", "server.port"),
    ("server: {port: 2020-01-01}", "server.port"),
    ("server: {port: 9001}\n" + LAUNCH % "cwd: /", "server.port"),
    ("models: [{name: a, launch: {port: 0, command: [x]}}]", "models.0.launch.port"),
    ("models: [{name: a, launch: {port: true, command: [x]}}]", "models.0.launch.port"),
    (
        "models: [{name: a, launch: {port: 2, command: [x]}}, {name: b, launch: {port: 2,"
        " command: [x]}}]",
        "launch.port 2",
    ),
    ("server: {max_body: -1}", "server.max_body"),
    ("server: {max_body: true}", "server.max_body"),
    (f"server: {{max_body: {'9' * 60}}}", "server.max_body"),
    (MODEL % f"memory: {{limit: {'9' * 60}}}", "models.0.memory.limit"),
    (MODEL % "memory: {limit: 1G, min: 2G}", "min is above limit"),
    (MODEL % "memory: {priority: 1000000}", "models.0.memory.priority"),
    (MODEL % "ttl: -5", "models.0.ttl"),
    (MODEL % "ttl: .nan", "models.0.ttl"),
    ("sleep: {check_every: 0}", "sleep.check_every"),
    ("sleep: {queue_limit: -1}", "sleep.queue_limit"),
]
PROGRAMS = [
    (LAUNCH % "env: {'A=B': x}", "models.0.launch.env"),
    (LAUNCH % r'env: {"A\0": x}', "models.0.launch.env"),
    (LAUNCH % r'env: {VLLM_API_KEY: "hunter2\r\nX: y"}', "models.0.launch.env"),
    (LAUNCH % "env: [x]", "models.0.launch.env"),
    (LAUNCH % r'cwd: "/\0"', "models.0.launch.cwd"),
    (LAUNCH % "log_file: /dev/zero", "models.0.launch.log_file"),
    (LAUNCH % "log_file: /dev/tty", "models.0.launch.log_file"),
    (LAUNCH % "log_file: /", "models.0.launch.log_file"),
    (LAUNCH % r'log_file: "/tmp/\0"', "models.0.launch.log_file"),
    (LAUNCH % "log_file: ''", "models.0.launch.log_file"),
    ("models: [{name: a, launch: {port: 1, command: []}}]", "models.0.launch.command"),
    (r'models: [{name: a, launch: {port: 1, command: ["x\0"]}}]', "models.0.launch.command"),
    ("server: {host: 0.0.0.0}", "server.host"),
    ("auth: {api_keys: [hunter2]}\n" + r'server: {host: "0.0.0.0\n"}', "server.host"),
    ("auth: {api_keys: [hunter2]}\nserver: {host: ''}", "server.host"),
    ("server: {allowed_hosts: [a/b]}", "server.allowed_hosts"),
    ("server: {allowed_origins: ['*']}", "server.allowed_origins"),
    ("server: {tls_cert: /no/cert, tls_key: /no/key}", "server.tls_cert"),
    ("server: {tls_cert: /dev/zero, tls_key: /dev/zero}", "server.tls_key"),
    ("server: {tls_cert: /etc/passwd, tls_key: /etc/passwd}", "server.tls_cert"),
    ("devices: {gpu0: -1}", "devices.gpu0"),
    ("groups: [{name: g, models: [nothing]}]", "group 'g'"),
    ("? [a]\n: b", "a key has to be a word"),
    ("server: !!python/object/apply:os.system [true]", "line 1, column 9"),
    ("server: {1: 2}", "server"),
    ("1: 2", "1"),
    ("? 2020-01-01\n: 2", "Keys should be strings"),
    ("[]", "top level"),
    ("\x00", "character"),
    ("%YAML 9.9\n---\na: b", "cannot be read"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """The working folder of `--check`, which paths in a configuration begin in."""
    before = Path.cwd()
    os.chdir(tmp_path)
    yield tmp_path
    os.chdir(before)


def refused(path: Path) -> str:
    """What `--check` says of a file that it refuses."""
    result = CliRunner().invoke(main, ["--config", str(path), "--check"])
    assert result.exit_code == 2, (result.output, result.exception)
    assert result.output.count("\n") == 1, result.output
    assert SECRET not in result.output
    return result.output


def test_at_least_a_hundred_cases_exist() -> None:
    assert sum(map(len, (BOMBS, CHARACTERS, NUMBERS, PROGRAMS))) >= 100


@pytest.mark.slow
@pytest.mark.parametrize("configurations", [BOMBS, CHARACTERS, NUMBERS, PROGRAMS])
def test_hostile_configuration_error_names_the_key(
    folder: Path, configurations: list[tuple[str, str]]
) -> None:
    path = folder / "controller.yaml"
    for text, said in configurations:
        path.write_bytes(text.encode("utf-8"))
        output = refused(path)
        assert said in output, (text[:200], output[:500])
        assert len(output) < 20_000, text[:200]


def test_special_files_are_refused_without_blocking(folder: Path) -> None:
    """FIFOs without another end, sockets, links and devices, wherever a file is named."""
    path = folder / "controller.yaml"
    os.mkfifo(folder / "fifo")
    (folder / "link").symlink_to("fifo")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind("socket")
        for name, kind in (
            ("fifo", "a FIFO"), ("link", "a symbolic link"), ("socket", "a socket"),
        ):  # fmt: skip
            path.write_text(LAUNCH % f"log_file: {name}")
            output = refused(path)
            assert "models.0.launch.log_file" in output
            assert kind in output
            path.write_text(f"server: {{tls_cert: {name}, tls_key: {name}}}")
            assert "server.tls_cert" in refused(path)
    assert "pipe" in refused(folder / "fifo")
    assert "neither a regular file" in refused(Path("/dev/zero"))


def test_configuration_is_read_from_a_pipe() -> None:
    reader, writer = os.pipe()
    os.write(writer, b"models: []\n")
    os.close(writer)
    result = CliRunner().invoke(main, ["--config", f"/dev/fd/{reader}", "--check"])
    os.close(reader)
    assert "0 models: configuration valid" in result.output


@needs.openssl
def test_swapped_certificate_and_key_are_refused(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    path = tmp_path / "controller.yaml"
    path.write_text(f"server: {{tls_cert: {certificate}, tls_key: {key}}}")
    result = CliRunner().invoke(main, ["--config", str(path), "--check"])
    assert result.exit_code == 0, result.output
    path.write_text(f"server: {{tls_cert: {key}, tls_key: {certificate}}}")
    assert "server.tls_cert" in refused(path)
