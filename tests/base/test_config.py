"""The table of environment variables: defaults, legacy names, refusals, warnings, logging."""

from __future__ import annotations

import dataclasses
import io
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import UNMEASURED, run_python

from kvelastic import config as config_module
from kvelastic import logs
from kvelastic.config import (
    VARIABLES,
    Config,
    Percent,
    configure_logging,
    load,
    markdown_table,
)
from kvelastic.device.host_memory import machine_memory_bytes
from kvelastic.errors import ConfigError
from kvelastic.units import SIZE_FORMS

LEGACY = {v.legacy: v for v in VARIABLES if v.legacy}


@pytest.fixture(autouse=True)
def fresh_process_state(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test sees the logger and the once-a-process memory as a new process does."""
    log = logging.getLogger("kvelastic")
    before = (list(log.handlers), log.level, log.propagate)
    monkeypatch.setattr(logs, "_logged", set())
    monkeypatch.setattr(logs, "_held", [])
    monkeypatch.setenv(logs._SAID, "")
    log.handlers[:], log.propagate = [], True
    log.setLevel(logging.NOTSET)
    yield
    log.handlers[:], log.propagate = before[0], before[2]
    log.setLevel(before[1])


def test_empty_environment_gives_the_defaults() -> None:
    assert load({}) == Config()


@pytest.mark.parametrize("variable", VARIABLES, ids=lambda v: v.name)
def test_documented_default_equals_the_default_in_use(variable: Any) -> None:
    default = getattr(Config(), variable.field)
    if variable.default.startswith("("):
        assert default is None
    else:
        assert variable.parse(variable.default) == default


def test_variable_table_and_config_class_have_same_fields() -> None:
    assert [v.field for v in VARIABLES] == [field.name for field in dataclasses.fields(Config)]
    assert len({v.name for v in VARIABLES}) == len(VARIABLES)


def test_all_kvcached_variables_exist_under_both_names() -> None:
    seed = ["AUTOPATCH", "IPC_NAME", "GPU_UTILIZATION", "PAGE_SIZE_MB", "LOG_LEVEL"]
    seed += ["PAGE_PREALLOC_ENABLED", "MIN_RESERVED_PAGES", "MAX_RESERVED_PAGES"]
    seed += ["CONTIGUOUS_LAYOUT", "SANITY_CHECK", "LOG_COLOR"]
    expected = {("ENABLE_KVELASTIC", "ENABLE_KVCACHED")}
    expected |= {(f"KVELASTIC_{name}", f"KVCACHED_{name}") for name in seed}
    assert expected <= {(v.name, v.legacy) for v in VARIABLES}


GOOD: list[tuple[str, str, Any]] = [
    *[("ENABLE_KVELASTIC", text, True) for text in ("true", "1", "YES", "On", " true ")],
    *[("KVELASTIC_STRICT", text, False) for text in ("false", "0", "No", "OFF")],
    ("KVELASTIC_IPC_NAME", "llama-3.1_8B", "llama-3.1_8B"),
    ("KVELASTIC_IPC_NAME", "x" * 64, "x" * 64),
    ("KVELASTIC_GPU_UTILIZATION", "1", 1.0),
    ("KVELASTIC_GPU_UTILIZATION", ".5", 0.5),
    ("KVELASTIC_PAGE_SIZE_MB", "64", 64),
    ("KVELASTIC_LOG_LEVEL", "debug", "DEBUG"),
    ("KVELASTIC_MAX_CACHED_TOKENS", "-1", -1),
    ("KVELASTIC_MAX_CACHED_TOKENS", "0", 0),
    ("KVELASTIC_IPC_TIMEOUT", "0.5", 0.5),
    ("KVELASTIC_IPC_TIMEOUT", "0", None),
    ("KVELASTIC_IPC_TIMEOUT", "-1", None),
    ("KVELASTIC_HOST_MEMORY", "4G", 4 << 30),
    ("KVELASTIC_LIMIT", "none", None),
    ("KVELASTIC_LIMIT", "80%", Percent(80.0)),
    ("KVELASTIC_LIMIT", "512MiB", 512 << 20),
    ("KVELASTIC_LIMIT", "0", 0),
    ("KVELASTIC_DEVICE", "cpu", "host"),
    ("KVELASTIC_DEVICE", "host", "host"),
    ("KVELASTIC_DEVICE", "AUTO", "auto"),
    ("KVELASTIC_DEVICE", "cuda", "cuda"),
    ("KVELASTIC_DEVICE", "cuda:3", "cuda:3"),
    ("KVELASTIC_CACHE_IDLE_SECONDS", "-1", None),
    ("KVELASTIC_IDLE_TRIM_SECONDS", "0", 0.0),
    ("KVELASTIC_IDLE_TRIM_SECONDS", "-1", None),
    ("KVELASTIC_LIMIT_WAIT", "0.1", 0.1),
    ("KVELASTIC_LIMIT_WAIT", "-1", None),
    ("KVELASTIC_MIN", "0", 0),
    ("KVELASTIC_MIN", "1.5G", 3 << 29),
    ("KVELASTIC_RESERVE", "1.5G", 3 << 29),
    ("KVELASTIC_PRIORITY", "-5", -5),
    ("KVELASTIC_LEDGER", "team_a-1", "team_a-1"),
    ("KVELASTIC_RECLAIM_WAIT", "0", 0.0),
    ("KVELASTIC_LINK_SECRET", "/etc/secret", "/etc/secret"),
    ("KVELASTIC_LINK_ALLOW", "10.0.0.0/24, fd00::/8", ("10.0.0.0/24", "fd00::/8")),
    ("KVELASTIC_LINK_DATA_PORTS", "26100-26131", (26100, 26131)),
    ("KVELASTIC_LINK_DATA_PORTS", "26100", (26100, 26100)),
    ("KVELASTIC_ROLE", "none", None),
    ("KVELASTIC_ROLE", "Prefill", "prefill"),
    ("KVELASTIC_PREFILL_ADDRESS", "unix:///run/kv", "unix:///run/kv"),
    ("KVELASTIC_PREFILL_ADDRESS", "tcp://[::1]:26000", "tcp://[::1]:26000"),
    ("KVELASTIC_PREFILL_HOLD_SECONDS", "0.5", 0.5),
]


@pytest.mark.parametrize(("name", "text", "value"), GOOD)
def test_valid_values_are_parsed(name: str, text: str, value: Any) -> None:
    field = next(v.field for v in VARIABLES if v.name == name)
    assert getattr(load({name: text}), field) == value


BAD: list[tuple[str, list[str]]] = [
    *[(v.name, ["maybe", "2", "tru"]) for v in VARIABLES if v.accepts == config_module.BOOLEAN],
    ("KVELASTIC_IPC_NAME", ["a/b", "a b", "x" * 65, ".", "..", "é", "a\nb"]),
    ("KVELASTIC_GPU_UTILIZATION", ["0", "1.01", "-0.5", "nan", "inf", "95%"]),
    ("KVELASTIC_PAGE_SIZE_MB", ["0", "1", "3", "-2", "2.0", "1026", "2M", "9" * 5000]),
    ("KVELASTIC_LOG_LEVEL", ["LOUD", "10"]),
    ("KVELASTIC_MIN_RESERVED_PAGES", ["-1", "x", "1.5"]),
    ("KVELASTIC_MAX_RESERVED_PAGES", ["-1", "x"]),
    ("KVELASTIC_MAX_CACHED_TOKENS", ["-2", "many", "1e3"]),
    ("KVELASTIC_IPC_TIMEOUT", ["soon", "nan", "inf", "60s"]),
    ("KVELASTIC_HOST_MEMORY", ["0", "-1G", "lots", "80%"]),
    ("KVELASTIC_LIMIT", ["-1", "101%", "%", "half", "nan"]),
    ("KVELASTIC_DEVICE", ["gpu", "cuda:", "cuda:-1", "cuda:x", "cpu:0", "rocm"]),
    ("KVELASTIC_CACHE_IDLE_SECONDS", ["never", "nan", "inf"]),
    ("KVELASTIC_IDLE_TRIM_SECONDS", ["never", "nan", "inf"]),
    ("KVELASTIC_LIMIT_WAIT", ["never", "nan", "inf"]),
    ("KVELASTIC_MIN", ["-1", "half", "10%"]),
    ("KVELASTIC_RESERVE", ["-1", "half", "10%"]),
    ("KVELASTIC_PRIORITY", ["high", "1.5", "1001", "-1001"]),
    ("KVELASTIC_LEDGER", ["a/b", "a b", "..", "x" * 33]),
    ("KVELASTIC_RECLAIM_WAIT", ["-1", "nan", "soon", "3601"]),
    ("KVELASTIC_LINK_SECRET", ["secret", "./secret", "-"]),
    ("KVELASTIC_LINK_DATA_PORTS", ["0", "2-1", "65536", "-5", "1-", "x"]),
    ("KVELASTIC_LINK_ALLOW", ["10.0.0.1/8", "host", "10.0.0.0/33", ","]),
    ("KVELASTIC_TIERS", ["host", "disk:/a", "tape:1G"]),
    ("KVELASTIC_TIER_POLICY", ["write_never"]),
    ("KVELASTIC_TIER_COPIES", ["2"]),
    ("KVELASTIC_TIER_STAGING", ["0", "lots"]),
    ("KVELASTIC_TIER_WATERMARK", ["-1", "101%", "half"]),
    ("KVELASTIC_TIER_IDLE_SECONDS", ["never", "nan"]),
    *[
        (f"KVELASTIC_TIER_{n}_SECONDS", ["-1", "nan", "3601"])
        for n in ("RECLAIM", "LIMIT", "SLEEP", "EXIT")
    ],
    ("KVELASTIC_ROLE", ["prefil", "1", "prefill,decode"]),
    ("KVELASTIC_PREFILL_ADDRESS", ["10.0.0.1:5", "tcp://host:5", "tcp://1.2.3.4:0", "unix://a"]),
    ("KVELASTIC_PREFILL_ADDRESS", ["tcp://localhost:5", "tcp://1.2.3:5", "tcp://1.2.3.4:65536"]),
    ("KVELASTIC_PREFILL_ADDRESS", [f"unix:///{'a' * 107}"]),
    ("KVELASTIC_PREFILL_HOLD_SECONDS", ["-1", "nan", "3601"]),
    ("KVELASTIC_TIER_WRITE_RATE", ["0", "-1", "lots"]),
    ("KVELASTIC_TIER_DAILY_WRITE", ["0", "-1", "lots"]),
]


def test_every_variable_has_refused_values() -> None:
    assert {name for name, _ in BAD} == {v.name for v in VARIABLES}


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in BAD for text in texts])
def test_invalid_value_error_names_variable_and_accepted_values(name: str, text: str) -> None:
    variable = next(v for v in VARIABLES if v.name == name)
    with pytest.raises(ConfigError) as caught:
        load({name: text})
    message = str(caught.value)
    assert message.startswith(f"{name}={text!r} is not accepted")
    assert variable.accepts in message


@pytest.mark.slow
@given(st.sampled_from(VARIABLES), st.text(max_size=12))
@settings(deadline=None)
def test_arbitrary_value_is_parsed_or_refused(variable: Any, text: str) -> None:
    refused = ""
    try:
        load({variable.name: text})
    except ConfigError as error:
        refused = str(error)
    assert refused == "" or refused.startswith(f"{variable.name}=")


def test_an_empty_value_counts_as_unset() -> None:
    assert load({v.name: "  " for v in VARIABLES}) == Config()


def test_enabling_implies_autopatch() -> None:
    assert load({"ENABLE_KVELASTIC": "1", "KVELASTIC_AUTOPATCH": "0"}).autopatch
    assert load({"KVELASTIC_AUTOPATCH": "1"}) == Config(autopatch=True)


@pytest.mark.parametrize("legacy", LEGACY)
def test_legacy_name_is_used_if_new_name_unset(
    legacy: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvelastic")
    variable = LEGACY[legacy]
    name, text, value = (
        next(good for good in GOOD if good[0] == variable.name)
        if any(good[0] == variable.name for good in GOOD)
        else (variable.name, "1", 1)
    )
    found = load({legacy: text})
    assert getattr(found, variable.field) == value
    assert load({legacy: text}) == found
    assert [(r.levelname, legacy in r.message, name in r.message) for r in caplog.records] == [
        ("INFO", True, True)
    ]


def test_new_name_overrides_legacy_name_without_warning(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "kvelastic")
    environ = {"KVCACHED_PAGE_SIZE_MB": "oops", "KVELASTIC_PAGE_SIZE_MB": "4"}
    assert load(environ).page_size_mb == 4
    assert caplog.records == []


def test_invalid_legacy_value_error_names_the_legacy_variable() -> None:
    with pytest.raises(ConfigError, match=r"^KVCACHED_PAGE_SIZE_MB='3' is not accepted"):
        load({"KVCACHED_PAGE_SIZE_MB": "3"})


@pytest.mark.parametrize(
    ("unknown", "meant"),
    [
        ("KVELASTIC_PAGE_SIZE", "KVELASTIC_PAGE_SIZE_MB"),
        ("KVELASTIC_LIMITS", "KVELASTIC_LIMIT"),
        ("KVELASTIC_ENABLE", "ENABLE_KVELASTIC"),
        ("KVELASTIC_GPU_UTILISATION", "KVELASTIC_GPU_UTILIZATION"),
    ],
)
def test_unknown_name_warns_once_and_suggests_the_nearest(
    unknown: str, meant: str, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        assert load({unknown: "1", "PATH": "/bin", "KVCACHED_OTHER": "x"}) == Config()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert unknown in record.message
    assert f"is {meant} meant" in record.message


def test_variables_of_the_controller_cause_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    load({"KVELASTIC_LAUNCHED_BY": "1:2", "KVELASTIC_ENGINE_KEY": "key"})

    assert not caplog.records


def test_load_leaves_environment_and_loggers_unchanged() -> None:
    environ = {"KVCACHED_LOG_LEVEL": "DEBUG", "KVELASTIC_DEVICE": "cpu", "NO_COLOR": "1"}
    before = dict(environ)
    assert load(environ) == load(environ)
    assert environ == before
    assert logging.getLogger("kvelastic").handlers == []


@pytest.mark.parametrize(
    ("least", "most", "settled"),
    [("20", "", (20, 20)), ("", "3", (3, 3)), ("2", "", (2, 10)), ("", "30", (5, 30))],
)
def test_default_reserve_is_adjusted_to_the_configured_one(
    least: str, most: str, settled: tuple[int, int]
) -> None:
    found = load({"KVELASTIC_MIN_RESERVED_PAGES": least, "KVELASTIC_MAX_RESERVED_PAGES": most})
    assert (found.min_reserved_pages, found.max_reserved_pages) == settled


def test_contradicting_reserves_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"KVELASTIC_MAX_RESERVED_PAGES=3.*MIN_RESERVED_PAGES"):
        load({"KVELASTIC_MIN_RESERVED_PAGES": "4", "KVELASTIC_MAX_RESERVED_PAGES": "3"})


def test_a_guarantee_above_the_limit_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"MIN=4.00 GiB is above KVELASTIC_LIMIT; set it to 2.00"):
        load({"KVELASTIC_MIN": "4G", "KVELASTIC_LIMIT": "2G"})
    assert load({"KVELASTIC_MIN": "2G", "KVELASTIC_LIMIT": "2G"}).minimum == 2 << 30
    assert load({"KVELASTIC_MIN": "2G", "KVELASTIC_LIMIT": "1%"}).minimum == 2 << 30


def test_name_too_long_beside_kvcached_segment_is_refused() -> None:
    assert load({"KVELASTIC_IPC_NAME": "n" * 64}).ipc_name == "n" * 64
    assert load({"KVCACHED_IPC_NAME": "n" * 50, "ENABLE_KVCACHED": "1"}).kvcached_segment
    with pytest.raises(ConfigError, match="use at most 50 characters"):
        load({"KVCACHED_IPC_NAME": "n" * 51, "ENABLE_KVCACHED": "1"})


def test_limit_resolves_against_a_capacity() -> None:
    assert load({}).limit_bytes(1000) is None
    assert load({"KVELASTIC_LIMIT": "80%"}).limit_bytes(1000) == 800
    assert load({"KVELASTIC_LIMIT": "2K"}).limit_bytes(1000) == 2048


def test_derived_bytes() -> None:
    found = load({"KVELASTIC_PAGE_SIZE_MB": "4", "KVELASTIC_HOST_MEMORY": "3G"})
    assert found.page_size_bytes == 4 << 20
    assert found.host_memory_bytes == 3 << 30
    assert Config().host_memory_bytes == machine_memory_bytes() * 4 // 5


def cgroup_root(tmp_path: Path, membership: str, limits: dict[str, str]) -> Path:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(membership)
    for path, text in limits.items():
        file = tmp_path / "sys/fs/cgroup" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path


PHYSICAL_BYTES = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    ("membership", "limits", "expected"),
    [
        ("0::/\n", {"memory.max": "max\n"}, PHYSICAL_BYTES),
        ("0::/\n", {"memory.max": "1048576\n"}, 1 << 20),
        ("0::/a/b\n", {"a/memory.max": "4096\n", "a/b/memory.max": "max\n"}, 4096),
        ("0::/a/b\n", {"a/memory.max": "8192\n", "a/b/memory.max": "4096\n"}, 4096),
        ("0::/../gone\n", {"memory.max": "4096\n"}, 4096),
        ("3:memory:/x\n2:cpu:/y\n", {"memory/x/memory.limit_in_bytes": "4096\n"}, 4096),
        ("2:cpu:/y\n", {"memory/y/memory.limit_in_bytes": "4096\n"}, PHYSICAL_BYTES),
        ("0::/\n", {"memory.max": f"{1 << 62}\n"}, PHYSICAL_BYTES),
        ("", {}, PHYSICAL_BYTES),
    ],
)
def test_machine_memory_respects_cgroups(
    tmp_path: Path, membership: str, limits: dict[str, str], expected: int
) -> None:
    assert machine_memory_bytes(cgroup_root(tmp_path, membership, limits)) == expected


def test_machine_memory_without_procfs(tmp_path: Path) -> None:
    assert machine_memory_bytes(tmp_path) == PHYSICAL_BYTES


def test_markdown_table_has_a_row_for_each_variable() -> None:
    header, rule, *rows = markdown_table().splitlines()
    assert header.count("|") == rule.count("|") == 5
    assert len(rows) == len(VARIABLES)
    for row, variable in zip(rows, VARIABLES, strict=True):
        assert row.count("|") == 5
        assert row.startswith(f"| `{variable.name}` |")
        assert variable.default in row
        assert variable.accepts.replace(SIZE_FORMS, "a size") in row


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("environ", "stream", "coloured"),
    [
        ({}, Terminal(), True),
        ({}, io.StringIO(), False),
        ({"NO_COLOR": "1"}, Terminal(), False),
        ({"NO_COLOR": ""}, Terminal(), True),
        ({"NO_COLOR": "1", "KVELASTIC_LOG_COLOR": "true"}, Terminal(), False),
        ({"KVELASTIC_LOG_COLOR": "false"}, Terminal(), False),
        ({"KVCACHED_LOG_COLOR": "false"}, Terminal(), False),
    ],
)
def test_colour(environ: dict[str, str], stream: io.StringIO, coloured: bool) -> None:
    configure_logging(load(environ), stream)
    logging.getLogger("kvelastic").warning("limit lowered")
    assert ("\x1b[" in stream.getvalue()) is coloured
    assert f"[kvelastic {os.getpid()}]" in stream.getvalue()


def test_configure_logging_twice_keeps_one_own_handler() -> None:
    log = logging.getLogger("kvelastic")
    foreign = logging.NullHandler()
    log.addHandler(foreign)
    first, second = io.StringIO(), io.StringIO()
    configure_logging(Config(), first)
    configure_logging(Config(log_level="WARNING"), second)
    assert len(log.handlers) == 2
    assert foreign in log.handlers
    log.getChild("pool").warning("said once")
    log.info("not said")
    assert first.getvalue() == ""
    assert second.getvalue().count("said once") == 1
    assert "not said" not in second.getvalue()


def test_records_do_not_reach_the_root_handlers() -> None:
    root, stream = io.StringIO(), io.StringIO()
    handler = logging.StreamHandler(root)
    logging.getLogger().addHandler(handler)
    try:
        configure_logging(Config(), stream)
        logging.getLogger("kvelastic").warning("one line")
    finally:
        logging.getLogger().removeHandler(handler)
    assert root.getvalue() == ""
    assert stream.getvalue().count("one line") == 1


def test_messages_before_logging_setup_are_logged_later() -> None:
    stream = io.StringIO()
    found = load({"KVCACHED_PAGE_SIZE_MB": "4"})
    for _ in range(2):
        configure_logging(found, stream)
        load({"KVCACHED_PAGE_SIZE_MB": "4"})
    assert stream.getvalue().count("KVCACHED_PAGE_SIZE_MB is honoured") == 1


@pytest.mark.slow
def test_variable_warning_is_logged_once_per_process_tree() -> None:
    """An engine has a front, a core and workers, and each of them reads the variables."""
    program = (
        "import subprocess, sys; from kvelastic.config import configure_logging, load\n"
        "configure_logging(load())\n"
        "if len(sys.argv) > 1: subprocess.run([sys.executable, '-c', *sys.argv[1:]], check=True)"
    )
    environ = {**os.environ, "KVCACHED_PAGE_SIZE_MB": "4", "KVELASTIC_NO_SUCH": "1"}
    environ.pop(logs._SAID, None)
    for _ in range(2):  # another tree says it again
        done = subprocess.run(
            [sys.executable, "-c", program, program, program],
            env=environ,
            stderr=subprocess.PIPE,
            text=True,
            check=True,
        )
        assert done.stderr.count("KVCACHED_PAGE_SIZE_MB is honoured") == 1, done.stderr
        assert done.stderr.count("KVELASTIC_NO_SUCH is not a variable") == 1, done.stderr


def test_deferred_info_message_is_dropped_at_error_level() -> None:
    stream = io.StringIO()
    configure_logging(load({"KVCACHED_LOG_LEVEL": "ERROR"}), stream)
    assert stream.getvalue() == ""


def output_of(code: str, **environ: str) -> str:
    return run_python("-c", code, environment=environ).stdout.strip()


def test_the_default_environment_is_the_process_environment() -> None:
    code = "from kvelastic.config import load; print(load().page_size_mb)"
    assert output_of(code, KVELASTIC_PAGE_SIZE_MB="8") == "8"


@pytest.mark.parametrize("module", ["kvelastic", "kvelastic.config", "kvelastic.pool.layout"])
def test_imports_are_light(module: str) -> None:
    heavy = ("torch", "numpy", "difflib", "rich", "click", "kvelastic._vmm")
    code = f"import sys, {module}; print([m for m in {heavy!r} if m in sys.modules])"
    assert output_of(code) == "[]"


def test_importing_kvelastic_imports_no_submodules() -> None:
    # The finder of an editable install may load a few small modules of the standard library.
    code = (
        "import sys, kvelastic; heavy = ('torch', 'logging', 'dataclasses', 'inspect');"
        "print([m for m in sys.modules if m.startswith('kvelastic') or m in heavy])"
    )
    assert output_of(code, **UNMEASURED) == "['kvelastic']"


def test_public_names() -> None:
    code = (
        "import kvelastic, sys\n"
        "assert set(kvelastic.__all__) <= set(dir(kvelastic))\n"
        "assert set(kvelastic._HOMES) | {'__version__'} == set(kvelastic.__all__)\n"
        "assert kvelastic.__all__ == sorted(kvelastic.__all__)\n"
        "for name in kvelastic.__all__: getattr(kvelastic, name)\n"
        "from kvelastic import *\n"
        "assert load_config({}) == Config() and parse_size('1K') == 1024\n"
        "assert 'torch' not in sys.modules\n"
        "try: kvelastic.nothing\n"
        "except AttributeError as error: print(error)"
    )
    assert output_of(code) == "module 'kvelastic' has no attribute 'nothing'"
